"""The pages in Debian's chromium: the real manager, the real engine on the CPU, the embedded model, one user."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.chat_model import make_chat_model
from tests.chromium import Watched, chromium, needs_chromium
from tests.managed import SETTINGS, Managed, managed

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium
START_MS = 180_000


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    folder = tmp_path_factory.mktemp("browser")
    # An engine holds 3 GiB for itself, so there is room for one.
    with managed(folder, "--ram", "5GiB") as running:
        for seed, name in enumerate(("tiny", "other")):
            make_chat_model(running.models / name, seed=seed)
        yield running


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TEST_PICTURES names a folder in which they are kept."""
    given = os.environ.get("TEST_PICTURES")
    folder = Path(given) if given else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def watched(browser: "Browser", manager: Managed) -> "Iterator[Watched]":
    one = Watched(browser, manager.url)
    yield one
    one.close()


@pytest.fixture(scope="module")
def page(watched: Watched) -> "Page":
    return watched.page(viewport={"width": 1280, "height": 900})


def words(seed: int, count: int) -> str:
    return " ".join(f"t{3 + (seed * 7 + i * i * 13) % 500}" for i in range(count))


def card(page: "Page", name: str) -> Any:
    return page.locator("article.card", has=page.get_by_role("heading", name=name, exact=True))


def add(page: "Page", manager: Managed, name: str) -> None:
    from playwright.sync_api import expect

    page.goto("/add")
    page.get_by_role("link", name=f"Choose {name}").click()
    form = page.locator("#add")
    form.get_by_label("Name for clients").fill(name)
    form.get_by_text("More settings").click()
    # The first plan sets the dial; one that follows it does not have it any more.
    expect(form.locator("#add-number")).to_have_value(re.compile(r"\d+"), timeout=START_MS)
    for setting, value in SETTINGS.items():
        field = form.locator(f"[name={setting}]")
        if setting == "enforce_eager":
            field.select_option("true")
        else:
            field.fill(str(value))
    form.get_by_role("button", name="Add only").click()
    card(page, name).wait_for()


def ask(page: "Page", prompt: str, answer: str = "8") -> None:
    if not page.locator("#try-tokens").is_visible():
        page.get_by_text("Options", exact=True).click()
    page.get_by_label("Longest answer, tokens").fill(answer)
    page.get_by_label("Prompt", exact=True).fill(prompt)
    turns = page.locator("#turns > li").count()
    page.get_by_role("button", name="Send").click()
    # Not wait_for_function, which needs eval, and the pages' policy has none.
    page.locator("#turns > li").nth(turns + 1).wait_for(state="attached")
    page.locator("#try-send:enabled").wait_for(timeout=START_MS)
    notice = page.locator("#notice")
    assert notice.is_hidden(), notice.text_content()


def number(page: "Page", place: str) -> float:
    text = page.locator(f"#{place}").text_content() or ""
    found = re.match(r"[\d,.]+", text)
    assert found, f"{place} shows {text!r}"
    return float(found[0].replace(",", ""))


# One user, from the first page to the last: each test goes on where the one before ended.


def test_models_are_added(page: "Page", manager: Managed) -> None:
    for name in ("tiny", "other"):
        add(page, manager, name)
        assert "stopped" in (card(page, name).text_content() or "")


def test_a_model_from_elsewhere_is_refused_with_a_reason(browser: "Browser", manager: Managed) -> None:
    alone = Watched(browser, manager.url)
    page = alone.page()
    page.goto("/add?source=/etc")
    page.locator("#add-plan", has_text="is outside the folders that models may come from").wait_for()
    page.locator("#add").get_by_role("button", name="Add only").click()
    page.locator("#notice", has_text="is outside the folders that models may come from").wait_for()
    alone.close()
    # A browser tells every answer of 403 itself, and htmx does too.
    assert len(alone.problems) == 2 and all("403" in one for one in alone.problems)


def test_the_slider_replans_while_it_is_moved(page: "Page") -> None:
    page.goto("/models")
    tiny = card(page, "tiny")
    tiny.get_by_text("Context", exact=True).last.click()
    slider = tiny.get_by_label("Longest context, in tokens")
    slider.wait_for()
    tiny.get_by_text("Fits: KV spilled to RAM.").wait_for()
    slider.focus()
    for _ in range(4):  # by keyboard, 256 tokens a step
        page.keyboard.press("ArrowLeft")
    tiny.locator("th", has_text="3,072 tokens").wait_for()
    slider.fill("8192")
    tiny.get_by_text(re.compile("does not fit with 8192 tokens.*Longest context that fits")).wait_for()
    assert tiny.get_by_role("button", name="Save this context").count() == 0
    slider.fill("512")
    tiny.get_by_text("Fits: everything on RAM in the GPU's place.").wait_for()
    assert tiny.locator(".map.large").count() == 2
    slider.fill("3840")
    tiny.get_by_text("Fits: KV spilled to RAM.").wait_for()
    tiny.get_by_role("button", name="Save this context").click()
    tiny.get_by_text("Saved: Context, tokens.").wait_for()
    tiny.locator("dd", has_text="3,840 tokens").first.wait_for()


def test_a_start_shows_its_phases(page: "Page") -> None:
    tiny = card(page, "tiny")
    tiny.get_by_role("button", name="Start", exact=True).focus()
    page.keyboard.press("Enter")
    tiny.locator(".state.starting").wait_for()
    assert page.evaluate("document.activeElement.closest('article')?.querySelector('h2').textContent") == "tiny"
    tiny.get_by_label("Phases of the start").get_by_text("starting vLLM").wait_for()
    tiny.locator(".state.ready").wait_for(timeout=START_MS)
    tiny.get_by_role("button", name="Stop").wait_for()


def test_settings_that_need_a_restart_say_so(page: "Page") -> None:
    tiny = card(page, "tiny")
    tiny.get_by_text("Settings", exact=True).click()
    tiny.locator("[name=max_num_seqs]").fill("5")
    tiny.get_by_role("button", name="Save", exact=True).click()
    tiny.get_by_text("Restart the engine to apply Requests at once, at most.").wait_for()
    tiny.get_by_text("Changed since the start; restart to apply: Requests at once, at most.").wait_for()
    tiny.locator("[name=max_num_seqs]").fill("4")
    tiny.get_by_role("button", name="Save", exact=True).click()
    tiny.get_by_text("restart to apply: Requests at once, at most.").wait_for(state="detached")
    # The slider's save is seen by the form that is open, whose version would be old otherwise.
    tiny.get_by_label("Longest context, in tokens").fill("3584")
    tiny.locator("th", has_text="3,584 tokens").wait_for()
    tiny.get_by_role("button", name="Save this context").click()
    tiny.locator("fieldset [name=max_model_len][value='3584']").wait_for()
    tiny.locator("fieldset [name=max_model_len]").fill("3840")
    tiny.get_by_role("button", name="Save", exact=True).click()
    tiny.get_by_text("Saved: Context, tokens.").last.wait_for()


def test_a_second_turn_takes_its_tokens_from_ram(page: "Page", manager: Managed) -> None:
    page.goto("/try?model=tiny")
    ask(page, words(1, 1500))
    assert number(page, "try-ttft") > 0 and number(page, "try-prompt-tokens") == 1500
    assert number(page, "try-answer-tokens") == 8 and number(page, "try-ram") == 0
    assert page.evaluate("document.activeElement.id") == "try-prompt"
    with manager.client() as client:  # others, whose KV takes the place of that conversation's
        for seed in (50, 51):
            body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": words(seed, 3500)}]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    ask(page, words(2, 20))
    assert number(page, "try-ram") > 1000
    assert page.locator("#turns > li").count() == 4


def test_the_dashboard_is_live_and_shows_tiers(page: "Page") -> None:
    page.goto("/")
    page.get_by_text("live", exact=True).wait_for()
    page.locator(".chart canvas").first.wait_for()
    assert page.locator(".chart").count() >= 6
    page.get_by_text("KV in numbers").click()
    page.get_by_role("heading", name="KV of tiny").wait_for()
    tier = page.locator(".tiles div", has=page.get_by_text("tokens from RAM, in all"))
    tier.filter(has_text=re.compile(r"1,\d{3} tokens")).wait_for()
    page.locator(".legend li", has_text="pool for idle KV of tiny 64 MiB").wait_for()


def test_numbers_that_are_stale_are_greyed(watched: Watched) -> None:
    page = watched.page()
    page.goto("/")
    page.get_by_text("live", exact=True).wait_for()
    page.evaluate("document.getElementById('live')['htmx-internal-data'].sseEventSource.close()")
    page.get_by_text(re.compile("Stale: the last numbers are")).wait_for()
    page.locator("#live.stale").wait_for()
    page.close()


def test_the_log_is_streamed_and_searched(page: "Page") -> None:
    page.goto("/logs?name=tiny")
    page.locator("[data-log]", has_text="Application startup").wait_for()
    page.get_by_label("Search").fill("application STARTUP")
    page.get_by_role("button", name="Show").click()
    page.get_by_text(re.compile("lines contain application STARTUP")).wait_for()
    assert "Application startup" in (page.locator("pre.log").text_content() or "")


def test_a_bench_runs_with_progress_and_its_results_are_compared(page: "Page") -> None:
    for label in ("first", "second"):
        page.goto("/runs")
        page.get_by_text("Bench: measure a served model").click()
        form = page.locator("form", has=page.locator("input[value=bench]"))
        form.get_by_label("Model").select_option("tiny")
        form.get_by_label("Workload").fill("multi-turn:conversations=2,turns=2,first=64,input=16,output=4,think_time=0")
        form.get_by_label("Label").fill(label)
        form.get_by_role("button", name="Start bench").click()
        page.wait_for_url("**/runs/jobs/*")
        page.locator(".state.done").wait_for(timeout=START_MS)
        page.locator("[data-log]", has_text="saved as result").wait_for()
        page.get_by_role("link", name=re.compile(r"^result \d$")).click()
        page.get_by_role("heading", name=re.compile(r"^Result \d$")).wait_for()
    page.goto("/runs")
    assert page.get_by_role("button", name="Compare").is_disabled()
    for result in (1, 2):
        page.get_by_label(f"Compare result {result}").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("row", name=re.compile("output throughput")).wait_for()
    assert page.locator("figure svg").count() >= 2
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    assert "first" in Path(download.value.path()).read_text()


SHOWN = ("/", "/models", "/add", "/try", "/activity", "/runs", "/logs", "/found", "/keys", "/audit", "/api")


@pytest.mark.parametrize(
    ("look", "options"),
    [
        ("light", {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}}),
        ("dark", {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}}),
        ("phone", {"color_scheme": "light", "viewport": {"width": 390, "height": 844}}),
    ],
)
def test_every_page_is_whole_in_light_in_dark_and_on_a_phone(
    watched: Watched, pictures: Path, look: str, options: dict[str, Any]
) -> None:
    page = watched.page(**options)
    for path in SHOWN:
        page.goto(path)
        page.get_by_role("heading", level=1).wait_for()
        if path == "/":
            page.locator(".chart canvas").first.wait_for()
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, f"{path} is {wide} px too wide"
        page.screenshot(path=pictures / f"{path.strip('/') or 'dashboard'}-{look}.png", full_page=True)
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor").startswith("rgb(20")
    assert is_dark == (look == "dark")
    page.close()


def test_every_field_has_a_label_and_pages_work_by_keyboard(watched: Watched) -> None:
    page = watched.page()
    for path in SHOWN:
        page.goto(path)
        unnamed = page.evaluate(
            """[...document.querySelectorAll('input:not([type=hidden]), select, textarea, button')]
            .filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map(e => e.outerHTML)"""
        )
        assert unnamed == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(watched.url + "/")
    page.close()


def test_a_start_without_room_is_refused_and_a_switch_makes_room(page: "Page") -> None:
    page.goto("/models")
    other = card(page, "other")
    other.get_by_role("button", name="Start", exact=True).click()
    other.get_by_role("alert").filter(has_text="tiny").wait_for()
    asked: list[str] = []
    page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    other.get_by_role("button", name="Switch to it").click()
    assert asked == ["Switch to other? Others are stopped if needed. Running now: tiny."]
    card(page, "tiny").locator(".state.stopped").wait_for(timeout=START_MS)
    other.locator(".state.ready").wait_for(timeout=START_MS)
    assert other.get_by_role("alert").count() == 0
    page.goto("/try?model=other")
    ask(page, "t7 t8 t9", "4")
    assert number(page, "try-answer-tokens") == 4


def test_the_page_recovers_when_a_killed_manager_restarts(browser: "Browser", manager: Managed) -> None:
    alone = Watched(browser, manager.url)  # a browser tells that nobody answers meanwhile
    page = alone.page()
    page.goto("/")
    page.get_by_text("live", exact=True).wait_for()
    with manager.client() as client:
        before = client.get("/api/engines/other").json()["pid"]
    manager.kill_and_start_again()
    page.get_by_text("live", exact=True).wait_for()
    page.goto("/models")
    card(page, "other").locator(".state.ready").wait_for()
    card(page, "other").locator("dd", has_text=str(before)).wait_for()
    alone.close()


def test_a_stop_leaves_nothing_running(page: "Page", manager: Managed) -> None:
    page.goto("/models")
    card(page, "other").get_by_role("button", name="Stop").click()
    card(page, "other").locator(".state.stopped").wait_for(timeout=START_MS)
    assert manager.others() == []


def test_the_audit_log_has_what_was_done(page: "Page") -> None:
    for done in ("add model", "edit model", "start", "switch to", "stop", "start bench"):
        cell, deadline = page.get_by_role("cell", name=done, exact=True).first, time.monotonic() + 10
        page.goto("/audit")
        while not cell.is_visible() and time.monotonic() < deadline:  # written once the action is over
            page.reload()
        assert cell.is_visible(), done


def test_nothing_left_the_machine_and_nothing_went_wrong_unseen(watched: Watched) -> None:
    assert watched.elsewhere == [] and watched.problems == []
