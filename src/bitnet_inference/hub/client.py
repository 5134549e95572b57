"""What the Hugging Face Hub, or a mirror of it, says and sends. The one door to huggingface_hub and httpx2.

What is sent is taken for hostile: an answer is read up to a limit, and a file up to the size that was announced.
huggingface_hub is imported where it is used: it stumbles over odd variables then, and HubConfig tells of them before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx2

from bitnet_inference.config import HubConfig
from bitnet_inference.errors import DownloadError, NotFound, said
from bitnet_inference.hub.cache import folder_of, is_commit
from bitnet_inference.hub.names import Wanted

_MAX_LISTING_BYTES = 16 << 20
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_SIZE, _SECONDS = re.compile(r"[0-9]{1,20}"), re.compile(r"[0-9]{1,6}")
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_MAX_REDIRECTS = 10


class Interrupted(DownloadError):
    """What was sent broke off, or did not begin, for a reason that may pass. `retry_after_s`: not before that."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Busy(Interrupted):
    """The hub has answered that it has no answer now."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub announces it. `blob` is the sha256 of its bytes or, of small files, the sha1 that git gives."""

    path: str
    num_bytes: int
    blob: str


class Sink(Protocol):
    """Where a file goes: what is there of it, and what comes."""

    num_bytes: int

    def restart(self) -> None:
        """Forget what is there."""

    def write(self, data: bytes) -> None:
        """Take the next bytes."""


def get_session() -> httpx2.Client:
    """The one that Hugging Face's tools share. Raises DownloadError where the environment leads to none."""
    import huggingface_hub

    try:
        return huggingface_hub.get_session()
    except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:  # the first of what a SOCKS proxy needs
        cure = "check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
        raise DownloadError(f"the network cannot be set up ({said(error)}): {cure}") from None


class Hub:
    """The hub at an endpoint, with a token if there is one."""

    def __init__(self, config: HubConfig) -> None:
        """Raises DownloadError where nothing may be fetched."""
        if config.offline:
            raise DownloadError("HF_HUB_OFFLINE is set, so nothing is fetched: unset it, or use what bitnet list shows")
        self._config = config
        self._shown = re.sub("//[^/]*@", "//", config.endpoint)  # without a password

    def listing(self, wanted: Wanted) -> tuple[str, list[RemoteFile]]:
        """The commit that a revision means, and the files of the repository there.

        Raises NotFound, Busy, Interrupted and DownloadError.
        """
        what = f"{wanted.repository}@{wanted.revision}"
        path = f"/api/models/{wanted.repository}/revision/{quote(wanted.revision, safe='')}?blobs=true"
        with self._answer(path, {}, what) as response:
            if not self._is_ours(response.url):
                raise DownloadError(f"{self._shown} sends us elsewhere for {what}: check HF_ENDPOINT")
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > _MAX_LISTING_BYTES:
                    raise DownloadError(f"{what}: the list of its files has no end: check HF_ENDPOINT")
        try:
            return _parse(json.loads(data))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            where = f"{self._shown} does not answer as the hub does for {what}"
            raise DownloadError(f"{where}: check HF_ENDPOINT and your proxy") from None

    def fetch(self, repository: str, commit: str, file: RemoteFile, sink: Sink) -> None:
        """Send what a sink lacks of a file. Raises NotFound, Busy, Interrupted and DownloadError."""
        path = f"/{repository}/resolve/{commit}/{quote(file.path)}"
        headers = {"Range": f"bytes={sink.num_bytes}-"} if sink.num_bytes else {}
        with self._answer(path, headers, f"{repository}: {file.path}") as response:
            goes_on = bool(sink.num_bytes) and _goes_on(response, sink.num_bytes)
            if (sent := _whole_size(response, goes_on)) not in (None, file.num_bytes):
                why = f"a file of {sent} bytes is sent, not of the {file.num_bytes} that were announced"
                raise DownloadError(f"{repository}: {file.path}: {why}: check HF_ENDPOINT and your proxy")
            if sink.num_bytes and not goes_on:
                sink.restart()
            for chunk in response.iter_bytes():
                sink.write(chunk)

    @contextmanager
    def _answer(self, path: str, headers: Mapping[str, str], what: str) -> Iterator[httpx2.Response]:
        """The answer to a request, redirects followed; the token goes to the endpoint's own host only."""
        sent = {"Accept-Encoding": "identity", "User-Agent": "bitnet-inference", **headers}
        if self._config.token:
            sent["Authorization"] = f"Bearer {self._config.token}"
        timeout = self._config.timeout_s
        try:
            request = get_session().build_request(
                "GET", f"{self._config.endpoint}{path}", headers=sent, timeout=timeout
            )
            with _last_answer(request, what) as response:
                self._check(response, what)
                yield response
        except httpx2.TimeoutException:
            raise Interrupted(
                f"{what}: the hub said nothing for {timeout:g} s: try again, or raise HF_HUB_DOWNLOAD_TIMEOUT"
            ) from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            why = f"{_server(error.request.url)} broke off or cannot be reached ({type(error).__name__})"
            cure = "check your connection, HF_ENDPOINT, and your proxy (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY)"
            raise Interrupted(f"{what}: {why}: {cure}") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, ConnectionError, UnicodeError) as error:  # the last of odd hosts
            raise DownloadError(f"{what}: cannot be asked for ({type(error).__name__}): check HF_ENDPOINT") from None

    def _check(self, response: httpx2.Response, what: str) -> None:
        status, code = response.status_code, response.headers.get("X-Error-Code", "")
        if response.is_success:
            return
        wait_s = _retry_after_s(response)
        later = f"try again in {wait_s} s" if wait_s else "try again later"
        if not code and not self._is_ours(response.url):  # a hub has codes
            why = f"{_server(response.url)}, where the hub sends us, answers {status}"
            raise Interrupted(f"{what}: {why}: {later}, or check your proxy", wait_s)
        if status in (401, 403) or code == "GatedRepo":
            raise DownloadError(f"{what}: {self._refusal(status, code)}")
        if status in (404, 410):
            missing = {"RevisionNotFound": "this revision", "EntryNotFound": "this file"}.get(code, "this repository")
            raise NotFound(
                f"{what}: the hub does not have {missing} (or it is private, and needs HF_TOKEN): check the name"
            )
        if status in _PASSING:
            raise Busy(f"{what}: the hub answers {status}: {later}, or choose a mirror with HF_ENDPOINT", wait_s)
        raise DownloadError(f"{what}: the hub answers {status}: check HF_ENDPOINT and your proxy")

    def _refusal(self, status: int, code: str) -> str:
        if code == "GatedRepo":
            cure = f"ask its owners for access on {self._shown}, and set HF_TOKEN to a token that may read it"
            return f"the repository is gated ({status}): {cure}"
        if self._config.token is None:
            cure = "set HF_TOKEN, or check the name"
            return f"the hub wants to know who asks ({status}), for it is private, or not there: {cure}"
        cure = "take one that may read this repository, or check the name"
        return f"the hub refuses the token in HF_TOKEN ({status}): {cure}"

    def _is_ours(self, url: httpx2.URL) -> bool:
        return _server(url) == _server(httpx2.URL(self._config.endpoint))


@contextmanager
def _last_answer(request: httpx2.Request, what: str) -> Iterator[httpx2.Response]:
    """The answer behind all redirects, whose own bodies are not read: one without an end would fill the memory."""
    for _ in range(_MAX_REDIRECTS + 1):
        response = get_session().send(request, stream=True, follow_redirects=False)
        try:
            if response.next_request is None:
                yield response
                return
        finally:
            response.close()
        if request.url.scheme == "https" != response.next_request.url.scheme:
            raise DownloadError(f"{what}: the hub sends us to an address without https: check HF_ENDPOINT")
        request = response.next_request
    raise httpx2.TooManyRedirects("", request=request)


@contextmanager
def locked(cache: Path, repository: str, blob: str) -> Iterator[None]:
    """Nobody else, no other tool either, fetches this blob meanwhile."""
    file = cache / ".locks" / folder_of(cache, repository).name / f"{blob}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # as its own cache is locked

    with WeakFileLock(file):
        yield


def _parse(answer: Any) -> tuple[str, list[RemoteFile]]:
    commit = answer["sha"]
    if not is_commit(commit):
        raise ValueError(commit)
    return commit, [_file(each) for each in answer["siblings"]]


def _file(fields: Any) -> RemoteFile:
    large = fields.get("lfs")
    path, size = fields["rfilename"], (large or fields)["size"]
    blob, form = (large["sha256"], _SHA256) if large else (fields["blobId"], _SHA1)
    if not isinstance(path, str) or type(size) is not int or size < 0 or not form.fullmatch(blob):
        raise ValueError(path)
    return RemoteFile(path, size, blob)


def _goes_on(response: httpx2.Response, start: int) -> bool:
    """Whether the answer is the rest that was asked for, and not the whole again."""
    return response.status_code == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _whole_size(response: httpx2.Response, goes_on: bool) -> int | None:
    """How large a file is by the answer's word; None where it says nothing of it."""
    if "Content-Encoding" in response.headers:
        return None
    if goes_on:
        size = response.headers["Content-Range"].rpartition("/")[2]
    else:
        size = response.headers.get("Content-Length", "")
    return int(size) if _SIZE.fullmatch(size) else None


def _retry_after_s(response: httpx2.Response) -> int:
    """How long an answer asks to wait; 0 where it says nothing of it, or a date."""
    seconds = response.headers.get("Retry-After", "")
    return int(seconds) if _SECONDS.fullmatch(seconds) else 0


def _server(url: httpx2.URL) -> str:
    """What of an address is the server, as in messages: without a password, in one spelling."""
    return f"{url.scheme}://{url.netloc.decode('ascii')}"
