"""The dashboard, in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from playwright.sync_api import Page, Route, expect

pytest_plugins = ["browsing"]


def test_it_moves_while_the_server_works(open_page: Callable[..., Page], site: Any) -> None:
    page = open_page("/dashboard")
    expect(page.locator("#status")).to_have_text("Live")
    requests = page.locator("#models tr").first.locator("td").nth(5)
    before = requests.inner_text().replace("–", "0")
    body = {"model": "story", "messages": [{"role": "user", "content": "A story"}], "max_tokens": 100, "temperature": 0}
    for _ in range(2):
        httpx.post(f"{site.url}/v1/chat/completions", json=body, timeout=60)
    expect(requests).to_have_text(str(int(before) + 2))
    page.wait_for_function("() => document.querySelector('.line').getAttribute('d').split('L').length > 2")
    heights = page.evaluate("document.querySelector('.line').getAttribute('d').match(/ [\\d.]+/g).map(Number)")
    assert min(heights) < 100, "no moment had any tokens"
    first = page.locator(".chart", has_text="Time to first token").locator(".value")
    expect(first).to_contain_text("s")
    expect(page.locator(".chart", has_text="Memory").locator(".value")).to_contain_text("MB")
    assert page.locator("#models th").all_inner_texts() == ["story", "base"]


def test_failures_are_text_and_a_key_is_asked_for(open_page: Callable[..., Page], locked: Any) -> None:
    def fail(route: Route) -> None:
        answer = route.fetch()
        stats = answer.json()
        if answer.ok:
            stats["failures"] = [{"time": stats["time"], "model": "story", "message": "<img src=x> out of memory"}]
        route.fulfill(response=answer, json=stats)

    page = open_page("/dashboard", site=locked, prepare=lambda page: page.route("**/stats", fail))
    expect(page.locator("#key-why")).to_contain_text("key")
    page.get_by_label("API key", exact=True).fill("the-right-key")
    page.keyboard.press("Enter")
    expect(page.locator("#failures")).to_contain_text("story: <img src=x> out of memory")
    assert page.locator("#failures img").count() == 0
    page.unroute_all(behavior="wait")


def test_nobody_is_asked_while_nobody_looks(open_page: Callable[..., Page]) -> None:
    hide = """Object.defineProperty(document, "hidden", {get: () => window.isAway === true});
    window.numAsked = 0;
    const before = window.fetch;
    window.fetch = (...all) => (window.numAsked++, before(...all));"""
    leave = "(isAway) => { window.isAway = isAway; document.dispatchEvent(new Event('visibilitychange')); }"
    page = open_page("/dashboard", init=hide, prepare=lambda page: page.clock.install())
    expect(page.locator("#status")).to_have_text("Live")
    page.evaluate(leave, True)
    asked = page.evaluate("window.numAsked")
    page.clock.run_for(60_000)
    assert page.evaluate("window.numAsked") == asked
    expect(page.locator("#status")).to_have_text("Paused")
    page.evaluate(leave, False)
    expect(page.locator("#status")).to_have_text("Live")
    assert page.evaluate("window.numAsked") == asked + 1
    page.clock.run_for(1000)
    assert page.evaluate("window.numAsked") == asked + 2


CHART = """async () => {
    const {Lines} = await import(document.querySelector("script[type=module]").src.replace("dashboard.js", "lines.js"));
    const chart = new Lines("Clock", {format: (value) => [String(value), ""]});
    document.body.append(chart.element);
    for (const time of [0, 99, 350, 399, 400]) chart.add(time, [time]);
    const box = chart.picture.getBoundingClientRect();
    chart.plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - box.width / 6}));  // 50 s ago
    chart.add(401, [401]);
    return [chart.value.textContent, chart.lines[0].getAttribute("d").match(/[ML][\\d.]+/g)];
}"""


def test_a_chart_goes_by_the_clock_and_tells_what_is_pointed_at(open_page: Callable[..., Page]) -> None:
    assert open_page("/dashboard").evaluate(CHART) == ["350", ["M249.00", "L298.00", "L299.00", "L300.00"]]
