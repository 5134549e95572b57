"""Callables of users that edit logits or choose tokens: what they see, what they may do, and whom their errors hit."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import sampling_truth
from scripted import Listener, ScriptedModel, generate, greedy_text, run

from bitnet_inference import LLM, native, sampling_noise
from bitnet_inference.engine.draft_model import ModelDrafter
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request
from bitnet_inference.errors import EngineError, InvalidParams

PROMPT = [number % 23 for number in range(1, 11)]


def forbid_repeats(tokens, logits):
    """No token comes twice."""
    logits[np.unique(tokens)] = -np.inf


def second_best(tokens, logits):
    return int(np.argsort(-logits, kind="stable")[1])


class Even:
    """Allows even tokens only; an object with a state, which notes what it sees."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, tokens, logits) -> None:
        self.lengths.append(len(tokens))
        logits[1::2] = -np.inf


def text_without_repeats(model, prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model.logits_after(tokens)
        tokens.append(max(set(range(len(logits))) - set(tokens), key=lambda token: logits[token]))
    return tokens[len(prompt) :]


def test_a_processor_edits_what_is_chosen_from():
    model = ScriptedModel()
    params = SamplingParams(temperature=0.0, max_tokens=12, processors=[forbid_repeats])
    assert generate(model, PROMPT, params).token_ids == text_without_repeats(model, PROMPT, 12)
    assert greedy_text(model, PROMPT, 12) != text_without_repeats(model, PROMPT, 12)


def test_processors_run_in_order_before_all_other_edits():
    seen = []

    def double(tokens, logits):
        logits *= 2

    def note(tokens, logits):
        seen.append((tokens.tolist(), logits.copy()))

    model = ScriptedModel()
    options = {"logit_bias": {3: 50.0}, "repetition_penalty": 1.5, "max_tokens": 2, "temperature": 0.0}
    found = generate(model, PROMPT, SamplingParams(processors=[double, note], **options)).token_ids
    assert [tokens for tokens, _ in seen] == [PROMPT, [*PROMPT, found[0]]]
    for tokens, logits in seen:
        assert np.array_equal(logits, 2 * model.logits_after(tokens)), "before bias and penalties"
    assert found[0] == 3, "the bias still counts"


def test_a_strategy_sees_all_edits_and_chooses():
    seen = []

    def note(tokens, logits):
        seen.append((tokens.tolist(), logits.copy()))
        return second_best(tokens, logits)

    edits = {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.25}
    model = ScriptedModel()
    params = SamplingParams(
        logit_bias={4: 1.5, 7: -2.0}, min_tokens=3, stop_token_ids=[6], max_tokens=8, strategy=note, **edits
    )
    found = generate(model, PROMPT, params, eos_ids=[99]).token_ids  # the tokenizer's, and no token of the model
    for count, (tokens, logits) in enumerate(seen):
        expected = sampling_truth.edited(
            model.logits_after(tokens),
            tokens,
            len(PROMPT),
            bias={4: 1.5, 7: -2.0},
            banned=[6] if count < 3 else [],
            repetition=1.5,
            presence=0.3,
            frequency=0.25,
        )
        assert np.array_equal(logits, expected), "to the bit"
    chosen = [second_best(None, logits) for _, logits in seen]
    assert found == chosen[:-1] and chosen[-1] == 6, "the end token is chosen too"


class Odd:
    """A Constraint that allows odd tokens."""

    is_done = False

    def mask(self):
        return np.full(1, 0xAAAAAAAA, np.uint32)

    def accept(self, token_id):
        assert token_id % 2


def test_the_grammar_holds_for_strategies_and_processors():
    model, steered = ScriptedModel(), SamplingParams(max_tokens=6, strategy=second_best)
    tokens = generate(model, PROMPT, steered, constraint=Odd()).token_ids
    assert len(tokens) == 6 and all(token % 2 for token in tokens)
    banned = generate(model, PROMPT, replace(steered, strategy=lambda tokens, logits: 4), constraint=Odd())
    assert "chose token 4 at position 10, which is banned" in str(banned.finishes[0].error)
    params = SamplingParams(temperature=0.0, max_tokens=6, processors=[Even()])
    nothing = generate(model, PROMPT, params, constraint=Odd())
    assert "leave no token to choose from at position 10" in str(nothing.finishes[0].error)


def test_logprobs_are_the_model_s_own():
    model = ScriptedModel()
    options = {"max_tokens": 5, "logprobs": 2}
    for params in (
        SamplingParams(processors=[Even()], temperature=0.0, **options),
        SamplingParams(strategy=second_best, processors=[Even()], **options),
    ):
        heard = generate(model, PROMPT, params)
        tokens = list(PROMPT)
        for token_id, logprobs in zip(heard.token_ids, heard.logprobs, strict=True):
            logits = model.logits_after(tokens).astype(np.float64)
            own = logits - np.log(np.exp(logits).sum())
            assert logprobs.logprob == pytest.approx(own[token_id])
            assert [token for token, _ in logprobs.top] == np.argsort(-own)[:2].tolist()
            tokens.append(token_id)
    assert any(token % 2 for logprobs in heard.logprobs for token, _ in logprobs.top)


def raise_it(tokens, logits):
    raise RuntimeError("of the user")


def spoil(tokens, logits):
    logits[2] = np.nan


class Unshown(BaseException):
    def __repr__(self):
        raise RuntimeError("cannot be shown")


def raise_unshown(tokens, logits):
    raise Unshown


def error_of(options):
    """What ends a request with these options, and no other."""
    model = ScriptedModel()
    engine, broken, fine = Engine(model), Listener(), Listener()
    engine.submit(Request(PROMPT, SamplingParams(max_tokens=5, **options), broken))
    engine.submit(Request(PROMPT, SamplingParams(max_tokens=5, temperature=0.0), fine))
    run(engine)
    assert broken.reason == "error" and not broken.token_ids
    assert fine.token_ids == greedy_text(model, PROMPT, 5)
    return broken.finishes[0].error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processors": [raise_it]}, "of the user"),
        ({"processors": [lambda tokens, logits: logits]}, "returned ndarray: edit the logits in place"),
        ({"processors": [spoil]}, r"a processor \(spoil\) left NaN or infinity at position 10"),
        ({"processors": [lambda tokens, logits: tokens.fill(0)]}, "read-only"),
        ({"strategy": raise_it}, "of the user"),
        ({"strategy": lambda tokens, logits: sys.exit(3)}, r"raised SystemExit\(3\): have it raise an Exception"),
        ({"strategy": raise_unshown}, "raised Unshown: have it raise an Exception"),
        ({"strategy": lambda tokens, logits: 23}, "chose token 23 at position 10: the vocabulary has 0 to 22"),
        ({"strategy": lambda tokens, logits: -1}, "chose token -1"),
        ({"strategy": lambda tokens, logits: None}, "chose None at position 10: return a token id"),
        ({"strategy": lambda tokens, logits: True}, "chose True"),
    ],
)
def test_their_errors_end_this_request_alone(options, message):
    with pytest.raises((EngineError, RuntimeError, ValueError), match=message):
        raise error_of(options)


@pytest.mark.parametrize("options", [{}, {"strategy": second_best}])
def test_who_bans_all_tokens_is_told_of_a_mistake(options):
    banned = {"processors": [lambda tokens, logits: logits.fill(-np.inf)], **options}
    with pytest.raises(InvalidParams, match="leave no token to choose from at position 10"):
        raise error_of(banned)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NumPy's, for setting these
@pytest.mark.parametrize(
    "change", [{"shape": (-1, 1)}, {"dtype": np.int32}, {"flags.writeable": False}], ids=["shape", "dtype", "flags"]
)
def test_what_it_makes_of_the_array_itself_is_its_own(change):
    def forbid_and_change(tokens, logits):
        forbid_repeats(tokens, logits)
        for name, value in change.items():
            if name == "flags.writeable":
                logits.flags.writeable = value
            else:
                setattr(logits, name, value)

    model = ScriptedModel()
    params = SamplingParams(temperature=0.0, max_tokens=5, processors=[forbid_and_change, forbid_repeats])
    heard = generate(model, PROMPT, params)
    assert heard.token_ids == text_without_repeats(model, PROMPT, 5), heard.finishes


def test_a_broken_row_is_not_the_processor_s_fault():
    model = ScriptedModel()
    model.change_logits = lambda history, logits: logits.fill(np.nan)
    heard = generate(model, PROMPT, SamplingParams(processors=[forbid_repeats]))
    assert "the model's logits hold NaN" in str(heard.finishes[0].error)


@pytest.mark.parametrize("drafts", ["none", "lookup", "model"])
def test_each_is_called_once_a_token_in_order(drafts):
    """Whatever drafts, preemption and neighbours do; so one that keeps a state works."""

    def flat(history, logits):
        logits[:] = model.logits_after(history[-2:]) if len(history) > 2 else logits  # so that texts repeat themselves

    model, now = ScriptedModel(num_blocks=12, max_tokens=40), [0.0]
    model.change_logits = flat
    model.before_forward = lambda batch: now.__setitem__(0, now[0] + 0.01)
    drafters = {"none": None, "lookup": LookupDrafter(), "model": ModelDrafter(model_of(flat), 23, 50)}
    engine = Engine(model, clock=lambda: now[0], drafter=drafters[drafts])
    requests, evens = [], [Even() for _ in range(4)]
    for number, even in enumerate(evens):
        params = SamplingParams(temperature=0.0, max_tokens=25, processors=[even])
        requests.append(Request([number, 2, 4, 2, 4, 2], params, Listener()))
        engine.submit(requests[-1])
    run(engine)
    for request, even in zip(requests, evens, strict=True):
        alone = SamplingParams(temperature=0.0, max_tokens=25, processors=[Even()])
        expected = ScriptedModel()
        expected.change_logits = flat
        assert request.sink.token_ids == generate(expected, request.prompt, alone).token_ids
        assert even.lengths == list(range(6, 31))
    assert drafts != "model" or model.num_forwards < 40, "several tokens a step"


def model_of(flat):
    model = ScriptedModel()
    model.change_logits = flat
    return model


def test_seeds_and_choices_hold_with_processors():
    model, params = ScriptedModel(), SamplingParams(seed=5, max_tokens=9, processors=[forbid_repeats])
    texts = [generate(model, PROMPT, params, choice=choice).token_ids for choice in (0, 1, 0)]
    assert texts[0] == texts[2] != texts[1]
    assert all(len({*PROMPT, *text}) == len(PROMPT) + 9 for text in texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processors": forbid_repeats}, "give a list of callables"),
        ({"processors": "x"}, "give a list of callables"),
        ({"processors": [3]}, "give a list of callables"),
        ({"processors": [""]}, "give a list of callables"),
        ({"strategy": 3}, "strategy is 3: give a callable"),
        ({"strategy": second_best, "temperature": 0.5}, "leave temperature out, or the strategy"),
        ({"strategy": second_best, "seed": 1}, "leave seed out"),
        ({"strategy": second_best, "top_k": 4}, "leave top_k out"),
    ],
)
def test_what_is_impossible_is_refused(options, message):
    with pytest.raises(InvalidParams, match=message):
        SamplingParams(**options)


def test_an_engine_knows_no_names():
    with pytest.raises(InvalidParams, match="'x' is a name: only an LLM knows names"):
        Engine(ScriptedModel()).submit(Request(PROMPT, SamplingParams(processors=["x"]), Listener()))


def test_names():
    with LLM.load("default", threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, processors=["no_repeats"])
        with pytest.raises(InvalidParams, match=r"unknown processor 'no_repeats': none is registered"):
            llm.generate("The fox", params)
        llm.register_processor("no_repeats", forbid_repeats)
        llm.register_strategy("second", second_best)
        given = replace(params, processors=[forbid_repeats])
        assert llm.generate("The fox", params).text == llm.generate("The fox", given).text
        second = llm.stream("The fox", SamplingParams(max_tokens=8, strategy="second")).read()
        assert second.text == llm.generate("The fox", SamplingParams(max_tokens=8, strategy=second_best)).text
        with pytest.raises(InvalidParams, match=r"unknown strategy 'secnd': did you mean second\?"):
            llm.generate("The fox", SamplingParams(strategy="secnd"))
        with pytest.raises(InvalidParams, match="unknown processor 'x': there are no_repeats"):
            llm.choices("The fox", 2, replace(params, processors=["x"]))
        with pytest.raises(InvalidParams, match="there is a processor 'no_repeats' already"):
            llm.register_processor("no_repeats", forbid_repeats)
        with pytest.raises(InvalidParams, match="the strategy 'y' is 3: give a callable"):
            llm.register_strategy("y", 3)
        with pytest.raises(InvalidParams, match="the name of a processor is 7"):
            llm.register_processor(7, forbid_repeats)


def test_noise_takes_the_seeds_of_a_request() -> None:
    assert sampling_noise(7, 0, 3) == sampling_noise(np.int64(7), 0, position=3) == native.sampling_noise(7, 0, 3)
    assert sampling_noise(-1, 0, 3) == sampling_noise((1 << 64) - 1, 0, 3)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((7.5, 0, 3), "seed is 7.5: give a whole number"),
        ((1 << 64, 0, 3), f"seed is {1 << 64}: give "),
        ((7, -1, 3), "choice is -1: give 0 to "),
        ((7, 0, "3"), "position is '3': give a whole number"),
    ],
)
def test_noise_says_which_number_is_wrong(words: tuple[int, int, int], why: str) -> None:
    with pytest.raises(InvalidParams, match=re.escape(why)) as caught:
        sampling_noise(*words)
    assert "\n" not in str(caught.value)


def test_noise_has_types_and_words_for_editors() -> None:
    assert str(inspect.signature(sampling_noise)) == "(seed: 'int', choice: 'int', position: 'int') -> 'int'"
    assert "64 bits" in (sampling_noise.__doc__ or "")
