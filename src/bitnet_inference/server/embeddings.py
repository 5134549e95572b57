"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import FastAPI, Request
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from bitnet_inference.errors import InvalidParams
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import encode_each
from bitnet_inference.server.answers import Answers, Asked
from bitnet_inference.server.document import describe
from bitnet_inference.server.failures import CLIENT_GONE, Failure
from bitnet_inference.server.schema import Fields, Prompts, each_of, salt_of


class EmbeddingRequest(Fields):
    """POST /v1/embeddings. `dimensions` can only be what the model has: no model that is read here may be cut."""

    PROMPT: ClassVar[str] = "input"
    TOLD_AS: ClassVar[Mapping[str, str]] = {"prompts": "input"}

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    @property
    def salt(self) -> str:
        """See Fields."""
        return salt_of(self.user)


def add_embeddings(app: FastAPI, answers: Answers) -> None:
    """The route."""

    @app.post("/v1/embeddings", **describe(EmbeddingRequest, "Vectors of texts."))
    async def embeddings(request: Request) -> Response:
        return await answers.compute(request, await answers.read(request, EmbeddingRequest), embed)


def embed(asked: Asked, body: EmbeddingRequest) -> dict[str, Any]:
    """One vector a text, of length 1, pooled as the model's files say. Raises InvalidParams, PromptTooLong."""
    llm, size = asked.llm, asked.llm.config.hidden_size
    if body.dimensions not in (None, size):
        raise InvalidParams(f"dimensions is {body.dimensions}: this model's vectors have {size}: leave it out")

    def progress(done: int, total: int) -> None:
        if asked.gone.is_set():
            raise Failure(CLIENT_GONE, "the client has left")

    ids = list(encode_each(each_of(body.input), lambda prompt: _encode(llm, prompt), "input"))
    vectors = llm.embed(ids, progress=progress, **asked.terms)
    shape = _base64 if body.encoding_format == "base64" else _numbers
    data = [{"object": "embedding", "index": at, "embedding": shape(each)} for at, each in enumerate(vectors)]
    num_tokens = sum(map(len, ids))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": asked.name, "usage": usage}


def _encode(llm: LLM, prompt: str | list[int]) -> list[int]:
    if not prompt:
        raise InvalidParams("the prompt is empty: give some text")
    return llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def _numbers(vector: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
