"""The page to chat on, with several models, and open twice."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, Route, expect
from talking import ask as begin
from talking import finished

pytest_plugins = ["browsing"]


def ask(page: Page, text: str) -> None:
    begin(page, text)
    finished(page)


def test_an_answer_keeps_the_name_of_the_model_that_gave_it(page: Page) -> None:
    page.get_by_label("Model").select_option("base")
    ask(page, "Once upon ")
    page.get_by_label("Model").select_option("story")
    ask(page, "Tell me a story about a shy owl called Nora")
    page.reload()
    page.locator("#talks .open").click()
    assert page.locator(".who").all_inner_texts() == ["You", "base", "You", "story"]


def test_what_another_tab_does_leaves_an_edited_message_alone(page: Page) -> None:
    page.get_by_label("Model").select_option("base")
    ask(page, "Once upon ")
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_label("Edit the message").fill("Twice upon ")
    other = page.context.new_page()
    try:
        other.goto(page.url)
        other.get_by_label("Model").select_option("base")
        ask(other, "A second conversation ")
    finally:
        other.close()
    expect(page.locator("#talks .open")).to_have_count(2)
    expect(page.get_by_label("Edit the message")).to_have_value("Twice upon ")
    page.get_by_label("Edit the message").press("Enter")
    expect(page.locator("#status")).to_have_text("Done.", timeout=60_000)
    expect(page.locator("#talks .open")).to_have_count(2)


def test_an_edited_message_stays_while_the_model_is_chosen_and_other_conversations_are_changed(page: Page) -> None:
    page.get_by_label("Model").select_option("base")
    ask(page, "Once upon ")
    page.get_by_role("button", name="New conversation", exact=True).click()
    ask(page, "Far away ")
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_label("Edit the message").fill("Farther away ")
    page.get_by_label("Model").select_option("story")
    page.get_by_role("button", name="Rename: Once upon").press("Enter")
    page.get_by_label("Title").fill("A tale")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Delete: A tale").press("Enter")
    expect(page.get_by_label("Edit the message")).to_have_value("Farther away ")
    page.get_by_label("Edit the message").press("Enter")
    expect(page.locator(".editor")).to_have_count(0)
    expect(page.locator(".message.user .text")).to_have_text("Farther away ")


def test_a_conversation_opened_before_the_models_are_known_keeps_its_model(
    page: Page, answer_with: Callable[[str], None]
) -> None:
    page.get_by_label("Model").select_option("base")
    ask(page, "Once upon ")
    waiting: list[Route] = []
    page.route("**/v1/models", lambda route: waiting.append(route))
    with page.expect_request("**/v1/models"):
        page.reload()
    page.locator("#talks .open").click()
    waiting[0].continue_()
    expect(page.locator("#used")).to_contain_text("of 256")
    assert page.get_by_label("Model").input_value() == "base"


def test_a_chat_template_that_refuses_the_messages_is_told(page: Page) -> None:
    error = {"error": {"message": "chat template 'default' refuses the messages: roles must alternate"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    begin(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("roles must alternate")


def test_a_model_that_was_not_loaded_goes_on_with_the_text_where_it_has_no_chat_template(page: Page) -> None:
    def unloaded(route: Route) -> None:
        models = route.fetch().json()
        for model in models["data"]:
            del model["can_chat"], model["max_model_len"]
        route.fulfill(json=models)

    page.route("**/v1/models", unloaded, times=1)
    page.reload()
    page.get_by_label("Model").select_option("base")
    ask(page, "Once upon ")
    page.locator(".assistant .plain").wait_for(state="attached")
