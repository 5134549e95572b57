"""A file of OpenAI's Batch API, answered by the application itself, in this process: as over HTTP, and without it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from bitnet_inference.batch_files import BatchFiles, BatchResult
from bitnet_inference.config import check_progress
from bitnet_inference.errors import Stopped
from bitnet_inference.in_flight import MAX_IN_FLIGHT
from bitnet_inference.llm import LLM
from bitnet_inference.offline import settings_of
from bitnet_inference.prompts import BatchProgress
from bitnet_inference.server.app import make_app
from bitnet_inference.server.batch_lines import OPENAI_ANSWERS, RequestLine, check_ids, read_request
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.journal import ID_HEADERS, Journaled

# What a body's usage calls the tokens of the prompt and those that were generated.
_USAGE = {"prompt_tokens": "in", "input_tokens": "in", "completion_tokens": "out", "output_tokens": "out"}


@dataclass
class Response:
    """What the application has answered to a request."""

    status: int = 0
    request_id: str = ""
    parts: list[bytes] = field(default_factory=list)

    def json(self) -> Any:
        """Its body."""
        return json.loads(b"".join(self.parts))  # half surrogate pairs too, which orjson refuses


class RequestRun(BatchFiles[RequestLine]):
    """A file of requests and the one of their responses, checked before there is a model; as BatchRun."""

    def __init__(self, input_path: str | Path, output_path: str | Path, *, retry_errors: bool = True) -> None:
        """Raises what BatchRun raises."""
        form = OPENAI_ANSWERS
        super().__init__(input_path, output_path, read_request, form, check_ids, retry_errors=retry_errors)

    def run(self, served: ServedModels, llm: LLM, *, progress: BatchProgress = None) -> BatchResult:
        """Answer what has no answer, with the model that is served, `llm`. No event loop may run in this thread.

        A request that is refused, or fails, has the response that says so, and the others go on. Raises FormatError for
        an output of another model, InvalidParams for files that cannot be read or written any more, and Stopped.
        """
        check_progress(progress)
        self._answers.begin(settings_of(llm, llm.default_params))
        return asyncio.run(self._run(served, llm, progress))

    async def _run(self, served: ServedModels, llm: LLM, progress: BatchProgress) -> BatchResult:
        num_before, start, num_tokens = self.num_done, time.monotonic(), Counter[str]()
        lines, app = self._prompts.lines(self._answers.lacks), Journaled(make_app(served), None)
        async with aclosing(responses(lines, app)) as answered:
            async for line, response in answered:
                body = response.json()
                if response.status >= 500 and not llm.is_open:  # this concerns all of them
                    raise Stopped(body["error"]["message"])
                self._answers.write(line.number, _answer(line, response, body))
                usage = body.get("usage") or {}
                num_tokens.update({_USAGE[name]: usage[name] for name in usage.keys() & _USAGE.keys()})
                if progress is not None:
                    progress(self.num_done, self.num_prompts)
        counts = num_before, self._answers.num_errors, num_tokens["in"], num_tokens["out"]
        return BatchResult(self.num_prompts, *counts, time.monotonic() - start)


async def responses(lines: Iterable[RequestLine], app: ASGIApp) -> AsyncGenerator[tuple[RequestLine, Response], None]:
    """The lines and what the application answers, as that comes.

    Lines are taken as there is room for them: at most MAX_IN_FLIGHT requests are under way. Leaving early cancels them.
    """
    ended: asyncio.Queue[asyncio.Task[Response]] = asyncio.Queue()
    under_way: dict[asyncio.Task[Response], RequestLine] = {}
    num_requests = 0
    try:
        for line in lines:
            while under_way and (num_requests + line.num_requests > MAX_IN_FLIGHT or not ended.empty()):
                done = await ended.get()
                num_requests -= under_way[done].num_requests
                yield under_way.pop(done), done.result()
            task = asyncio.create_task(_ask(app, line))
            under_way[task] = line
            num_requests += line.num_requests
            task.add_done_callback(ended.put_nowait)
        while under_way:
            done = await ended.get()
            yield under_way.pop(done), done.result()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _ask(app: ASGIApp, line: RequestLine) -> Response:
    """What the application answers to one request, whose client stays."""
    response, unsent = Response(), [line.body]

    async def receive() -> Message:
        if not unsent:
            await asyncio.get_running_loop().create_future()  # whoever waits for the client to leave
        return {"type": "http.request", "body": unsent.pop(), "more_body": False}

    try:
        await app(_scope(line), receive, partial(_note, response))
    except Exception:
        if not response.status:  # else that is said, and a defect is in the log
            raise
    return response


async def _note(response: Response, message: Message) -> None:
    if message["type"] == "http.response.start":
        response.status = message["status"]
        response.request_id = dict(message["headers"])[ID_HEADERS[0]].decode()
    else:
        response.parts.append(message.get("body", b""))


def _scope(line: RequestLine) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }


def _answer(line: RequestLine, response: Response, body: Any) -> dict[str, Any]:
    told = {"status_code": response.status, "request_id": response.request_id, "body": body}
    return {"custom_id": line.custom_id, "response": told, "error": None}
