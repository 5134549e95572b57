"""The page and the dashboard: files of the package, read once, that load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

WEB = Path(__file__).parent / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# In the pages, where the address of the other files has the hash of all of them: a new version has new addresses.
PLACEHOLDER = b"/web/VERSION/"
# Nothing inline, nothing from elsewhere, and no text ever becomes HTML or code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
METHODS = ["GET", "HEAD"]
CHECK_AGAIN, FOREVER = "no-cache", "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class WebFile:
    """A file as it is sent, and its hash."""

    content: bytes
    media_type: str
    etag: str


def read_web(folder: Path = WEB) -> tuple[str, dict[str, WebFile]]:
    """The version of all files together, and each by its name."""
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in TYPES}
    version = _hash(b"".join(contents.values()))
    files = {}
    for name, content in contents.items():
        content = content.replace(PLACEHOLDER, f"/web/{version}/".encode())
        files[name] = WebFile(content, TYPES[Path(name).suffix], f'"{_hash(content)}"')
    return version, files


def add_page(app: FastAPI) -> None:
    """Answer /, /dashboard and what they load."""
    version, files = read_web()

    @app.api_route("/", methods=METHODS, include_in_schema=False)
    async def page(request: Request) -> Response:
        return _sent(request, files["index.html"], CHECK_AGAIN)

    @app.api_route("/dashboard", methods=METHODS, include_in_schema=False)
    async def dashboard(request: Request) -> Response:
        return _sent(request, files["dashboard.html"], CHECK_AGAIN)

    @app.api_route("/web/{asked}/{name}", methods=METHODS, include_in_schema=False)
    async def file(request: Request, asked: str, name: str) -> Response:
        if asked != version or name not in files:
            raise HTTPException(404, "there is no such file: load the page again")
        return _sent(request, files[name], FOREVER)


def _sent(request: Request, file: WebFile, caching: str) -> Response:
    headers = HEADERS | {"Cache-Control": caching, "ETag": file.etag}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
