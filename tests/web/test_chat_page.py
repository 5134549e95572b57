"""The page to chat on, in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect
from talking import answered, ask, changed, finished, sent, texts

pytest_plugins = ["browsing"]

QUESTION = "Tell me a story about a brave fox called Mia"


def test_an_answer_streams_and_survives_a_reload(page: Page) -> None:
    page.route("**/v1/chat/completions", changed(temperature=0))
    ask(page, QUESTION)
    finished(page)
    question, answer = texts(page)
    assert question == QUESTION and len(answer) > 100
    expect(page.locator(".cost")).to_contain_text("tokens/s")
    expect(page.locator("#used")).not_to_have_text("0 of 1,024 tokens")
    page.reload()
    page.locator("#talks .open").click()
    assert texts(page) == [question, answer]
    assert page.title() == f"{QUESTION} · bitnet"


def test_the_conversation_goes_on_with_all_before_it(page: Page, answer_with: Callable[[str], None]) -> None:
    answer_with("One.")
    page.locator("#open-settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Stop at").fill("END\n\\n\\n")
    page.keyboard.press("Escape")
    ask(page, "First")
    finished(page)
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "Second")
    finished(page)
    assert request.value.post_data_json == {
        "model": "story", "temperature": 0.5, "stop": ["END", "\n\n"], "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "First"},
            {"role": "assistant", "content": "One."}, {"role": "user", "content": "Second"},
        ],
    }  # fmt: skip
    page.locator("#open-settings").click()
    page.get_by_role("button", name="As the model recommends").click()
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "Third")
    assert not {"temperature", "stop"} & request.value.post_data_json.keys()


def test_escape_stops_and_the_server_cancels(page: Page) -> None:
    count = "async () => (await (await fetch('/stats')).json()).models[0].counts.finished.cancelled ?? 0"
    before = page.evaluate(count)
    page.route("**/v1/chat/completions", changed(ignore_eos=True, overflow="sliding"))  # never ends by itself
    ask(page, QUESTION)
    expect(page.locator(".assistant .text")).to_contain_text("Mia")
    page.keyboard.press("Escape")
    finished(page, "Stopped.")
    expect(page.locator(".cost")).to_contain_text("stopped")
    page.wait_for_function(f"async (before) => await ({count})() > before", arg=before)
    page.get_by_role("button", name="Send").wait_for()


def test_what_is_edited_or_asked_again_stays_beside_it(page: Page, answer_with: Callable[[str], None]) -> None:
    answer_with("First answer")
    ask(page, "Question")
    finished(page)
    answer_with("Second answer")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".assistant .tools")).to_contain_text("2 of 2")
    assert texts(page) == ["Question", "Second answer"]
    page.get_by_role("button", name="Earlier version").click()
    assert texts(page) == ["Question", "First answer"]

    answer_with("Third answer")
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_label("Edit the message").fill("Other question")
    page.keyboard.press("Enter")
    expect(page.locator(".user .tools")).to_contain_text("2 of 2")
    finished(page)
    assert texts(page) == ["Other question", "Third answer"]
    page.get_by_role("button", name="Earlier version").click()
    assert texts(page)[0] == "Question"


def test_screen_readers_hear_each_paragraph_once(page: Page, answer_with: Callable[[str], None]) -> None:
    answer_with("One *a*.\n\n- b\n\nTwo.")
    for _ in range(2):
        ask(page, "Go")
        finished(page)
        spoken = page.get_by_role("log", name="Answer")
        assert spoken.get_attribute("aria-live") == "polite"
        assert spoken.locator("p").all_text_contents() == ["One a.", "b", "Two."]


def test_a_failure_is_told_and_tried_again(page: Page) -> None:
    error = {"error": {"message": "the queue is full: try again later", "type": "rate_limit_error"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=error), times=1)
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_contain_text("the queue is full: try again later")
    assert texts(page) == [QUESTION]
    page.get_by_role("button", name="Try again").click()
    finished(page)
    assert len(texts(page)) == 2 and page.get_by_role("alert").is_hidden()


def test_half_an_answer_is_kept(page: Page) -> None:
    half = 'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
    for told, more in {"ended before": "", "lost it": 'data: {"error": {"message": "lost it"}}\n\n'}.items():
        page.route("**/v1/chat/completions", sent(half + more))
        page.keyboard.press("Control+Shift+O")
        ask(page, QUESTION)
        expect(page.get_by_role("alert")).to_contain_text(told)
        assert texts(page) == [QUESTION, "Half"]


def test_a_server_that_wants_a_key_gets_it(open_page: Callable[..., Page], locked: Any) -> None:
    page = open_page(site=locked)
    for key in ("wrong", "the-right-key"):
        expect(page.locator("#key-why")).to_contain_text("key")
        page.get_by_label("API key", exact=True).fill(key)
        page.keyboard.press("Enter")
    page.get_by_text("of 1,024 tokens").wait_for()
    ask(page, QUESTION)
    finished(page)
    assert page.evaluate("[sessionStorage.length, localStorage.getItem('bitnet.key')]") == [1, None]


def test_a_key_that_is_kept_stays_kept_until_it_is_forgotten(open_page: Callable[..., Page], locked: Any) -> None:
    page = open_page(site=locked)
    page.get_by_label("API key", exact=True).fill("the-right-key")
    page.get_by_label("Keep it in this browser").check()
    page.keyboard.press("Enter")
    page.get_by_text("of 1,024 tokens").wait_for()
    kept = "localStorage.getItem('bitnet.key')"
    page.locator("#open-settings").click()
    for button, left in {"Use the key": "the-right-key", "Forget the key": None}.items():
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name=button).click()
        assert page.evaluate(kept) == left


def test_a_model_without_a_chat_template_goes_on_with_the_text(page: Page) -> None:
    page.get_by_label("Model").select_option("base")
    expect(page.locator("#hint")).to_contain_text("no chat template")
    with page.expect_request("**/v1/completions") as request:
        ask(page, "Once upon ")
    assert request.value.post_data_json["prompt"] == "Once upon "
    finished(page)
    page.locator(".assistant .plain").wait_for(state="attached")


def test_conversations_are_found_renamed_deleted_and_carried(
    page: Page, answer_with: Callable[[str], None], tmp_path: Path
) -> None:
    answer_with("It is about *whales*.")
    ask(page, "First thing")
    finished(page)
    page.keyboard.press("Control+Shift+O")
    answer_with("Nothing.")
    ask(page, "Second thing")
    finished(page)
    rows = page.locator("#talks .open")
    assert rows.all_inner_texts() == ["Second thing", "First thing"]
    page.keyboard.press("Control+K")
    page.keyboard.type("WHALES")
    assert rows.all_inner_texts() == ["First thing"]
    page.keyboard.press("Enter")
    assert texts(page) == ["First thing", "It is about whales."]
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name="Rename: First thing").click()
    page.get_by_label("Title").fill("Whales")
    page.keyboard.press("Enter")
    assert rows.all_inner_texts() == ["Second thing", "Whales"]

    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "talks.json"
    download.value.save_as(file)
    page.get_by_role("button", name="Delete: Whales").click()
    assert rows.all_inner_texts() == ["Second thing"]
    page.get_by_role("button", name="Undo").click()
    assert sorted(rows.all_inner_texts()) == ["Second thing", "Whales"]

    page.evaluate("localStorage.clear()")
    page.reload()
    page.locator("#import-file").set_input_files(file)
    expect(rows).to_have_count(2)
    page.reload()
    assert sorted(rows.all_inner_texts()) == ["Second thing", "Whales"]


def test_a_file_that_is_none_changes_nothing(page: Page, tmp_path: Path) -> None:
    talk = {"id": "1", "title": "", "model": "", "system": "", "created": 1, "updated": 1, "leaf": "1"}
    circle = talk | {"nodes": {"1": {"role": "user", "text": "", "parent": "1"}}}
    broken = json.dumps({"format": "bitnet conversations", "talks": [talk | {"nodes": {}}, circle]})
    for told, text in {"This is no file": "[]", "Conversation 2 of the file": broken}.items():
        (tmp_path / "x.json").write_text(text)
        page.locator("#import-file").set_input_files(tmp_path / "x.json")
        expect(page.get_by_role("alert")).to_contain_text(told)
    assert page.evaluate("localStorage.length") == 0


def test_a_browser_without_room_says_so_and_goes_on(open_page: Callable[..., Page]) -> None:
    full = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); };"
    page = open_page(init=full, prepare=lambda page: page.route("**/v1/chat/completions", answered("Yes.")))
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_contain_text("no room for more")
    finished(page)
    assert texts(page) == [QUESTION, "Yes."]


def test_the_keyboard_is_enough(page: Page, answer_with: Callable[[str], None]) -> None:
    answer_with("Good.")
    page.keyboard.type("One")  # the field has the focus from the start
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    finished(page)
    assert texts(page) == ["One\nTwo", "Good."]
    page.keyboard.press("ArrowUp")
    page.keyboard.type("!")
    page.keyboard.press("Enter")
    expect(page.locator(".user .tools")).to_contain_text("2 of 2")
    assert texts(page)[0] == "One\nTwo!"
    page.reload()
    page.get_by_text("of 1,024 tokens").wait_for()
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none" or seen[-1] in ("message", "chat"), seen  # whose frame shows it
    assert {"skip", "new", "search", "model", "open-settings", "message"} <= set(seen)


def test_a_phone_shows_all_of_it(open_page: Callable[..., Page], site: Any) -> None:
    wide = "x" * 200 + "\n```\n" + "y" * 200 + "\n```\n" + "|a" * 30 + "|\n" + "|-" * 30 + "|\n"
    page = open_page(viewport={"width": 320, "height": 560}, has_touch=True, is_mobile=True)
    page.route("**/v1/chat/completions", answered(wide))
    page.get_by_text("of 1,024 tokens").wait_for()
    ask(page, "z" * 200)
    finished(page)
    for path in ("/", "/dashboard"):
        assert page.evaluate("document.documentElement.scrollWidth") == 320, path
        for button in page.locator("main :is(button, select), body > header button").all():
            box = button.bounding_box()
            if box and button.is_visible():
                assert box["x"] >= 0 and box["x"] + box["width"] <= 320, button
        if path == "/":
            page.locator("#open-sidebar").tap()
            page.get_by_role("button", name="New conversation").tap()
            expect(page.locator("#sidebar")).not_to_be_in_viewport()
            page.locator("#open-settings").tap()
            assert page.locator("#settings").bounding_box()["width"] == 320  # type: ignore[index]
            page.goto(f"{site.url}/dashboard")
            page.locator(".chart").first.wait_for()


def test_light_dark_and_the_switch(open_page: Callable[..., Page]) -> None:
    shade = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    dark, light = open_page(color_scheme="dark"), open_page(color_scheme="light", reduced_motion="reduce")
    assert dark.evaluate(shade) < 60 and light.evaluate(shade) > 200
    switch = light.locator("[data-switch-theme]")
    switch.click()
    switch.click()
    assert light.evaluate(shade) < 60
    light.reload()
    assert light.evaluate(shade) < 60
    assert light.evaluate("getComputedStyle(document.querySelector('#send')).transitionProperty") == "none"
