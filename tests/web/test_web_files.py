"""The files of the pages, as the server sends them."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from bitnet_inference.server.page import WEB, read_web

pytest_plugins = ["browsing"]

MAX_PAGE_BYTES = 100_000
ADDRESS = re.compile(r"/web/[0-9a-f]{16}/[\w.]+")


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_a_page_is_small_and_names_only_what_is_there(site: Any, path: str) -> None:
    answer = httpx.get(site.url + path)
    text = answer.text
    size = len(text)
    names = {*ADDRESS.findall(text)}
    while names:
        part = httpx.get(site.url + names.pop())
        content = part.text
        assert part.status_code == 200 and "immutable" in part.headers["Cache-Control"]
        size += len(content)
    for module in WEB.glob("*.js"):
        for name in re.findall(r'from "\./([\w.]+)"', module.read_text()):
            assert (WEB / name).exists(), f"{module.name} imports {name}"
            size += (WEB / name).stat().st_size if path == "/" and module.name == "chat.js" else 0
    assert size < MAX_PAGE_BYTES


def test_policy_and_caching(site: Any) -> None:
    answer = httpx.get(f"{site.url}/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and "unsafe" not in str(policy)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-cache"
    again = httpx.get(f"{site.url}/", headers={"If-None-Match": answer.headers["ETag"]})
    assert again.status_code == 304 and again.content == b""
    head = httpx.head(f"{site.url}/")
    assert head.status_code == 200 and head.headers["Content-Length"] == str(len(answer.content))


def test_nothing_else_is_served(site: Any) -> None:
    version, files = read_web()
    assert httpx.get(f"{site.url}/web/{version}/chat.js").content == files["chat.js"].content
    for path in (f"{version}/../page.py", f"{version}/%2e%2e%2fpage.py", f"{version}/x.js", "0123456789abcdef/chat.js"):
        assert httpx.get(f"{site.url}/web/{path}").status_code == 404, path


def test_another_text_has_another_address(tmp_path: Any) -> None:
    (tmp_path / "index.html").write_text('<script src="/web/VERSION/a.js"></script>')
    versions = []
    for text in ("1", "2"):
        (tmp_path / "a.js").write_text(text)
        version, files = read_web(tmp_path)
        assert files["index.html"].content.decode() == f'<script src="/web/{version}/a.js"></script>'
        versions.append(version)
    assert versions[0] != versions[1]
