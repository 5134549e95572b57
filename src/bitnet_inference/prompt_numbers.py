"""What an LLM tells of prompts without continuing them: logits, scores, embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.config import check_progress
from bitnet_inference.embedding import Pool, check_embedding
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.prompt_reader import PromptReader
from bitnet_inference.engine.request import checked_prompt
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import EngineError, InvalidParams
from bitnet_inference.formats.checkpoint import ModelConfig, Pooling
from bitnet_inference.in_flight import read_all
from bitnet_inference.prompts import (
    Progress,
    Prompt,
    ScoreOptions,
    TermOptions,
    encode_each,
    is_one_prompt,
    placed,
    read_terms,
    scoring_params,
)
from bitnet_inference.stream import Generation, Stream


class PromptNumbers(ABC):
    """The part of an LLM that needs nothing of it but its configuration, how to encode a prompt and open a stream."""

    config: ModelConfig

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """The logits at every position of one prompt, [tokens, vocab]: row i tells what follows token i."""
        if not is_one_prompt(prompt):
            raise InvalidParams("logits are of one prompt: call logits for each")
        rows: list[NDArray[np.float32]] = []
        ids = checked_prompt(self._encode(prompt))
        reader = PromptReader(lambda first, logits: rows.append(logits.copy()), range(len(ids)))
        self._compute([ids], [SamplingParams(max_tokens=0)], [reader])
        return np.concatenate(rows)

    @overload
    def score(  # type: ignore[overload-overlap]  # a string is a sequence of strings
        self, prompts: str | Sequence[int], **options: Unpack[ScoreOptions]
    ) -> list[float]: ...
    @overload
    def score(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Unpack[ScoreOptions]
    ) -> list[list[float]]: ...
    def score(
        self,
        prompts: Any,
        *,
        start: int | Sequence[int] = 0,
        progress: Progress | None = None,
        **terms: Unpack[TermOptions],
    ) -> Any:
        """The natural log-probability of every token after those before it; a prompt's first token has 0.0.

        One prompt (a string or a list of token ids) gives a list, many give a list of lists. `start`: only the tokens
        from this position on, for all prompts or one for each; what comes before may be taken from the cache.
        `progress(done, total)` counts prompts. Raises what `generate` raises, and EngineError for a prompt that is not
        computed within its `timeout_s`.
        """
        encoded = self._checked(prompts)
        params = scoring_params(start, len(encoded))
        outputs = self._compute(encoded, params, [None] * len(encoded), progress, read_terms(terms))
        scores = [[0.0 if at is None else at.logprob for at in output.prompt_logprobs or ()] for output in outputs]
        return scores[0] if is_one_prompt(prompts) else scores

    def embed(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        progress: Progress | None = None,
        **terms: Unpack[TermOptions],
    ) -> NDArray[np.float32]:
        """One vector a prompt: [hidden] for one, [prompts, hidden] for many, float32.

        `pooling`: "last" takes the last token's state after the final norm, "mean" the mean over all tokens; None does
        what the model's files say, else "last". `normalize` makes its length 1. Otherwise as `score`.
        """
        check_embedding(pooling, normalize)
        encoded = self._checked(prompts)
        pools = [Pool(len(ids), pooling or self.config.pooling or "last") for ids in encoded]
        params = [SamplingParams(max_tokens=0)] * len(encoded)
        self._compute(encoded, params, [pool.reader for pool in pools], progress, read_terms(terms))
        vectors = np.stack([pool.vector(normalize) for pool in pools])
        return vectors[0] if is_one_prompt(prompts) else vectors

    @abstractmethod
    def _encode(self, prompt: Prompt) -> Sequence[int]: ...

    @abstractmethod
    def _stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        terms: Terms | None = None,
        opening: bool = False,
        **options: Any,
    ) -> Stream: ...

    def _checked(self, prompts: Any) -> list[NDArray[np.int32]]:
        """The token ids of one prompt, or of many."""
        one = is_one_prompt(prompts)
        return list(encode_each([prompts] if one else prompts, lambda prompt: checked_prompt(self._encode(prompt))))

    def _compute(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        readers: Sequence[PromptReader | None],
        progress: Progress | None = None,
        terms: Terms | None = None,
    ) -> list[Generation]:
        """Compute prompts for what is to be known of them; raises EngineError for one that is not done in its time."""
        check_progress(progress)

        def open_stream(index: int) -> Stream:
            return self._stream(prompts[index], params[index], terms, reader=readers[index])

        def report(done: int, _: int | None) -> None:
            if progress is not None:
                progress(done, len(prompts))

        outputs = read_all(range(len(prompts)), open_stream, len(prompts), report)
        for index, output in enumerate(outputs):
            if output.finish_reason != "length":
                why = f"the prompt was not computed within its timeout_s ({output.finish_reason})"
                with placed(index, len(outputs)):
                    raise EngineError(f"{why}: allow it more, or lower the load")
        return outputs
