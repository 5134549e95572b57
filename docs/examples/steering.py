"""The session of docs/extending.md: a processor that forbids repeats, and a strategy that draws typical tokens."""

import numpy as np

from bitnet_inference import LLM, SamplingParams, sampling_noise


def no_repeated_pairs(tokens, logits):
    """No two tokens come in the same order twice."""
    follows_last = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    logits[tokens[follows_last]] = -np.inf


def typical(tokens, logits, seed=7, mass=0.9):
    """Draw among the tokens that are about as surprising as the next token is on average."""
    left = np.flatnonzero(logits > -np.inf)
    weights = np.exp(logits[left] - logits[left].max())
    probabilities = weights / weights.sum()
    surprise = -np.log(probabilities)
    nearest = np.argsort(np.abs(surprise - (probabilities * surprise).sum()), kind="stable")
    reached = np.cumsum(probabilities[nearest])
    kept = np.searchsorted(reached, mass) + 1
    number = sampling_noise(seed, 0, len(tokens)) / 2**64 * reached[:kept][-1]
    return left[nearest[np.searchsorted(reached[:kept], number)]]


with LLM.load("default") as llm:
    params = SamplingParams(temperature=0, max_tokens=30, processors=[no_repeated_pairs])
    print(llm.generate("The fox", params).text)

    llm.register_strategy("typical", typical)
    print(llm.generate("The fox", SamplingParams(max_tokens=30, strategy="typical")).text)
