"""The page to chat on leaves the focus, what is being typed, and the view where they are."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect
from talking import answered, ask, begin, end, finished, titles

pytest_plugins = ["browsing"]

PLACE = "Math.round(document.getElementById('scroller').scrollTop)"


def begin_another(page: Page) -> None:
    """One conversation, and another one whose answer is being written."""
    page.route("**/v1/chat/completions", answered("Yes."))
    ask(page, "One")
    finished(page)
    page.keyboard.press("Control+Shift+O")
    begin(page, "Other", "Long")


def test_who_edits_a_message_goes_on_when_an_answer_ends(page: Page) -> None:
    begin_another(page)
    page.locator("#talks .open", has_text="One").click()
    page.keyboard.press("ArrowUp")
    page.keyboard.type(" and")
    page.keyboard.press("ArrowLeft")
    end(page)
    page.keyboard.type("n")
    expect(page.get_by_label("Edit the message")).to_have_value("One annd")


def test_who_renames_goes_on_when_an_answer_ends(page: Page) -> None:
    begin_another(page)
    page.get_by_role("button", name="Rename: One").press("Enter")
    page.get_by_label("Title").fill("A ti")
    end(page)
    page.keyboard.type("tle")
    page.keyboard.press("Enter")
    assert titles(page) == ["Other", "A title"]
    expect(page.locator("#talks .open", has_text="A title")).to_be_focused()


def test_a_list_that_is_drawn_anew_keeps_the_focus(page: Page) -> None:
    begin_another(page)
    page.get_by_role("button", name="Delete: One").focus()
    end(page)
    expect(page.get_by_role("button", name="Delete: One")).to_be_focused()


def test_an_opened_conversation_is_written_in_at_once(page: Page, answer_with: Callable[[str], None]) -> None:
    answer_with("Yes.")
    ask(page, "One")
    finished(page)
    page.locator("#talks .open").press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_who_is_kept_from_asking_is_told(page: Page) -> None:
    begin_another(page)
    page.keyboard.press("Control+Shift+O")
    ask(page, "Third")
    expect(page.get_by_role("alert")).to_contain_text("Another conversation is being answered")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Third")
    end(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_who_reads_further_up_stays_there_when_the_answer_ends(page: Page) -> None:
    begin(page, "Question", "Line.\n\n" * 100)
    page.mouse.move(600, 300)
    page.mouse.wheel(0, -1000)
    page.locator("#to-end").wait_for()
    before = page.evaluate(PLACE)
    end(page)
    assert page.evaluate(PLACE) == before > 0


def test_the_settings_close_with_any_value(page: Page) -> None:
    page.locator("#open-settings").click()
    page.get_by_label("Temperature").fill("0.72")
    page.locator("#settings").get_by_label("Close").click()
    expect(page.locator("#settings")).to_be_hidden()
