"""SamplingParams: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: give 0 to 100"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 10**400}, "temperature is inf: give 0 to 100"),
        ({"temperature": "1"}, "temperature is '1': give a number"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": -2}, "top_k is -2: give -1 to"),
        ({"top_k": 1.5}, "top_k is 1.5: give a whole number"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"min_p": -1}, "min_p is -1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1: give -2 to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias is"),
        ({"logit_bias": {1: 101}}, "logit_bias is 101.0: give -100 to 100"),
        ({"logit_bias": {1: math.nan}}, "logit_bias is nan"),
        ({"logit_bias": [1]}, "logit_bias is"),
        ({"seed": 1 << 64}, "seed is"),
        ({"seed": 1.0}, "seed is 1.0: give a whole number"),
        ({"stop": ""}, "stop has an empty string"),
        ({"stop": "a\ud800"}, "stop has half a surrogate pair"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids is"),
        ({"stop": ["a", 1]}, "stop is"),
        ({"stop": 1}, "stop is 1"),
        ({"stop": [str(number) for number in range(257)]}, "stop has 257 strings: give at most 256"),
        ({"stop_token_ids": [True]}, "stop_token_ids is"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"min_tokens": None}, "min_tokens is None"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, max_tokens 4: lower it, or raise"),
        ({"ignore_eos": 1}, "ignore_eos is 1: give True or False"),
        ({"logprobs": 21}, "logprobs is 21: give 0 to 20"),
        ({"logprobs": True}, "logprobs is True"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21: give 0 to 20"),
        ({"prompt_logprobs": 0, "prompt_logprobs_from": -1}, "prompt_logprobs_from is -1"),
        ({"prompt_logprobs_from": 3}, "prompt_logprobs_from is given without prompt_logprobs"),
    ],
)
def test_refused_with_the_place_and_the_cure(options, message):
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_values_are_normalised():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        stop="end",
        stop_token_ids=[np.int32(4)],
        logit_bias={np.int64(1): 2},
    )
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.5, 3, ("end",), (4,))
    assert params.logit_bias == {1: 2.0}
    assert type(params.top_k) is int and type(params.temperature) is float


def test_later_changes_of_the_callers_lists_do_not_count():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 1.0
    assert params.logit_bias == {1: 1.0}


def test_it_can_be_replaced_and_sent_to_another_process():
    params = SamplingParams(seed=3, stop=["a"], logit_bias={1: 1.0})
    assert replace(params, seed=4).seed == 4
    assert pickle.loads(pickle.dumps(params)) == params


def test_from_mapping_names_the_nearest_option():
    assert SamplingParams.from_mapping({"top_k": 3}) == SamplingParams(top_k=3)
    assert SamplingParams.from_mapping({"top_k": -1}) == SamplingParams()  # vLLM's way to say that it is off
    with pytest.raises(InvalidParams, match="unknown sampling option 'temprature': did you mean temperature"):
        SamplingParams.from_mapping({"temprature": 1.0})
    with pytest.raises(InvalidParams, match="sampling options are 5: give a mapping"):
        SamplingParams.from_mapping(5)
    with pytest.raises(InvalidParams, match="there are temperature, top_k"):
        SamplingParams.from_mapping({"zzz": 1})
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_check_against_a_vocabulary():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[0], logprobs=10).check(10)
    for options in ({"logit_bias": {10: 1.0}}, {"stop_token_ids": [-1]}, {"logprobs": 11}, {"prompt_logprobs": 11}):
        with pytest.raises(InvalidParams, match=next(iter(options))):
            SamplingParams(**options).check(10)
