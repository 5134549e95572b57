"""LangChain's OpenAI integration."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from conftest import Running
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

KEY = SecretStr("none")


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]


@pytest.fixture(scope="module")
def chat(running: Running) -> ChatOpenAI:
    return ChatOpenAI(model="story", base_url=f"{running.url}/v1", api_key=KEY, temperature=0, max_retries=0)


def test_an_answer_whole_and_streamed(chat: ChatOpenAI) -> None:
    brief = chat.bind(max_tokens=8)
    whole = brief.invoke("Tell me a story")
    assert whole.usage_metadata and whole.usage_metadata["output_tokens"] == 8
    assert "".join(str(each.content) for each in brief.stream("Tell me a story")) == whole.content

    async def streamed() -> str:
        return "".join([str(each.content) async for each in brief.astream("Tell me a story")])

    assert asyncio.run(streamed()) == whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_has_a_form(chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
    found = chat.with_structured_output(Weather, method=method).invoke("Where is the sun?")
    assert isinstance(found, Weather)


def test_texts_and_vectors(running: Running) -> None:
    options = {"model": "story", "base_url": f"{running.url}/v1", "api_key": KEY, "max_retries": 0}
    assert OpenAI(**options, max_tokens=4).invoke("Once upon")  # type: ignore[arg-type]
    vectors = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)  # type: ignore[arg-type]
    assert len(vectors.embed_documents(["a fox", "a bear"])) == 2
