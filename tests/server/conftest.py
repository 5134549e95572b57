"""A server on loopback with the default model, for real clients."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from bitnet_inference.model_folder import find_model
from bitnet_inference.models import Models
from bitnet_inference.server import Journal, Listening, ServedModels, ServerOptions, make_front, make_server


class Running:
    """A server behind a port of its own, in a thread."""

    def __init__(
        self,
        served: ServedModels,
        options: ServerOptions | None = None,
        journal: Journal | None = None,
        listening: Listening | None = None,
        **watching: Any,
    ) -> None:
        """`watching`: `watch` and `tracing` of make_front."""
        self.served, options, self._listening = served, options or ServerOptions(), listening or Listening(port=0)
        front = make_front(served, options, journal, **watching)
        self.server = make_server(front, self._listening, options, served.models.close)

    def __enter__(self) -> Running:
        socket = self.server.config.bind_socket()
        socket.listen()  # who connects before the server runs, waits
        self.address = socket.getsockname()
        self.url = self._listening.url.replace(":0", f":{self.address[1]}")
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [socket]})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()


@contextmanager
def running_with_template(folder: Path, name: str, template: str) -> Iterator[Running]:
    """A server whose model is the default one with another chat template; it is written into the folder."""
    shutil.copytree(find_model("default"), folder / "model")
    settings = folder / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    models = Models(max_cache_tokens=2048, threads=1)
    with closing(ServedModels(models, {name: str(folder / "model")})) as served, Running(served) as server:
        yield server


@pytest.fixture(scope="session")
def served() -> Iterator[ServedModels]:
    with closing(ServedModels(Models(max_cache_tokens=4096, threads=1), {"story": "default"})) as models:
        yield models


@pytest.fixture(scope="session")
def running(served: ServedModels) -> Iterator[Running]:
    with Running(served) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as each:
        yield each
