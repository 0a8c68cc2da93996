"""Try it: Enter sends, a conversation outlives a reload, Markdown is safe, code is shown, two models answer beside."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.chromium import Watched, chromium, needs_chromium
from tests.managed_here import Here, managed_here
from tests.manager_process import Place
from tests.pages import program

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = needs_chromium


@pytest.fixture
def page(here: Here) -> "Iterator[Page]":
    with chromium() as browser:
        watched = Watched(browser, here.url)
        yield watched.page(viewport={"width": 1280, "height": 900})
        assert watched.problems == [] and watched.elsewhere == []
        watched.close()


@pytest.fixture
def here(place: Place) -> Iterator[Here]:
    for name in ("a", "b"):
        place.add(name)
    with managed_here(place) as one:
        yield one


def sent(page: "Page") -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: bodies.append(request.post_data_json) if "/v1/" in request.url else None,
    )
    return bodies


def say(page: "Page", text: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer_with(page: "Page", *deltas: dict[str, str]) -> None:
    """As a model would, whatever it is asked."""
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def answer(route: "Route") -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", answer)


def test_enter_sends_with_the_options_and_a_reload_keeps_the_conversation(page: "Page") -> None:
    page.goto("/try?model=a")
    bodies = sent(page)
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Longest answer, tokens").fill("3")
    say(page, "hello")
    page.locator("#turns li.assistant", has_text="a-2").wait_for()
    page.locator("#try-send:enabled").wait_for()
    (body,) = bodies
    assert [one["role"] for one in body["messages"]] == ["system", "user"]
    assert body["temperature"] == 0.5 and body["max_tokens"] == 3
    page.get_by_text("View code").click()
    for place in ("#try-curl", "#try-python"):
        page.locator(place, has_text="Be brief.").wait_for()
    page.reload()
    page.locator("#turns li.assistant", has_text="a-2").wait_for()
    assert page.locator("#try-system").input_value() == "Be brief."
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    page.get_by_label("Prompt", exact=True).wait_for()
    assert page.locator("#turns > li").count() == 0


def test_markdown_is_shown_and_markup_is_not_run(page: "Page", here: Here) -> None:
    with program(here) as client:
        assert client.post("/api/engines/start/a").is_success
    page.goto("/try?model=a")
    text = (
        "# Head\n**bold** and `code` <img src=x onerror=alert(1)>\n\n- one\n- two\n\n```\n<b>raw</b>\n```\n"
        "[good](https://example.org/) [bad](javascript:alert(1))"
    )
    answer_with(page, {"reasoning_content": "let me think"}, {"content": text})
    say(page, "x")
    turn = page.locator("#turns li.assistant")
    turn.locator("pre", has_text="<b>raw</b>").wait_for()
    page.locator("#try-send:enabled").wait_for()
    assert turn.locator("b").all_inner_texts() == ["Head", "bold"] and turn.locator("code").inner_text() == "code"
    assert turn.locator("ul li").count() == 2 and turn.locator("img").count() == 0
    assert [one.get_attribute("href") for one in turn.locator("a").all()] == ["https://example.org/"]
    assert turn.locator("details summary").inner_text() == "Reasoning"
    assert not turn.get_by_text("let me think").is_visible()


def test_two_models_answer_side_by_side(page: "Page") -> None:
    page.goto("/try?model=a")
    page.get_by_label("Compare with").select_option("b")
    say(page, "hello")
    page.locator("#turns li.assistant", has_text="a: ").filter(has_text="TTFT").wait_for()
    page.locator("#turns-other li.assistant", has_text="b: ").filter(has_text="TTFT").wait_for()
    left, right = (page.locator(place).bounding_box() for place in ("#turns", "#turns-other"))
    assert left and right and left["x"] < right["x"] and left["y"] == right["y"]
