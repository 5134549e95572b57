"""A server on loopback, and a Chromium that looks at it.

No conftest.py: that is what tests of the server import by this name.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, Request, sync_playwright
from talking import answered

from bitnet_inference.models import Models
from bitnet_inference.server import Listening, ServedModels, ServerOptions, Watch, make_front, make_server, read_keys

BASE_MODEL = Path(__file__).parents[1] / "golden" / "llama-f16"  # it has no chat template
KEY = "the-right-key"
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip


class Two(ServedModels):
    """One model that answers, and one without a chat template, and who counts."""

    def __init__(self) -> None:
        self.watch = Watch()
        models = Models(max_cache_tokens=4096, threads=1, listener=self.watch.listener)
        models.preload()
        models.preload(BASE_MODEL)
        super().__init__(models, {"story": "default", "base": BASE_MODEL})


class Site:
    """A server behind a port of its own."""

    def __init__(self, served: Two, options: ServerOptions) -> None:
        self.served, listening = served, Listening(port=0)
        self._server = make_server(make_front(served, options, watch=served.watch), listening, options)
        socket = self._server.config.bind_socket()
        socket.listen()  # so that nobody is refused before the server runs
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [socket]})

    def __enter__(self) -> Site:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[Two]:
    with closing(Two()) as models:
        yield models


@pytest.fixture(scope="module")
def site(served: Two) -> Iterator[Site]:
    with Site(served, ServerOptions()) as running:
        yield running


@pytest.fixture(scope="module")
def locked(served: Two) -> Iterator[Site]:
    """The same, for those who have the key."""
    with Site(served, ServerOptions(keys=read_keys([KEY]))) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        missing = "Chromium is missing: apt-get install chromium"
        pytest.fail(missing) if "CI" in os.environ else pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def watched() -> Iterator[Callable[[Page], Page]]:
    """Watches a page, which may not complain, break the policy, or ask anybody else for anything."""
    complaints: list[str] = []
    pages: list[Page] = []

    def note_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            complaints.append(message.text)

    def note_error(error: Error) -> None:
        complaints.append(str(error))

    def note_request(request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "blob:", "data:")):
            complaints.append(request.url)

    def begin(page: Page) -> Page:
        pages.append(page)
        page.set_default_timeout(60_000)
        page.on("console", note_message)
        page.on("pageerror", note_error)
        page.on("request", note_request)
        return page

    yield begin
    for page in pages:
        page.remove_listener("console", note_message)
        page.remove_listener("pageerror", note_error)
        page.remove_listener("request", note_request)
    assert not complaints


@pytest.fixture
def open_page(browser: Browser, site: Site, watched: Callable[[Page], Page]) -> Iterator[Callable[..., Page]]:
    """Opens pages in contexts of their own."""
    contexts: list[BrowserContext] = []

    def begin(
        path: str = "/",
        site: Site = site,
        init: str = "",
        prepare: Callable[[Page], Any] = lambda page: None,
        **options: Any,
    ) -> Page:
        contexts.append(browser.new_context(**{"viewport": {"width": 1100, "height": 700}, **options}))
        page = watched(contexts[-1].new_page())
        if init:
            page.add_init_script(init)
        prepare(page)
        page.goto(site.url + path)
        return page

    yield begin
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Page:
    """One for many tests: a new one takes half a second."""
    return browser.new_context(viewport={"width": 1100, "height": 700}).new_page()


@pytest.fixture
def page(tab: Page, site: Site, watched: Callable[[Page], Page]) -> Page:
    """The page to chat on, with the models known and nothing kept."""
    tab.unroute_all(behavior="wait")
    tab.goto(f"{site.url}/version")
    tab.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    page = watched(tab)
    page.goto(site.url)
    page.get_by_text("of 1,024 tokens").wait_for()
    return page


@pytest.fixture
def answer_with(page: Page) -> Callable[[str], None]:
    """From now on the answer to every message is this text."""
    return lambda text: page.route("**/v1/chat/completions", answered(text))
