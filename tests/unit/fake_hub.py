"""A hub on loopback that says what the Hugging Face Hub says, and breaks in the ways that tests ask for."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")  # what the hub keeps apart from git, under its sha256


class FakeHub(ThreadingHTTPServer):
    """One repository, me/tiny, with `files` at the commit `commit`.

    `requests` are (path, Range, Authorization) of all that came. `answer`, where it is set, sees each request first
    and answers it, or returns False.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.commit = dict(files), COMMIT
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.answer: Callable[[_Handler, str], bool] = lambda handler, path: False
        self.change_listing: Callable[[dict[str, Any]], None] = lambda listing: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self, file: str) -> list[str | None]:
        """The ranges that were asked for of a file."""
        return [found for path, found, _ in self.requests if path.endswith(f"/{file}")]

    def listing(self) -> dict[str, Any]:
        listing = {"id": "me/tiny", "sha": self.commit, "siblings": [_sibling(*item) for item in self.files.items()]}
        self.change_listing(listing)
        return listing

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


def blob_name(path: str, data: bytes) -> str:
    if path.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    if not path.endswith(LARGE):
        return {"rfilename": path, "size": len(data), "blobId": blob_name(path, data)}
    large = {"sha256": blob_name(path, data), "size": len(data), "pointerSize": 134}
    return {"rfilename": path, "size": len(data), "blobId": "0" * 40, "lfs": large}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.server.requests.append((path, self.headers["Range"], self.headers["Authorization"]))
        if self.server.answer(self, path):
            return
        if path.startswith("/api/models/me/tiny/revision/"):
            self.send(200, json.dumps(self.server.listing()).encode())
        elif path.startswith(f"/me/tiny/resolve/{self.server.commit}/"):
            self.send_file(self.server.files[path.split("/", 5)[5]])
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def send_file(self, data: bytes, stop: int | None = None) -> None:
        """A file, or the part of it that is asked for; the connection breaks at `stop`."""
        start = int((self.headers["Range"] or "bytes=0-")[6:-1])
        more = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self.send(206 if start else 200, data[start:stop], {"Content-Length": str(len(data) - start), **more})
        if stop is not None:
            self.close_connection = True

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> bool:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        return True

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
