"""Somebody who writes on the page to chat on, and answers in the server's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route, expect

HOLD = """() => {
    const before = window.fetch, encoder = new TextEncoder();
    window.fetch = (address, options) => {
        if (!String(address).includes("/completions")) return before(address, options);
        const body = new ReadableStream({start(pipe) {
            options.signal.addEventListener("abort", () => pipe.error(new DOMException("stopped", "AbortError")));
            const send = (data) => pipe.enqueue(encoder.encode(`data: ${data}\\n\\n`));
            window.say = (content) => send(JSON.stringify({choices: [{delta: {content}}]}));
            window.end = () => { send("[DONE]"); pipe.close(); };
        }});
        return Promise.resolve(new Response(body));
    };
}"""


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Page, words: str = "Done.") -> None:
    expect(page.locator("#status")).to_have_text(words, timeout=60_000)


def texts(page: Page) -> list[str]:
    return page.locator("#log .text").all_inner_texts()


def titles(page: Page) -> list[str]:
    return page.locator("#talks .open").all_inner_texts()


def changed(**fields: Any) -> Callable[[Route], None]:
    """Sends requests on to the server with these fields too."""
    return lambda route: route.continue_(post_data=json.dumps(json.loads(route.request.post_data or "") | fields))


def sent(events: str) -> Callable[[Route], None]:
    """Answers a request in the server's place with these events."""
    return lambda route: route.fulfill(content_type="text/event-stream", body=events)


def answered(text: str) -> Callable[[Route], None]:
    """Answers a chat request in the server's place with this text, in small pieces."""
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    events = [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
    return sent("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")


def hold(page: Page) -> None:
    """From now on an answer gets its text from `say`, and ends with `end`."""
    page.evaluate(HOLD)


def say(page: Page, text: str) -> None:
    page.evaluate("(text) => window.say(text)", text)
    expect(page.locator(".is-writing .text")).to_contain_text(text.strip().split("\n")[-1])


def begin(page: Page, question: str, text: str) -> None:
    """Ask, and be told the beginning of an answer that `end` ends."""
    hold(page)
    ask(page, question)
    say(page, text)


def end(page: Page) -> None:
    page.evaluate("window.end()")
    finished(page)
