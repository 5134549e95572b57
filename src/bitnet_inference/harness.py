"""A model for EleutherAI's lm-evaluation-harness, which is not needed to import this."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bitnet_inference.choices import Continued, score_continued, split
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams
from bitnet_inference.evaluate import windows
from bitnet_inference.llm import LLM

USUAL_MAX_TOKENS = 256


class Instance(Protocol):
    """A request of the harness."""

    args: tuple[Any, ...]


class HarnessModel:
    """The three questions that the harness asks of an `lm_eval.api.model.LM`; mix it into that class.

    Special tokens in texts count, as chat templates need it. What is too long loses its beginning, as in the harness.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__()  # lm_eval's LM, where it is mixed in
        self.llm = llm

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Of (context, continuation): the logarithm of its probability, and whether it is the greedy one."""
        parts = [split(self.llm, self.llm.tokenizer.encode_prompt, *request.args) for request in requests]
        found = score_continued(self.llm, list(map(self._shortened, parts)))
        return [(each.logprob, each.is_greedy) for each in found]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Of (text,): the logarithm of its probability, in windows of the context that share one token."""
        size, parts, owners = self.llm.max_context, [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            ids = split(self.llm, self.llm.tokenizer.encode_prompt, "", text).ids if text else []
            for begin, end, first in windows(len(ids), size, size - 1):
                parts.append(Continued(ids[begin:end], first - begin))
                owners.append(owner)
        logprobs: list[list[float]] = [[] for _ in requests]
        for owner, each in zip(owners, score_continued(self.llm, parts), strict=True):
            logprobs[owner].append(each.logprob)
        return list(map(math.fsum, logprobs))

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Of (context, options): how the context goes on. Raises InvalidParams for options that are not known."""
        prompts, params = [], []
        for context, options in (request.args for request in requests):
            params.append(_params(options))
            room = self.llm.max_context - (params[-1].max_tokens or 0)
            if room < 1:
                raise InvalidParams(f"max_gen_toks fills the context of {self.llm.max_context} tokens: lower it")
            prompts.append(self.llm.tokenizer.encode_prompt(context)[-room:])
        return [output.text for output in self.llm.generate(prompts, params)] if prompts else []

    def _shortened(self, part: Continued) -> Continued:
        excess = min(max(0, len(part.ids) - self.llm.max_context), part.start - 1)
        return Continued(part.ids[excess:], part.start - excess)


def _params(options: Mapping[str, Any]) -> SamplingParams:
    """The harness's names and defaults: greedy unless `do_sample`, at most 256 tokens."""
    given = dict(options)
    stop = given.pop("until", ())
    max_tokens = given.pop("max_gen_toks", USUAL_MAX_TOKENS)
    if not given.pop("do_sample", bool(given.get("temperature"))):
        given["temperature"] = 0.0
    return SamplingParams.from_mapping({"stop": stop, "max_tokens": max_tokens, **given})
