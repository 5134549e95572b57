"""Nobody computes for a client that has left; many at a time are served."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AsyncExitStack, closing
from typing import Any

import pytest
from asgi import HeldLoad, ask
from conftest import Running
from starlette.requests import Request

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, make_app
from bitnet_inference.server.answers import Answers, Asked
from bitnet_inference.server.chat import open_chat
from bitnet_inference.server.connected import while_connected
from bitnet_inference.server.embeddings import EmbeddingRequest, embed
from bitnet_inference.server.failures import CLIENT_GONE, Failure
from bitnet_inference.server.schema import ChatRequest

ENDLESS = {"max_tokens": 100_000, "overflow": "sliding", "ignore_eos": True}
TALK = [{"role": "user", "content": "Tell me a story"}]
REQUESTS = [
    ("/v1/chat/completions", {"messages": TALK, **ENDLESS}),
    ("/v1/completions", {"prompt": ["Once", "Twice"], "n": 2, **ENDLESS}),
]


def is_idle(running: Running) -> bool:
    """Whether nothing is left to do, once a request that came later has been answered."""
    with running.served.models.use("default") as llm:
        llm.generate("Once", SamplingParams(max_tokens=1))
        return not llm.is_busy


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_stream_ends_when_its_client_leaves(running: Running, path: str, body: Any) -> None:
    app = make_app(running.served)
    asyncio.run(
        ask(app, path, body | {"stream": True}, leave_when=lambda got: b"text" in got.body or len(got.chunks) > 3)
    )
    assert is_idle(running)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_leave_before_anything_has_come(running: Running, path: str, body: Any, stream: bool) -> None:
    async def leave_at_once() -> None:
        leave = asyncio.Event()
        leave.set()
        await ask(make_app(running.served), path, body | {"stream": stream}, leave=leave)

    asyncio.run(leave_at_once())
    assert is_idle(running)


def test_the_answer_of_a_client_that_has_left_is_cancelled_while_it_waits(running: Running) -> None:
    async def leave_later() -> None:
        leave, answers = asyncio.Event(), Answers(running.served)
        body = ChatRequest(messages=TALK, **ENDLESS)

        async def receive() -> dict[str, Any]:
            await leave.wait()
            return {"type": "http.disconnect"}

        async with AsyncExitStack() as held:
            answer = await answers.open(held, Request({"type": "http", "headers": []}, receive), body, open_chat)
            asyncio.get_running_loop().call_soon(leave.set)

            with pytest.raises(Failure, match="left"):
                await while_connected(receive, answer.finished())

    asyncio.run(leave_later())
    assert is_idle(running)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *REQUESTS,
        ("/v1/embeddings", {"input": "Once"}),
        ("/tokenize", {"prompt": "Once"}),
        ("/tokenizer_info", None),
    ],
)
def test_who_leaves_while_the_model_is_loaded_does_not_wait_for_it(path: str, body: Any) -> None:
    load = HeldLoad()

    async def leave_it(served: ServedModels) -> tuple[int, int]:
        leave = asyncio.Event()
        asked = asyncio.create_task(ask(make_app(served), path, body, leave=leave))
        await asyncio.to_thread(load.has_begun.wait)
        leave.set()
        try:
            async with asyncio.timeout(60):
                status = (await asked).status
        finally:
            load.may_go_on.set()
        async with served.use("story"):  # by the same door
            return status, models.loaded()[0].num_users

    models = Models(max_cache_tokens=1024, threads=1, progress=load)
    with closing(ServedModels(models, {"story": "default"})) as served:
        assert asyncio.run(leave_it(served)) == (CLIENT_GONE, 1)


def test_vectors_for_nobody_are_given_up(running: Running) -> None:
    gone = threading.Event()
    gone.set()
    with running.served.models.use("default") as llm, pytest.raises(Failure, match="left"):
        embed(Asked(llm, "story", "", {}, gone), EmbeddingRequest(input=["Once upon a time"] * 50))
    assert is_idle(running)


def test_300_streams_at_a_time_give_what_one_gives(running: Running) -> None:
    async def tell(app: Any, seed: int) -> str:
        body = {"prompt": "Once upon", "max_tokens": 6, "seed": seed % 3, "temperature": 1, "stream": True}
        got = await ask(app, "/v1/completions", body)
        assert got.status == 200 and got.body.endswith(b"data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in got.body.decode().splitlines() if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(event["choices"][0]["text"] for event in events)

    async def all_at_once() -> tuple[list[str], list[str]]:
        app = make_app(running.served)
        alone = [await tell(app, seed) for seed in range(3)]
        return alone, await asyncio.gather(*[tell(app, seed) for seed in range(300)])

    alone, together = asyncio.run(all_at_once())
    assert together == alone * 100 and len(set(alone)) > 1
