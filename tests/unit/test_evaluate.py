"""Perplexity and choices, against the plain computation and against Transformers' logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_llm import GREEDY, scripted_llm
from text_samples import TURN, write_folder

from bitnet_inference import (
    LLM,
    InvalidParams,
    OutOfMemory,
    PromptTooLong,
    SamplingParams,
    choices,
    choose,
    evaluate,
    log_likelihoods,
    perplexity,
)
from bitnet_inference.harness import HarnessModel

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = "The brave fox met a small owl near the river, and the owl said hello. " * 12


@pytest.fixture
def llm(tmp_path):
    loaded, loaded.model = scripted_llm(write_folder(tmp_path), num_blocks=2000)
    with loaded:
        yield loaded


def exact(llm, ids):
    """The log-probability of the last of these tokens, in float64."""
    logits = llm.model.logits_after(ids[:-1]).astype(np.float64)
    return logits[ids[-1]] - math.log(np.exp(logits).sum())


def log_softmax(logits):
    logits = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


class TestPerplexity:
    @pytest.mark.parametrize(("window", "stride"), [(40, 10), (40, 39), (40, 1), (7, 3), (2, 1), (256, 100)])
    def test_every_token_is_scored_once_behind_enough_of_the_text(self, llm, window, stride):
        ids = llm.tokenizer.encode(TEXT)[:100]
        scores = []
        for at in range(1, len(ids)):
            begin = 0 if at < window else (at - window) // stride * stride + stride
            assert window - stride <= at - begin < window or at < window
            scores.append(exact(llm, ids[begin : at + 1]))
        found = perplexity(llm, ids, window=window, stride=stride)
        assert found.num_tokens == 99
        assert found.mean_logprob == pytest.approx(math.fsum(scores) / 99, abs=1e-6)
        assert found.perplexity == math.exp(-found.mean_logprob)
        assert (found.window, found.stride, found.num_bytes, found.bits_per_byte) == (window, stride, None, None)

    @pytest.mark.parametrize("num_tokens", [40, 41, 42, 80, 81])
    def test_windows_that_do_not_overlap_lose_their_first_tokens(self, llm, num_tokens):
        ids = llm.tokenizer.encode(TEXT)[:num_tokens]
        scores = [exact(llm, ids[at - at % 20 : at + 1]) for at in range(num_tokens) if at % 20]
        found = perplexity(llm, ids, window=20, stride=20)
        assert found.num_tokens == len(scores) == num_tokens - -(-num_tokens // 20)
        assert found.mean_logprob == pytest.approx(math.fsum(scores) / len(scores), abs=1e-6)

    def test_of_a_text(self, llm):
        found = perplexity(llm, TEXT)
        ids = llm.tokenizer.encode(TEXT)
        assert found == perplexity(llm, TEXT, window=256, stride=128), "the defaults"
        assert found.num_tokens == len(ids) - 1 and found.mean_logprob == perplexity(llm, ids).mean_logprob
        assert found.num_bytes == len(TEXT.encode()), "the token without a score is the BOS"
        assert found.bits_per_byte == pytest.approx(
            -found.mean_logprob * found.num_tokens / math.log(2) / found.num_bytes
        )
        apart = perplexity(llm, TEXT, window=20, stride=20)
        lost = llm.tokenizer.decode(ids[20::20])
        assert apart.num_bytes == len(TEXT.encode()) - len(lost.encode()) and len(lost) > 20

    def test_groups_of_windows_change_nothing_and_progress_is_told(self, llm, monkeypatch):
        whole, seen = perplexity(llm, TEXT, window=20), []
        monkeypatch.setattr(evaluate, "GROUP_TOKENS", 60)
        assert perplexity(llm, TEXT, window=20, progress=lambda *done: seen.append(done)) == whole
        total = seen[0][1]
        assert [done for done, _ in seen] == [*range(3, total, 3), total] and total > 10

    def test_what_cannot_be_is_infinite(self, llm):
        llm.model.change_logits = lambda history, logits: logits[7:].fill(-np.inf)
        found = perplexity(llm, [5, 6, 8, 5])
        assert (found.perplexity, found.mean_logprob) == (math.inf, -math.inf)

    def test_mistakes(self, llm):
        for text in ("", [], [5], [[5, 6]], ["a", "b"], None, 5):
            with pytest.raises(InvalidParams):
                perplexity(llm, text)
        for options in ({"window": 1}, {"window": 257}, {"window": 20, "stride": 21}, {"stride": 0}, {"window": 2.0}):
            with pytest.raises(InvalidParams, match="give a whole number of tokens"):
                perplexity(llm, TEXT, **options)

    @pytest.mark.parametrize("name", ["bitnet-packed", "llama3-bf16"])
    @pytest.mark.parametrize("device", ["cpu", "reference"])
    def test_as_transformers_logits_say(self, name, device):
        golden = np.load(GOLDEN / name / "golden.npz")
        ids = golden["token_ids"]
        scores = log_softmax(golden["logits"])[np.arange(len(ids) - 1), ids[1:]]
        with LLM.load(GOLDEN / name, device=device, cache_dtype="float32", threads=1) as llm:
            found = perplexity(llm, ids.tolist())
        assert found.mean_logprob == pytest.approx(scores.mean(), rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(-scores.mean()), rel=1e-4)

    def test_the_backends_agree_over_windows(self):
        found = []
        for device in ("cpu", "reference"):
            with LLM.load(GOLDEN / "llama3-bf16", device=device, cache_dtype="float32", threads=1) as llm:
                ids = np.random.default_rng(0).integers(0, llm.config.vocab_size, 90).tolist()
                found.append(perplexity(llm, ids, window=32, stride=8))
        assert found[0].perplexity == pytest.approx(found[1].perplexity, rel=1e-4)


class TestChoices:
    PROMPT = "The brave fox met a small owl near the river, and the owl said"

    def test_likelihoods_are_sums_of_log_probabilities(self, llm):
        pairs = [(self.PROMPT, " hello"), (self.PROMPT, " no, never"), ("The", " fox"), (self.PROMPT, " hello")]
        seen = []
        found = log_likelihoods(llm, pairs, progress=lambda *done: seen.append(done))
        assert seen == [(4, 4)]
        for (context, continuation), each in zip(pairs, found, strict=True):
            ids, start = llm.tokenizer.encode(context + continuation), len(llm.tokenizer.encode(context))
            scores = [exact(llm, ids[: at + 1]) for at in range(start, len(ids))]
            assert each.num_tokens == len(scores) >= 1 and not each.is_greedy
            assert each.logprob == pytest.approx(math.fsum(scores), abs=1e-5)
        assert found[0] == found[3] and log_likelihoods(llm, []) == []

    def test_what_is_greedy(self, llm):
        said = llm.tokenizer.encode(" hello hello", add_special_tokens=False)

        def say(history, logits):
            logits[:] = 0
            done = len(history) - len(llm.tokenizer.encode(self.PROMPT))
            logits[said[done] if 0 <= done < len(said) else 3] = 9

        llm.model.change_logits = say
        found = log_likelihoods(llm, [(self.PROMPT, text) for text in (" hello", " hello hello", " hello owl")])
        assert [each.is_greedy for each in found] == [True, True, False]

    def test_the_prompt_is_computed_once(self, llm):
        prompt = TEXT[:300]
        num_prompt = len(llm.tokenizer.encode(prompt))
        assert num_prompt > 60
        choose(llm, prompt, [" a", " b", " c", " d", " e", " f"])
        assert llm.model.num_tokens < num_prompt + 6 * 8

    def test_groups_change_nothing(self, llm, monkeypatch):
        pairs = [(context, " " + word) for context in (self.PROMPT, "The fox", "An owl") for word in "abcd"]
        pairs = pairs[::2] + pairs[1::2]
        whole, seen = log_likelihoods(llm, pairs), []
        monkeypatch.setattr(choices, "GROUP_SIZE", 5)
        assert log_likelihoods(llm, pairs, progress=lambda *done: seen.append(done)) == whole
        assert seen == [(5, 12), (10, 12), (12, 12)]

    def test_the_likeliest_is_chosen(self, llm):
        texts = [" no", " never ever, said the owl", " ééééé"]
        plain = choose(llm, self.PROMPT, texts)
        logprobs = [each.logprob for each in plain.likelihoods]
        assert plain.scores == logprobs and plain.index == int(np.argmax(logprobs))
        for normalize, sizes in (("tokens", [each.num_tokens for each in plain.likelihoods]), ("bytes", [2, 24, 10])):
            found = choose(llm, self.PROMPT, texts, normalize=normalize)
            assert found.scores == [logprob / size for logprob, size in zip(logprobs, sizes, strict=True)]
            assert found.index == int(np.argmax(found.scores))
        assert choose(llm, self.PROMPT, [" no", " no"]).index == 0, "the first among equals"

    def test_a_token_may_reach_over_the_end_of_the_prompt(self, llm):
        """What both texts begin with is the context: a space at its end belongs to the next word."""
        with_space, without = log_likelihoods(llm, [(self.PROMPT + " ", "fox"), (self.PROMPT, " fox")])
        assert with_space == without

    def test_an_empty_prompt(self, llm, monkeypatch):
        ids = llm.tokenizer.encode("The fox")
        (found,) = log_likelihoods(llm, [("", "The fox")])
        assert found.logprob == pytest.approx(sum(llm.score(ids)), abs=1e-9) and found.num_tokens == len(ids) - 1
        encode = llm.tokenizer.encode
        monkeypatch.setattr(llm.tokenizer, "encode", lambda text: encode(text, add_special_tokens=False))
        (found,) = log_likelihoods(llm, [("", "The fox")])
        assert found.logprob == pytest.approx(sum(llm.score([llm.eos_ids[0], *ids[1:]])), abs=1e-9)
        llm.eos_ids = ()
        with pytest.raises(InvalidParams, match="neither BOS nor EOS"):
            log_likelihoods(llm, [("", "The fox")])

    def test_mistakes(self, llm):
        for wrong in ([], "abc", [3], None, [" a", ""], [b"a"]):
            with pytest.raises(InvalidParams):
                choose(llm, "The fox", wrong)
        with pytest.raises(InvalidParams):
            choose(llm, 5, [" a"])
        for pairs in ([("The",)], ["ab"], [("The", 5)], [None]):
            with pytest.raises(InvalidParams, match="strings"):
                log_likelihoods(llm, pairs)
        with pytest.raises(InvalidParams, match="normalize is 'chars'"):
            choose(llm, "The fox", [" a"], normalize="chars")
        with pytest.raises(PromptTooLong, match=r"^pairs\[0\]: context and continuation have"):
            choose(llm, TEXT * 3, [" a", " b"])

    def test_a_cache_that_is_too_small_is_told_as_that(self, tmp_path):
        small, _ = scripted_llm(write_folder(tmp_path), num_blocks=10)
        with small, pytest.raises(OutOfMemory, match="max_cache_tokens"):
            log_likelihoods(small, [(TEXT[:300], " a")])


class TestHarness:
    @pytest.fixture
    def harness(self, llm):
        return HarnessModel(llm)

    def asks(self, *args):
        return [SimpleNamespace(args=each) for each in args]

    def test_it_mixes_with_the_harnesss_own_class(self, llm):
        class LM(ABC):
            def __init__(self):
                self.rank = 0

            @abstractmethod
            def loglikelihood(self, requests): ...

        class BitNet(HarnessModel, LM):
            pass

        assert BitNet(llm).rank == 0 and BitNet(llm).loglikelihood([]) == []

    def test_log_likelihoods(self, harness, llm):
        pairs = [("The fox", " said hello"), ("The fox", " no"), ("", "The owl")]
        expected = [(each.logprob, each.is_greedy) for each in log_likelihoods(llm, pairs)]
        assert harness.loglikelihood(self.asks(*pairs)) == expected
        assert harness.loglikelihood([]) == harness.loglikelihood_rolling([]) == harness.generate_until([]) == []

    def test_special_tokens_count(self, harness, llm):
        ids = llm.tokenizer.encode_prompt(f"The{TURN}")
        assert ids[-1] == llm.tokenizer.special[TURN]
        ((found, _),) = harness.loglikelihood(self.asks(("The", TURN)))
        assert found == pytest.approx(exact(llm, ids), abs=1e-5)

    def test_what_is_too_long_loses_its_beginning(self, harness, llm):
        ids = llm.tokenizer.encode(TEXT * 3 + " fox")[-256:]
        ((found, _),) = harness.loglikelihood(self.asks((TEXT * 3, " fox")))
        num_new = len(llm.tokenizer.encode(TEXT + " fox")) - len(llm.tokenizer.encode(TEXT))
        assert found == pytest.approx(sum(llm.score(ids)[-num_new:]), abs=1e-9)
        with pytest.raises(PromptTooLong):
            harness.loglikelihood(self.asks(("The", TEXT * 3)))

    def test_rolling(self, harness, llm):
        short, long = "The fox said hello", TEXT * 3
        ids = llm.tokenizer.encode(long)
        assert len(ids) > 2 * 256
        *found, nothing = harness.loglikelihood_rolling(self.asks((short,), (long,), ("",)))
        assert nothing == 0.0
        assert found[0] == pytest.approx(sum(llm.score(short)), abs=1e-9)
        result = perplexity(llm, ids, window=256, stride=255)
        assert result.num_tokens == len(ids) - 1
        assert found[1] == pytest.approx(result.mean_logprob * result.num_tokens, abs=1e-6)

    def test_generate_until(self, harness, llm):
        greedy, stopped, drawn = harness.generate_until(
            self.asks(
                ("The fox", {"max_gen_toks": 20}),
                (
                    "The fox",
                    {"until": [llm.generate("The fox", GREEDY).text[3:6]], "do_sample": False, "max_gen_toks": 12},
                ),
                ("The fox", {"temperature": 0.9, "do_sample": True, "seed": 3, "max_gen_toks": 9, "until": "zzz"}),
            )
        )
        assert greedy == llm.generate("The fox", SamplingParams(temperature=0, max_tokens=20)).text
        assert greedy.startswith(stopped) and len(stopped) <= 3
        assert drawn == llm.generate("The fox", SamplingParams(temperature=0.9, seed=3, max_tokens=9)).text
        (after_long,) = harness.generate_until(self.asks((TEXT * 3, {"max_gen_toks": 6})))
        ids = llm.tokenizer.encode(TEXT * 3)[-250:]
        assert after_long == llm.generate(ids, SamplingParams(temperature=0, max_tokens=6)).text
        for options, why in (
            ({"num_beams": 4}, "unknown sampling option 'num_beams'"),
            ({"max_gen_toks": 256}, "fills"),
        ):
            with pytest.raises(InvalidParams, match=why):
                harness.generate_until(self.asks(("The fox", options)))
