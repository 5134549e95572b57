"""Writes the pictures of docs/page.md: the pages in Chromium, with a model that is running.

They differ from time to time: speeds are what they were. Needs Chromium, and a font that is pleasant (Inter).
"""

from __future__ import annotations

import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import httpx
from browsing import ARGUMENTS, Site, Two
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bitnet_inference.server import ServerOptions

QUESTIONS = (
    "Tell me a story about a shy owl called Nora",
    "Tell me a story about a clever mole and a lantern",
    "Tell me a story about a brave fox called Mia",
)
TALK = [
    {"role": "user", "content": "Tell me a story about a kind bear called Otto"},
    {"role": "assistant", "content": "Once upon a time there was a kind bear called Otto who lived by the river. " * 4},
]
PHONE = {"viewport": {"width": 390, "height": 760}, "device_scale_factor": 1.5, "has_touch": True, "is_mobile": True}


def chat(page: Page, url: str, file: Path) -> None:
    page.goto(url)
    page.get_by_text("of 1,024 tokens").wait_for()
    for question in QUESTIONS:
        page.keyboard.press("Control+Shift+O")
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("Done.", timeout=60_000)
    page.screenshot(path=file)


def dashboard(page: Page, url: str, file: Path, seconds: int) -> None:
    """After so many seconds of waves of requests."""
    page.goto(f"{url}/dashboard")
    expect(page.locator("#status")).to_have_text("Live")
    is_over = threading.Event()

    def ask(number: int) -> None:
        rest = 0.3 + 0.4 * (number % 7)
        while not is_over.wait(rest):
            talk = [*TALK, {"role": "user", "content": QUESTIONS[number % 3]}]
            body = {"model": "story", "messages": talk, "max_tokens": 60 + 30 * (number % 5)}
            with suppress(httpx.HTTPError):  # on a machine that stood still
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for at in range(seconds):
        if at % 9 == 4 and threads[0].ident is None:
            for thread in threads:
                thread.start()
        page.wait_for_timeout(1000)
    page.screenshot(path=file)
    is_over.set()
    for thread in threads:
        thread.join()


def write(browser: Browser, url: str, folder: Path, seconds: int) -> None:
    wide = {"viewport": {"width": 1200, "height": 760}}
    chat(browser.new_page(**wide, color_scheme="light"), url, folder / "chat-light.png")
    chat(browser.new_page(**wide, color_scheme="dark"), url, folder / "chat-dark.png")
    chat(browser.new_page(**PHONE, color_scheme="light"), url, folder / "chat-phone.png")
    dashboard(browser.new_page(**wide, color_scheme="light"), url, folder / "dashboard.png", seconds)


def main(folder: str, seconds: str = "200") -> None:
    with closing(Two()) as served, Site(served, ServerOptions()) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        write(browser, site.url, Path(folder), int(seconds))
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
