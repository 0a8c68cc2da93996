"""What the pages' scripts do, in chromium; engines are stand-ins, so that they can fail and be slow."""

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from overspill.kv.sizes import GiB, MiB
from overspill.registry import add_model
from tests.chromium import Watched, chromium, needs_chromium
from tests.managed_here import Here, managed_here
from tests.manager_process import Place
from tests.pages import program, save, until

if TYPE_CHECKING:
    from playwright.sync_api import APIResponse, Browser, Page, Request, Route

HTML = {"accept": "text/html,application/xhtml+xml"}
SLOW = "multi-turn:conversations=1,turns=50,think_time=60"


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as opened:
        yield opened


@pytest.fixture
def watched(browser: "Browser", here: Here) -> Iterator[Watched]:
    one = Watched(browser, here.url)
    yield one
    one.close()


def card(page: "Page", name: str) -> Any:
    return page.locator("article.card", has=page.get_by_role("heading", name=name, exact=True))


def send(page: "Page", prompt: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Send").click()


def is_done(page: "Page") -> None:
    page.locator("#try-send:enabled").wait_for()


def roles(page: "Page") -> list[list[str]]:
    """Of each request to a model from now on."""
    sent: list[list[str]] = []

    def note(request: "Request") -> None:
        if request.url.endswith("/v1/chat/completions"):
            sent.append([one["role"] for one in request.post_data_json["messages"]])

    page.on("request", note)
    return sent


@needs_chromium
def test_the_eighth_tab_is_shown(watched: Watched) -> None:
    """A stream for each of six tabs took all of a browser's connections, and the seventh tab hung."""
    context = watched.context()
    pages = []
    for _ in range(8):
        pages.append(watched.watch(context.new_page()))
        pages[-1].goto("/logs?name=a")
        hide(pages[-1], is_hidden=True)  # as a tab is that another one is opened over
    hide(pages[0], is_hidden=False)
    pages[0].goto("/")
    pages[0].get_by_text("live", exact=True).wait_for()
    hide(pages[0], is_hidden=True)
    pages[0].get_by_text(re.compile("Stale: the last numbers are")).wait_for()
    hide(pages[0], is_hidden=False)
    pages[0].get_by_text("live", exact=True).wait_for()
    assert watched.problems == []


def hide(page: "Page", *, is_hidden: bool) -> None:
    """Without a window nothing is ever hidden."""
    page.evaluate(
        """isHidden => {
            Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


@needs_chromium
def test_a_question_that_failed_is_taken_back_and_asked_again(watched: Watched, place: Place) -> None:
    place.behave("a", dies_at_start=True)
    page = watched.page()
    page.goto("/try?model=a")
    sent = roles(page)
    send(page, "why")
    page.locator("#notice", has_text="the weights are broken").wait_for()
    is_done(page)
    assert page.locator("#turns > li").count() == 0 and page.locator("#try-prompt").input_value() == "why"
    place.behave("a")
    with httpx.Client(base_url=watched.url, timeout=60) as client:
        client.post("/api/engines/start/a")
    page.get_by_role("button", name="Send").click()
    page.locator("#turns li.assistant", has_text="a-0").wait_for()
    is_done(page)
    assert sent == [["user"], ["user"]]
    assert page.evaluate("document.activeElement.id") == "try-prompt"


@needs_chromium
def test_a_stopped_answer_still_counts_as_a_turn(watched: Watched, place: Place) -> None:
    place.behave("a", token_s=0.2)
    page = watched.page()
    page.goto("/try?model=a")
    sent = roles(page)
    send(page, "one")
    page.locator("#turns li.assistant", has_text="a-1").wait_for()
    page.get_by_role("button", name="Stop").click()
    is_done(page)
    assert page.locator("#notice").is_hidden()  # it is what the user wanted
    assert page.evaluate("document.activeElement.id") == "try-prompt"
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Longest answer, tokens").fill("2")
    send(page, "two")
    page.locator("#turns > li").nth(3).wait_for()
    is_done(page)
    assert sent == [["user"], ["user", "assistant", "user"]]


@needs_chromium
def test_a_model_that_starts_first_says_so_and_its_ttft_does_too(watched: Watched, place: Place) -> None:
    place.behave("a", start_s=5.0)
    page = watched.page()
    page.goto("/try?model=a")
    send(page, "one")
    page.locator("#turns li.assistant", has_text="starting: the process begins").wait_for()
    is_done(page)
    assert re.fullmatch(r"([5-9]|\d\d+)\.\d s, with the start", page.locator("#try-ttft").text_content() or "")
    assert "starting" not in (page.locator("#turns li.assistant").text_content() or "")
    assert page.get_by_label("Model", exact=True).locator("option[value=a]").text_content() == "a"
    send(page, "two")
    page.locator("#turns > li").nth(3).wait_for()
    is_done(page)
    assert "start" not in (page.locator("#try-ttft").text_content() or "")


@needs_chromium
def test_the_focus_stays_on_the_card_whose_button_was_pressed(watched: Watched, place: Place) -> None:
    place.behave("a", start_s=3.0)
    page = watched.page()
    page.goto("/models")
    start = card(page, "a").get_by_role("button", name="Start", exact=True)
    start.focus()
    page.keyboard.press("Enter")
    card(page, "a").locator(".state.starting").wait_for()
    inside = "document.querySelector('article.card').contains(document.activeElement)"
    assert page.evaluate(inside)
    stop = card(page, "a").get_by_role("button", name="Stop")
    stop.focus()
    card(page, "a").locator(".state.ready").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Stop"
    page.keyboard.press("Enter")
    card(page, "a").locator(".state.stopped").wait_for()
    assert page.evaluate(inside)


@needs_chromium
def test_the_context_shown_is_the_one_planned_and_saved(browser: "Browser", place: Place, llama: Path) -> None:
    settings = {"source": str(llama), "gpu_memory": 8 * MiB, "ram": 12 * GiB, "dtype": "float32", "max_model_len": 4096}
    with place.registry() as registry:
        add_model(registry, "real", settings)
    with managed_here(place) as here, program(here) as client:
        watched = Watched(browser, here.url)
        page = watched.page()
        page.goto("/models")
        real = card(page, "real")
        real.get_by_text("Context", exact=True).last.click()
        box = real.get_by_label("The same as a number")
        box.fill("99999")
        refused = re.compile("does not fit with 99999 tokens|99999")
        real.locator(".problem", has_text=refused).wait_for()
        assert real.get_by_role("button", name="Save this context").count() == 0
        assert real.get_by_label("Longest context, in tokens").input_value() == "32768"
        box.fill("")
        real.get_by_text("write a number of tokens").wait_for()
        box.fill("1000")
        real.locator("th", has_text="1,000 tokens").wait_for()
        assert real.get_by_label("Longest context, in tokens").input_value() == "1000"
        real.get_by_role("button", name="Save this context").click()
        real.get_by_text("Saved: Context, tokens.").wait_for()
        assert real.get_by_text("cannot be started").count() == 0
        assert client.get("/api/models/real").json()["max_model_len"] == 1000
        watched.close()
        assert watched.problems == []


@needs_chromium
def test_nothing_is_compared_before_something_is_ticked(browser: "Browser", place: Place) -> None:
    save(place)
    with managed_here(place) as here:
        watched = Watched(browser, here.url)
        page = watched.page()
        page.goto("/runs")
        compare = page.get_by_role("button", name="Compare")
        assert compare.is_disabled()
        page.get_by_label("Compare result 1").check()
        assert compare.is_enabled()
        save(place)
        page.evaluate("htmx.trigger(document.body, 'job-ended')")
        page.get_by_label("Compare result 2").wait_for()
        assert page.get_by_label("Compare result 1").is_checked() and compare.is_enabled()
        page.get_by_label("Compare result 1").uncheck()
        assert compare.is_disabled()
        watched.close()
        assert watched.problems == []


@needs_chromium
def test_a_job_stop_is_acknowledged_and_a_kill_confirmed(watched: Watched) -> None:
    page = watched.page()
    with httpx.Client(base_url=watched.url, timeout=30) as client:
        body = {"kind": "bench", "model": "a", "given": {"workload": SLOW}}
        number = client.post("/api/jobs", json=body).json()["id"]
        job = until(client, number, "running")
        os.kill(job["pid"], signal.SIGSTOP)
        page.goto(f"/runs/jobs/{number}")
        page.get_by_role("button", name="Stop").focus()
        time.sleep(1.5)  # the state is asked for meanwhile
        assert page.evaluate("document.activeElement.textContent") == "Stop"
        page.keyboard.press("Enter")
        page.get_by_text("Stopping: the job ends").wait_for()
        assert page.evaluate("document.activeElement.textContent") == "Kill it"
        asked: list[str] = []
        page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
        page.get_by_role("button", name="Kill it").click()
        page.locator(".state.stopped").wait_for()
        page.get_by_role("button", name="Kill it").wait_for(state="detached")
    assert asked == [f"Kill job {number} at once? Unsaved measurements are lost."] and watched.problems == []


@needs_chromium
def test_a_late_stop_response_does_not_mark_an_ended_job(watched: Watched) -> None:
    page = watched.page()
    kept: list[tuple[Route, APIResponse]] = []
    page.route("**/runs/jobs/*/stop", lambda route: kept.append((route, route.fetch())))
    with httpx.Client(base_url=watched.url, timeout=30) as client:
        body = {"kind": "bench", "model": "a", "given": {"workload": SLOW}}
        number = client.post("/api/jobs", json=body).json()["id"]
        until(client, number, "running")
        page.goto(f"/runs/jobs/{number}")
        page.get_by_role("button", name="Stop").click()
        page.locator(".state.stopped").wait_for()
        page.get_by_role("button", name="Stop").wait_for(state="detached")
    ((route, answer),) = kept
    assert answer.ok
    route.fulfill(response=answer)
    page.wait_for_timeout(200)
    assert page.get_by_text("Stopping: the job ends").count() == 0 and watched.problems == []


@needs_chromium
def test_times_are_those_of_who_reads_them_and_numbers_are_whole(watched: Watched) -> None:
    page = watched.page(timezone_id="America/New_York", viewport={"width": 390, "height": 844})
    with httpx.Client(base_url=watched.url, timeout=30) as client:
        client.post("/api/engines/start/a")
    page.goto("/audit")
    page.get_by_text("Times are in America/New_York.").wait_for()
    told = page.locator("time").first
    at = datetime.fromisoformat(told.get_attribute("datetime") or "")
    shown = page.evaluate("at => new Date(at).toLocaleString('sv')", at.isoformat())
    assert told.text_content() == shown != f"{at:%Y-%m-%d %H:%M:%S}"
    assert told.get_attribute("title") == f"{at:%Y-%m-%d %H:%M:%S} UTC"
    assert page.evaluate("[shown(1408, 'tokens'), shown(99.94, 'tok/s'), shown(131072, '')]") == [
        "1,408 tokens", "99.9 tok/s", "131,072",
    ]  # fmt: skip
    page.goto("/models")
    card(page, "b").get_by_text("xxx").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


@needs_chromium
@pytest.mark.parametrize(("unit", "value"), [("", 0), ("tok/s", 0), ("s", 0), ("bytes/s", 0), ("tok/s", 950_000)])
def test_an_axis_has_room_for_its_labels_and_says_nothing_twice(watched: Watched, unit: str, value: float) -> None:
    page = watched.page()
    page.goto("/")
    page.locator(".chart canvas").first.wait_for()
    labels, room, need = page.evaluate(
        """async ([unit, value]) => {
            const definition = { key: "x", title: "x", unit, lines: [{ name: "x", label: "x" }] };
            const history = { time: [1, 2, 3], series: { x: [value, value, value] } };
            const { plot } = makeChart(definition, history, document.getElementById("charts"));
            await new Promise(requestAnimationFrame);
            const axis = plot.axes[1];
            plot.ctx.font = axis.font[0];
            const widths = axis._values.map((one) => plot.ctx.measureText(one).width / devicePixelRatio);
            return [axis._values, axis._size, Math.max(...widths)];
        }""",
        [unit, value],
    )
    assert len(labels) > 1 and len(set(labels)) == len(labels) and room >= need


@needs_chromium
def test_a_button_works_from_the_moment_it_is_shown(watched: Watched, place: Place) -> None:
    """htmx waited 20 ms before it listened to what it had just put on the page, and a key pressed then was lost."""
    page = watched.page()
    page.goto("/models")
    page.evaluate(
        """() => new MutationObserver((changes, observer) => {
            const stop = document.querySelector("article.card:has(.state.ready) button[id$=-stop]");
            if (stop) { observer.disconnect(); stop.click(); }
        }).observe(document.querySelector("article.card"), { childList: true, subtree: true })"""
    )
    with page.expect_request("**/models/stop/a"):
        card(page, "a").get_by_role("button", name="Start", exact=True).click()
    card(page, "a").locator(".state.stopped").wait_for()


@needs_chromium
def test_a_late_response_does_not_put_an_older_state_on_a_card(watched: Watched, place: Place) -> None:
    """The response was rendered before the engine ended, and replaced what the stream had shown since."""
    place.behave("a", ignores_sigterm=True)
    page = watched.page()
    page.goto("/models")
    card(page, "a").get_by_role("button", name="Start", exact=True).click()
    card(page, "a").locator(".state.ready").wait_for()
    kept: list[tuple[Route, APIResponse]] = []
    page.route("**/models/stop/a", lambda route: kept.append((route, route.fetch())))
    card(page, "a").get_by_role("button", name="Stop").click()
    card(page, "a").locator(".state.stopped").wait_for()
    ((route, answer),) = kept
    assert answer.ok
    with page.expect_response("**/models/stop/a"):
        route.fulfill(response=answer)
    page.wait_for_timeout(200)
    assert card(page, "a").locator(".state").text_content() == "stopped"
