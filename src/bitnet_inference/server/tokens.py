"""POST /tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from bitnet_inference.errors import InvalidParams
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import ChatOptions, known_variables
from bitnet_inference.server.answers import Answers, Asked
from bitnet_inference.server.document import describe
from bitnet_inference.server.schema import Each, Fields, TokenId, ToolList, check_talk
from bitnet_inference.server.sse import json_response

MAX_TOKENS = 1 << 20


class TokenizeRequest(Fields):
    """POST /tokenize: a text, `prompt`, or a conversation, `messages`, up to where the answer begins.

    A text is what POST /v1/completions makes of it.
    """

    TOLD_AS: ClassVar[Mapping[str, str]] = {"variables": "chat_template_kwargs"}

    prompt: str | None = None
    messages: Annotated[Each[dict[str, Any]], Field(min_length=1)] | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages: give one of them")
        of_talk = ("tools", "add_generation_prompt", "chat_template_kwargs")
        for name in of_talk if self.messages is None else ("add_special_tokens",):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no meaning here: leave it out")
        return self

    def check(self) -> None:
        """See Fields."""
        if self.messages is not None:
            check_talk(self.messages)


class DetokenizeRequest(Fields):
    """POST /detokenize: the text of tokens, special ones too."""

    tokens: Annotated[Each[TokenId], Field(max_length=MAX_TOKENS)]


def add_tokens(app: FastAPI, answers: Answers) -> None:
    """The routes."""

    @app.post("/tokenize", **describe(TokenizeRequest, "The tokens of a text or a conversation."))
    async def tokenize(request: Request) -> Response:
        return await answers.compute(request, await answers.read(request, TokenizeRequest), _tokenize)

    @app.post("/detokenize", **describe(DetokenizeRequest, "The text of tokens."))
    async def detokenize(request: Request) -> Response:
        return await answers.compute(request, await answers.read(request, DetokenizeRequest), _detokenize)

    @app.get("/tokenizer_info", **describe(None, "What lm-evaluation-harness asks of a tokenizer."))
    async def info(request: Request, model: str = "") -> Response:
        async with AsyncExitStack() as held:
            return json_response(_info(await answers.used(held, request, model)))


def _info(llm: LLM) -> dict[str, Any]:
    named, templates = llm.tokenizer.named, llm.tokenizer.templates
    tokens = {name: named.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {"tokenizer_class": "Tokenizer", **tokens, "chat_template": templates.get("default")}


def _tokenize(asked: Asked, body: TokenizeRequest) -> dict[str, Any]:
    llm = asked.llm
    if body.messages is None:
        adds = body.add_special_tokens is not False
        ids = llm.tokenizer.encode(body.prompt or "", add_special_tokens=adds, parse_special=True)
    else:
        is_open = body.add_generation_prompt is not False
        variables = known_variables(llm.tokenizer.templates, body.chat_template_kwargs)
        options: ChatOptions = {"tools": body.tools, "add_generation_prompt": is_open, "variables": variables}
        ids = llm.encode_chat(body.messages, **options)
    texts = [llm.tokenizer.id_to_token(each) for each in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": llm.max_context, "tokens": ids, "token_strs": texts}


def _detokenize(asked: Asked, body: DetokenizeRequest) -> dict[str, Any]:
    try:
        return {"prompt": asked.llm.tokenizer.decode(body.tokens, skip_special_tokens=False)}
    except InvalidParams as error:
        raise InvalidParams(f"tokens: {error}") from None
