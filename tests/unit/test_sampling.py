"""The native sampler against its plain truth, and against what mathematics says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sampling_truth as truth
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bitnet_inference.native import Executor, RowSampler, SamplingRule, sampling_noise

NO_TOKENS = np.zeros(0, dtype=np.int32)
OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bias_ids": [],
    "bias_values": [],
    "end_ids": [],
}


def random_logits(seed: int, vocab_size: int, spread: float, coarse: bool = False) -> NDArray[np.float32]:
    logits = np.random.default_rng(seed).normal(0, spread, vocab_size).astype(np.float32)
    return np.round(logits) if coarse else logits


def native_sample(logits, *, seed=0, choice=0, position=0, tokens=NO_TOKENS, num_prompt=0, ban_ends=False, **options):
    rule = SamplingRule(len(logits), **{**OFF, **options})
    return RowSampler(len(logits)).sample(logits, rule, tokens, num_prompt, ban_ends, seed, choice, position)


def kept_ids(logits, num_draws=400, **options):
    return {native_sample(logits, position=i, **options) for i in range(num_draws)}


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.7]),
    coarse=st.booleans(),
)
def test_the_best_few_are_enough_for_top_k(seed, top_k, temperature, top_p, coarse):
    logits = random_logits(seed, 300, 2.0, coarse)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": 0.01}
    ids = np.argsort(-logits, kind="stable")[:top_k].astype(np.int32)
    rule, sampler = SamplingRule(300, **{**OFF, **options}), RowSampler(300)
    for position in range(5):
        few = sampler.sample_few(ids, logits[ids], rule, seed, 0, position)
        assert few == native_sample(logits, seed=seed, position=position, **options)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_few_logits_that_are_not_numbers_are_no_choice(value):
    rule = SamplingRule(9, **OFF)
    assert RowSampler(9).sample_few(np.array([4], np.int32), np.array([value], np.float32), rule, 0, 0, 0) < 0


def test_few_logits_stay_inside_the_vocabulary():
    rule, one = SamplingRule(9, **OFF), np.zeros(1, np.float32)
    for ids in ([9], [-1], [1, 2]):
        with pytest.raises(ValueError, match="token id"):
            RowSampler(9).sample_few(np.array(ids, np.int32), one, rule, 0, 0, 0)


@pytest.mark.parametrize(
    ("seed", "choice", "position", "words"),
    [
        (0, 0, 0, 0xE169C58D_6627E8D5),
        ((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1, 0x41C83B0E_408F276D),
        (0x299F31D0_A4093822, 0x03707344_13198A2E, 0x85A308D3_243F6A88, 0x94FDCCEB_D16CFE09),
    ],
)
def test_noise_is_philox(seed, choice, position, words):
    """The known answers of Random123 1.09 (kat_vectors, philox4x32 10)."""
    assert sampling_noise(seed, choice, position) == truth.noise(seed, choice, position) == words


@pytest.mark.parametrize(
    ("word", "words"),
    [
        (0, [0x531C7E4F, 0x39491EE5, 0x2C855A92, 0x3D6ABF9A]),
        (0xFFFFFFFF, [0xC4189358, 0x1C9CC83A, 0xD5881C67, 0x6A0A89E0]),
    ],
)
def test_the_truth_of_a_tokens_noise_is_threefry(word, words):
    """The known answers of Random123 1.09 (kat_vectors, threefry4x32 13)."""
    given = np.full((4, 1), word, np.uint32)
    assert np.concatenate(truth.threefry(given, given)).tolist() == words


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([1, 2, 63, 64, 65, 200, 1000]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0, 40.0]),
    coarse=st.booleans(),
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 64, 5000]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-300, 0.01, 0.5, 1.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.6, -2.0]),
    frequency=st.sampled_from([0.0, 0.4]),
)
def test_equal_to_the_plain_truth(
    seed, vocab_size, spread, coarse, temperature, top_k, top_p, min_p, repetition, presence, frequency
):
    random = np.random.default_rng(seed)
    logits = random_logits(seed, vocab_size, spread, coarse)
    tokens = random.integers(0, vocab_size, 12).astype(np.int32)
    bias = {int(i): float(v) for i, v in zip(random.integers(0, vocab_size, 3), random.normal(0, 2, 3), strict=True)}
    banned = [] if vocab_size == 1 else [int(tokens[0])]
    x = truth.edited(
        logits, tokens, 5, bias=bias, banned=banned, repetition=repetition, presence=presence, frequency=frequency
    )
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    before = logits.copy()
    for position in range(4):
        expected = truth.sample(x, bits=truth.noise(seed, 1, position), **filters)
        penalties = {
            "repetition_penalty": repetition,
            "presence_penalty": presence,
            "frequency_penalty": frequency,
            "bias_ids": list(bias),
            "bias_values": list(bias.values()),
        }
        where = {"seed": seed, "choice": 1, "position": position, "tokens": tokens, "num_prompt": 5}
        token = native_sample(logits, **where, ban_ends=True, end_ids=banned, **filters, **penalties)
        assert token == expected
    assert (logits == before).all(), "the row must come back as it was"


def test_equal_to_the_plain_truth_on_a_large_vocabulary():
    logits = random_logits(5, 128256, 3.0)
    for position, options in enumerate(
        [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.5}]
    ):
        filters = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
        expected = truth.sample(logits, bits=truth.noise(7, 0, position), **filters)
        assert native_sample(logits, seed=7, position=position, **filters) == expected


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1000),
    order=st.sampled_from(["random", "ascending", "descending", "hidden peaks", "seen peaks", "ties"]),
    spread=st.sampled_from([0.0, 1.0, 3.0, 9.0]),
    temperature=st.sampled_from([0.3, 0.8, 100.0]),
    top_p=st.sampled_from([0.0, 0.01, 0.5, 0.95, 0.9999999, 1 - 2**-53]),
)
def test_top_p_whatever_the_order_of_the_row(seed, order, spread, temperature, top_p):
    logits = random_logits(seed, 5000, spread, order == "ties")
    if order in ("ascending", "descending"):
        logits = np.sort(logits)[:: 1 if order == "ascending" else -1].copy()
    if order.endswith("peaks"):
        logits[(64 if order == "hidden peaks" else 0) :: 1024] += np.float32(8)
    options = {"temperature": temperature, "top_p": top_p}
    for position in range(2):
        bits = truth.noise(seed, 0, position)
        expected = truth.sample(logits, bits=bits, top_k=0, min_p=0.0, **options)
        assert native_sample(logits, seed=seed, position=position, **options) == expected


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_rows_at_once_are_each_of_them_alone(threads):
    vocab_size, executor = 40000, Executor("generic", threads)
    logits = np.stack([random_logits(row, vocab_size, 1.0 + row % 3) for row in range(20)])
    logits[7, 3] = np.nan
    tokens, before = np.arange(9, dtype=np.int32), logits.copy()
    filters = [{}, {"top_p": 0.9}, {"top_k": 100}, {"min_p": 0.1}, {"temperature": 0.0}]
    options = [{**OFF, **filters[row % 5], "presence_penalty": row % 2, "end_ids": [1]} for row in range(20)]
    rows = [row for row in range(20) if row != 4]
    draws = [(row, SamplingRule(vocab_size, **options[row]), tokens, 3, True, 5, row, 9) for row in rows]
    alone = [RowSampler(vocab_size).sample(logits[row], *given) for row, *given in draws]
    assert alone[rows.index(7)] == -1
    sampler = RowSampler(vocab_size)
    for _ in range(3):
        assert sampler.sample_rows(executor, logits, draws) == alone
    assert np.array_equal(logits, before, equal_nan=True)


@pytest.mark.parametrize(
    "change",
    [
        {0: 2},
        {0: 0, 1: SamplingRule(8, **OFF)},
        {1: None},
        {2: None},
        {2: np.array([9], np.int32)},
        {3: 2},
    ],
)
def test_draws_that_do_not_fit_are_refused(change):
    fine = (1, SamplingRule(9, **OFF), np.zeros(1, np.int32), 1, False, 0, 0, 0)
    broken = tuple(change.get(place, value) for place, value in enumerate(fine))
    logits, sampler, executor = np.zeros((2, 9), np.float32), RowSampler(9), Executor("generic", 1)
    assert len(sampler.sample_rows(executor, logits, [fine])) == 1
    for draws in ([broken], [fine, fine]):
        with pytest.raises((ValueError, TypeError), match=r"\w"):
            sampler.sample_rows(executor, logits, draws)
    with pytest.raises(ValueError, match="column"):
        sampler.sample_rows(executor, np.zeros((2, 8), np.float32), [fine])


def test_frequencies_are_the_softmax():
    logits = random_logits(1, 9, 1.5)
    num_draws, temperature = 20000, 0.7
    rule, sampler = SamplingRule(9, **{**OFF, "temperature": temperature}), RowSampler(9)
    draws = [sampler.sample(logits, rule, NO_TOKENS, 0, False, 3, 0, i) for i in range(num_draws)]
    scaled = logits.astype(np.float64) / temperature
    expected = np.exp(scaled) / np.exp(scaled).sum() * num_draws
    chi_squared = ((np.bincount(draws, minlength=9) - expected) ** 2 / expected).sum()
    assert chi_squared < 26.1  # 8 degrees of freedom, p = 0.001; the seed is fixed


def test_weights_are_exponentials():
    d = np.linspace(0, 30, 100001).astype(np.float32)
    relative = truth.exp_of_minus(d) / np.exp(-d.astype(np.float64))
    assert abs(relative - 1).max() < 2e-6
    assert abs(relative[d < 1] - 1).max() < 3e-7
    assert truth.weights(np.array([2.0, -np.inf, 2.0, -40.0], dtype=np.float32), 1.0) == [1 << 40, 0, 1 << 40, 0]


def test_greedy_takes_the_lowest_id_among_equals():
    assert native_sample(np.array([1, 3, 2, 3], dtype=np.float32), temperature=0.0) == 1


def test_filters_break_ties_by_the_lowest_id():
    logits = np.array([0, 1, 1, 1, 1], dtype=np.float32)
    assert kept_ids(logits, top_k=2) == {1, 2}
    assert kept_ids(logits, top_p=0.4) == {1, 2}
    assert kept_ids(logits, min_p=0.9) == {1, 2, 3, 4}


def test_top_k_and_top_p_and_min_p_keep_what_they_say():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], dtype=np.float32))
    assert kept_ids(logits) == {0, 1, 2, 3}
    assert kept_ids(logits, top_k=3) == {1, 2, 3}
    assert kept_ids(logits, top_p=0.65) == {1, 3}
    assert kept_ids(logits, top_p=0.0) == {1}
    assert kept_ids(logits, min_p=0.6) == {1, 3}
    assert kept_ids(logits, top_k=3, top_p=0.75) == {1, 3}, "top-p counts what top-k left: 0.3 + 0.4 of 0.9"


def test_repetition_penalty_counts_prompt_and_output():
    logits = np.array([1.0, 0.9, -1.0, -1.1], dtype=np.float32)
    prompt = {"temperature": 0.0, "tokens": np.array([0, 2], dtype=np.int32), "num_prompt": 2}
    assert native_sample(logits, **prompt) == 0
    assert native_sample(logits, **prompt, repetition_penalty=1.2) == 1, "positive logits are divided"
    low = {"bias_ids": [0, 1], "bias_values": [-100.0, -100.0]}
    assert native_sample(logits, **prompt, **low) == 2
    assert native_sample(logits, **prompt, **low, repetition_penalty=1.2) == 3, "negative logits are multiplied"
    assert native_sample(logits, **{**prompt, "num_prompt": 0}, repetition_penalty=1.2) == 1


def test_presence_and_frequency_penalties_count_the_output_alone():
    logits = np.array([1.0, 0.9, 0.8], dtype=np.float32)
    tokens = np.array([0, 0, 1, 0], dtype=np.int32)

    def best(num_prompt, **penalties):
        return native_sample(logits, temperature=0.0, tokens=tokens, num_prompt=num_prompt, **penalties)

    assert best(4, presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert best(3, presence_penalty=0.15) == 1
    assert best(0, presence_penalty=0.15) == 0, "0.85, 0.75 and 0.8: once, however often it occurs"
    assert best(0, frequency_penalty=0.04) == 0, "0.88 and 0.86"
    assert best(0, frequency_penalty=0.06) == 1, "0.82 and 0.84"
    assert best(0, frequency_penalty=0.15) == 2, "0.55, 0.75 and 0.8"


def test_ends_are_banned_only_on_request():
    logits = np.array([0.0, 5.0], dtype=np.float32)
    assert native_sample(logits, temperature=0.0, end_ids=[1]) == 1
    assert native_sample(logits, temperature=0.0, end_ids=[1], ban_ends=True) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [3, 64, 100, 1000])
def test_rows_without_a_token(vocab_size, temperature):
    for bad in (np.nan, np.inf):
        for place in (0, vocab_size // 2, vocab_size - 1):
            logits = random_logits(0, vocab_size, 1.0)
            logits[place] = bad
            assert native_sample(logits, temperature=temperature) == -1
    nothing = np.full(vocab_size, -np.inf, dtype=np.float32)
    assert native_sample(nothing, temperature=temperature) == -2
    assert native_sample(nothing, temperature=temperature, top_k=2, top_p=0.5, min_p=0.1) == -2


def test_minus_infinity_is_never_chosen():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], dtype=np.float32)
    assert kept_ids(logits, temperature=100.0) == {1, 3}
    assert kept_ids(logits, temperature=100.0, min_p=1e-6, top_k=3) == {1, 3}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), vocab_size=st.sampled_from([1, 5, 64, 777]), spread=st.sampled_from([0.0, 1.0, 20.0]))
def test_log_probabilities(seed, vocab_size, spread):
    logits = random_logits(seed, vocab_size, spread)
    wide = logits.astype(np.float64) - logits.max()
    exact = wide - math.log(np.exp(wide).sum())
    chosen, best = RowSampler(vocab_size).score(logits, vocab_size - 1, 3)
    order = sorted(range(vocab_size), key=lambda i: (-logits[i], i))[:3]
    assert [token_id for token_id, _ in best] == order
    assert chosen == pytest.approx(exact[-1], abs=1e-6)
    assert [logprob for _, logprob in best] == pytest.approx(exact[order], abs=1e-6)
    rows = np.stack([logits, logits[::-1]])
    both = RowSampler(vocab_size).log_probabilities(rows, np.array([vocab_size - 1, 0], dtype=np.int32))
    assert both == [chosen, chosen], "sums of weights do not depend on their order"


def test_log_probabilities_of_a_broken_row_are_nan():
    logits = np.array([0.0, np.nan], dtype=np.float32)
    chosen, best = RowSampler(2).score(logits, 0, 2)
    assert math.isnan(chosen) and best == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: native_sample(np.zeros(4, np.float32), tokens=np.array([4], np.int32)),
        lambda: native_sample(np.zeros(4, np.float32), tokens=np.array([-1], np.int32)),
        lambda: native_sample(np.zeros(4, np.float32), num_prompt=1),
        lambda: native_sample(np.zeros(4, np.float32), bias_ids=[4], bias_values=[1.0]),
        lambda: native_sample(np.zeros(4, np.float32), bias_ids=[1], bias_values=[]),
        lambda: native_sample(np.zeros(4, np.float32), end_ids=[9]),
        lambda: native_sample(np.zeros(4, np.float32), temperature=math.nan),
        lambda: native_sample(np.zeros(4, np.float32), top_p=1.1),
        lambda: native_sample(np.zeros(4, np.float32), repetition_penalty=0.0),
        lambda: RowSampler(0),
        lambda: RowSampler(3).score(np.zeros(4, np.float32), 0, 1),
        lambda: RowSampler(4).score(np.zeros(4, np.float32), 4, 1),
        lambda: RowSampler(4).log_probabilities(np.zeros((2, 4), np.float32), np.zeros(1, np.int32)),
        lambda: RowSampler(5).sample(np.zeros(5, np.float32), SamplingRule(4, **OFF), NO_TOKENS, 0, False, 0, 0, 0),
    ],
)
def test_what_does_not_fit_is_refused(call):
    with pytest.raises(ValueError, match=r"\w"):
        call()


def test_other_dtypes_and_strides_are_refused():
    for logits in (np.zeros(4), np.zeros(8, np.float32)[::2], np.zeros((2, 2), np.float32)):
        with pytest.raises(TypeError):
            RowSampler(4).sample(logits, SamplingRule(4, **OFF), NO_TOKENS, 0, False, 0, 0, 0)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([1, 31, 32, 33, 300, 1000]),
    share=st.sampled_from([0.02, 0.5, 1.0]),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.integers(1, 40),
            "top_p": st.floats(0.1, 1.0),
            "min_p": st.floats(0.0, 0.5),
            "repetition_penalty": st.sampled_from([0.5, 1.5]),
            "frequency_penalty": st.sampled_from([-1.0, 0.5]),
        },
    ),
)
def test_a_mask_is_minus_infinity_before_everything_else(seed, vocab_size, share, temperature, options):
    random = np.random.default_rng(seed)
    logits = random_logits(seed, vocab_size, 2.0)
    allowed = random.random(vocab_size) < share
    bits = np.packbits(allowed, bitorder="little")
    mask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)  # bits past the vocabulary mean nothing
    mask.view(np.uint8)[: len(bits)] = bits
    history = {"tokens": random.integers(0, vocab_size, 9).astype(np.int32), "num_prompt": 4}
    biased = random.integers(0, vocab_size, 3).tolist()
    edits = {"bias_ids": biased, "bias_values": [100.0] * 3, "temperature": temperature, **options}
    rule = SamplingRule(vocab_size, **{**OFF, **edits})
    before = logits.copy()
    given_mask = RowSampler(vocab_size).sample(logits, rule, *history.values(), False, seed, 0, 5, mask)
    assert (logits == before).all()
    logits[~allowed] = -np.inf
    assert given_mask == native_sample(logits, seed=seed, position=5, **history, **edits)
    assert given_mask == -2 if not allowed.any() else allowed[given_mask]


@pytest.mark.parametrize("mask", [np.zeros(3, np.uint32), np.zeros(4, np.int32), np.zeros(8, np.uint32)[::2]])
def test_a_mask_that_does_not_fit_is_refused(mask):
    rule = SamplingRule(100, **OFF)
    with pytest.raises((ValueError, TypeError)):
        RowSampler(100).sample(random_logits(1, 100, 1.0), rule, NO_TOKENS, 0, False, 0, 0, 0, mask)
