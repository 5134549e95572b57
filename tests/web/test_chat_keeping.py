"""What the page to chat on keeps in the browser: with little room, from files, and from another tab."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from talking import answered, ask, begin, end, finished, hold, texts, titles

pytest_plugins = ["browsing"]

FULL = """() => {
    let size = 1 << 20;
    const talk = {id: "big", title: "Big", created: 1, updated: 1, model: "story", system: "", leaf: "1",
        nodes: {1: {id: "1", parent: null, role: "user", text: "x".repeat(1 << 19)}}};
    localStorage.setItem("bitnet.talk.big", JSON.stringify(talk));
    for (let at = 0; size >= 1; at++) {
        try { localStorage.setItem(`filled${at}`, "x".repeat(size)); } catch { size >>= 1; }
    }
}"""
TEXTS = """(title) => Object.values(localStorage).filter((each) => each.includes(title))
    .flatMap((each) => Object.values(JSON.parse(each).nodes).map((node) => node.text))"""


@pytest.fixture
def other(page: Page) -> Iterator[Page]:
    """Another tab, whose answers are "Yes."."""
    other = page.context.new_page()
    other.route("**/v1/chat/completions", answered("Yes."))
    yield other
    other.close()


def look(other: Page, page: Page) -> None:
    other.goto(page.url)
    other.get_by_text("of 1,024 tokens").wait_for()


def bring(page: Page, file: Path, *talks: dict[str, Any]) -> None:
    file.write_text(json.dumps({"format": "bitnet conversations", "version": 1, "talks": talks}))
    page.locator("#import-file").set_input_files(file)


def told(title: str, text: str, updated: int = 1) -> dict[str, Any]:
    nodes = {"1": {"parent": None, "role": "user", "text": text}}
    rest = {"created": 1, "updated": updated, "model": "story", "system": "", "leaf": "1"}
    return {"id": title, "title": title, "nodes": nodes, **rest}


def test_what_another_tab_does_while_an_answer_is_written_here_is_taken_over(page: Page, other: Page) -> None:
    page.route("**/v1/chat/completions", answered("Yes."))
    for title in ("First", "Second"):
        page.keyboard.press("Control+Shift+O")
        ask(page, title)
        finished(page)
    hold(page)
    page.keyboard.press("Control+Shift+O")
    ask(page, "Third")
    look(other, page)
    other.get_by_role("button", name="Delete: Second").press("Enter")
    other.locator("#talks .open", has_text="First").click()
    ask(other, "More")
    finished(other)
    end(page)
    assert sorted(titles(page)) == ["First", "Third"]
    page.locator("#talks .open", has_text="First").click()
    assert texts(page) == ["First", "Yes.", "More", "Yes."]


def test_two_tabs_write_in_one_conversation(page: Page, other: Page) -> None:
    begin(page, "From here", "Long")
    look(other, page)
    other.get_by_role("button", name="Rename: From here").press("Enter")
    other.get_by_label("Title").fill("Of two")
    other.keyboard.press("Enter")
    other.locator("#talks .open").click()
    ask(other, "From there")
    finished(other)
    page.wait_for_function("Object.values(localStorage).some((each) => each.includes('Yes.'))")  # the browser told it
    end(page)
    assert titles(page) == ["Of two"]
    assert sorted(page.evaluate(TEXTS, "Of two")) == ["From here", "From there", "Long", "Yes."]


def test_a_conversation_that_another_tab_deletes_is_answered_no_more(page: Page, other: Page) -> None:
    begin(page, "Gone", "Long")
    look(other, page)
    other.get_by_role("button", name="Delete: Gone").press("Enter")
    finished(page, "Stopped.")
    assert titles(page) == [] and page.evaluate("localStorage.length") == 0


def test_what_had_no_room_is_kept_once_there_is_some(page: Page, answer_with: Callable[[str], None]) -> None:
    page.evaluate(FULL)
    page.reload()
    answer_with("Yes.")
    ask(page, "Important")
    expect(page.get_by_role("alert")).to_contain_text("no room for more")
    finished(page)
    page.get_by_role("button", name="Delete: Big").press("Enter")
    assert page.evaluate(TEXTS, "Important") == ["Important", "Yes."]


def test_an_old_file_leaves_newer_conversations_alone(page: Page, tmp_path: Path) -> None:
    bring(page, tmp_path / "new.json", told("A", "new", updated=2))
    page.locator("#talks .open").wait_for()
    bring(page, tmp_path / "old.json", told("A", "old"), told("B", "old"))
    expect(page.locator("#notice")).to_contain_text("1 conversation is imported. 1 conversation is left alone")
    assert page.evaluate(TEXTS, "A") == ["new"]


def test_what_a_file_has_too_much_is_named(page: Page, tmp_path: Path) -> None:
    bring(page, tmp_path / "x.json", told("A", "a"), told("B", "b" * 6_000_000), told("C", "c"))
    expect(page.locator("#notice")).to_contain_text("2 conversations are imported. The browser has no room for B.")
    page.reload()
    assert sorted(titles(page)) == ["A", "C"]


def test_an_answer_is_kept_when_the_page_is_hidden(page: Page) -> None:
    begin(page, "Question", "Half")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert page.evaluate(TEXTS, "Question") == ["Question", "Half"]
