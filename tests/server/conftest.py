"""A server on loopback with the default model, for real clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, make_app


class Running:
    """An application behind a port of its own."""

    def __init__(self, served: ServedModels) -> None:
        self.served = served
        config = uvicorn.Config(make_app(served), port=0, log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Running:
        socket = self._server.config.bind_socket()
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [socket]})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.served.close()


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with Running(ServedModels(Models(max_cache_tokens=4096, threads=1), {"story": "default"})) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as each:
        yield each
