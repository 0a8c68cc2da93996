"""What pages say and do, in chromium where it takes one; engines are stand-ins, so that they can fail and be slow."""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from overspill.bench.session import DEFAULT_WORKLOAD
from overspill.experiment.definition import Definition
from overspill.kv.sizes import GiB, MiB
from overspill.manager.engines.snapshots import Snapshot
from overspill.manager.engines.states import State
from overspill.manager.jobs.commands import FIELDS, JobKind
from overspill.manager.jobs.measured import given_to_resume
from overspill.manager.jobs.records import Job, JobState
from overspill.manager.pages import words
from overspill.manager.pages.cards import Card
from overspill.manager.pages.rendering import fragment
from overspill.registry import Measurement, Model, add_model, get_model, save_result
from overspill.registry.logins import set_password
from overspill.tune.definition import Definition as Tuning
from tests.chromium import Watched, chromium, needs_chromium
from tests.experiments import definition
from tests.managed_here import Here, managed_here
from tests.manager_process import Place, place_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

HTML = {"accept": "text/html,application/xhtml+xml"}
SLOW = "multi-turn:conversations=1,turns=50,think_time=60"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield from place_in(tmp_path, monkeypatch)


@pytest.fixture
def here(place: Place) -> Iterator[Here]:
    place.add("a", behaviour={"start_s": 0.1})
    place.add("b", ram=2 * GiB, notes="x" * 300)
    with managed_here(place) as running:
        yield running


@pytest.fixture
def client(here: Here) -> Iterator[httpx.Client]:
    with program(here) as opened:
        yield opened


def program(here: Here) -> httpx.Client:
    """A client that keeps no cookie: a browser's requests would need the page's token."""
    client = here.client()
    client.event_hooks = {"request": [lambda request: request.headers.pop("cookie", None)]}
    return client


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as opened:
        yield opened


@pytest.fixture
def watched(browser: "Browser", here: Here) -> Iterator[Watched]:
    one = Watched(browser, here.url)
    yield one
    one.close()


def snapshot(**more: Any) -> Snapshot:
    told = {"name": "a", "state": State.STARTING, "since": 0.0, "is_registered": True, "is_managed": True, **more}
    return Snapshot(**told)


def save(place: Place, **more: Any) -> int:
    values: dict[str, Any] = {
        "benchmark": "multi-turn", "model": "a", "config": {}, "argv": (), "environment": {}, "versions": {},
        "metrics": {"output_throughput": 5.0, "mean_ttft_ms": 9.0}, "started_at": datetime.now(UTC),
    }  # fmt: skip
    with place.registry() as registry:
        return save_result(registry, Measurement(**{**values, **more})).id


def old_job(place: Place, kind: JobKind, state: JobState, output: str, **given: str) -> None:
    """As an earlier manager left it: number 1."""
    folder = place.folder / "manager/jobs"
    folder.mkdir(parents=True)
    (folder / "1.log").write_text(output)
    job = Job(
        id=1, kind=str(kind), model="a", given=given, state=state, log_file=str(folder / "1.log"), asked_at=1.0,
        started_at=2.0, ended_at=3.0,
    )  # fmt: skip
    (folder / "1.json").write_text(json.dumps(job.as_json()))


# A card


def test_only_a_model_without_a_process_waits_for_room() -> None:
    def shown(**more: Any) -> str:
        text = fragment("card_state.html", card=Card(model=None, engine=snapshot(**more)))
        return " ".join(re.sub(r"<[^>]+>", "", text).split())

    assert shown().startswith("starting waiting for room since 1970")
    assert shown(pid=7).startswith("starting the process begins since 1970")
    assert shown(pid=7, phase="loading the model").startswith("starting loading the model since 1970")
    assert "waiting for room" not in shown(state=State.FAILED, error="it died")


def test_a_switch_asks_and_names_what_runs() -> None:
    def confirm(*others: str) -> str:
        stopped = Card(model=None, engine=snapshot(state=State.STOPPED), others=others)
        return next(one.confirm for one in stopped.buttons if one.action == "switch")

    assert confirm() == "" and "Running now: b, c." in confirm("b", "c")


def test_a_stopped_model_shows_what_is_set_and_a_running_one_what_was_planned(place: Place) -> None:
    place.add("a", ram=12 * GiB, offload_ram=64 * MiB, max_model_len=4096)
    with place.registry() as registry:
        model: Model = get_model(registry, "a")
    stopped = Card(model=model, engine=snapshot(state=State.STOPPED)).facts
    assert stopped == [
        ("Context", 4096, "tokens"), ("RAM, at most", 12 * GiB, "bytes"), ("RAM for idle KV", 64 * MiB, "bytes"),
    ]  # fmt: skip
    plan = {"max_model_len": 2048, "spilled_kv_bytes": MiB, "offload_bytes": MiB, "weights_in_ram_bytes": 0}
    running = Card(model=model, engine=snapshot(state=State.READY, plan=plan)).facts
    assert running == [("Context", 2048, "tokens"), ("RAM for KV", 2 * MiB, "bytes"), ("Weights in RAM", 0, "bytes")]


def test_cards_that_were_stopped_learn_what_runs_now(client: httpx.Client) -> None:
    with client.stream("GET", "/events/models") as events:
        lines = events.iter_lines()
        client.post("/api/engines/start/a")
        for line in lines:
            if 'hx-confirm="Switch to b? What is in its way is stopped. Running now: a."' in line:
                break


# The context


def test_a_context_is_saved_as_it_was_written_and_an_empty_one_is_not(client: httpx.Client, place: Place) -> None:
    for answer in (client.get("/models/plan/a?max_model_len="), client.post("/models/context/a", data={})):
        assert "write how many tokens" in answer.text
    saved = client.post("/models/context/a", data={"max_model_len": "99999"})
    # A stand-in's model cannot be planned; it is saved all the same, and both are said.
    assert "Saved: max model len." in saved.text and 'class="problem"' in saved.text
    assert saved.headers["hx-trigger"] == f"saved-{words.element_id('a')}"
    assert client.get("/api/models/a").json()["max_model_len"] == 99999
    assert client.post("/models/context/a", data={"max_model_len": ""}).status_code == 400
    assert client.get("/api/models/a").json()["max_model_len"] == 99999


# What was refused


def test_a_page_that_cannot_be_shown_is_a_page_with_a_way_back(client: httpx.Client) -> None:
    for path, status, why, back in (
        ("/compare", 400, "there is nothing to compare", "/runs"),
        ("/runs/jobs/9", 404, "there is no job 9", "/runs"),
        ("/runs/jobs/x", 422, "number", "/runs"),
        ("/results/9", 404, "there is no result 9", "/runs"),
        ("/logs?name=gone", 404, "&#39;gone&#39;", "/logs"),
        ("/nothing", 404, "there is no &#39;/nothing&#39; here", "/"),
    ):
        shown = client.get(path, headers=HTML)
        assert shown.status_code == status and shown.headers["content-type"].startswith("text/html"), path
        assert why in shown.text and f'<a href="{back}">Back to' in shown.text and "<nav" in shown.text, path
        for other in ({"accept": "*/*"}, {**HTML, "hx-request": "true"}):
            assert client.get(path, headers=other).json()["error"]["code"] == status
    assert client.get("/api/jobs/9", headers=HTML).json()["error"]["code"] == 404
    assert client.post("/models/start/gone", headers=HTML).json()["error"]["code"] == 404


def test_a_login_form_that_is_refused_is_a_page(place: Place) -> None:
    with place.registry() as registry:
        set_password(registry, "four words, not together")
    with managed_here(place) as here, program(here) as client:
        refused = client.post("/login", data={f"f{i}": "x" for i in range(200)}, headers=HTML)
    assert refused.status_code == 400 and '<a href="/login">' in refused.text


# Jobs


def test_the_page_stops_a_job_once_and_kills_it_only_when_asked_to(client: httpx.Client) -> None:
    number = client.post("/api/jobs", json={"kind": "bench", "model": "a", "given": {"workload": SLOW}}).json()["id"]
    place = f"/runs/jobs/{number}"
    job = until(client, number, "running")
    assert ">Stop</button>" in client.get(place).text
    assert client.post(f"{place}/kill").status_code == 200  # nothing: it was not asked to stop
    os.kill(job["pid"], signal.SIGSTOP)  # as if it took long to end
    for _ in range(2):  # as of a double click
        asked = client.post(f"{place}/stop").text
        assert "Asked to stop" in asked and "Kill it" in asked and 'hx-confirm="Kill job' in asked
    assert "Asked to stop" in client.get(place).text
    time.sleep(0.5)
    assert client.get(f"/api/jobs/{number}").json()["state"] == "running"
    client.post(f"{place}/kill")
    assert until(client, number, "stopped")["exit_code"] == -signal.SIGKILL
    told = [one["action"] for one in client.get("/api/audit").json()]
    assert told.count("stop job") == 1 and told.count("kill job") == 1
    over = client.get(f"{place}/state")
    assert over.status_code == 286 and over.headers["hx-trigger"] == "job-over"  # which htmx takes as the last one
    assert "Stop" not in client.get(f"{place}/doing").text


def until(client: httpx.Client, number: int, state: str) -> Any:
    deadline = time.monotonic() + 60
    while (job := client.get(f"/api/jobs/{number}").json())["state"] != state:
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job


def test_a_bench_tells_whose_memory_it_shows(place: Place) -> None:
    place.add("a")
    old_job(place, JobKind.BENCH, JobState.DONE, "")
    with managed_here(place) as here, program(here) as client:
        shown = client.get("/runs/jobs/1").text
    assert "<dt>RAM of the client</dt>" in shown and "<dt>RAM of the engine</dt>" in shown


def test_a_bench_that_is_over_links_its_result(place: Place) -> None:
    place.add("a")
    number = save(place, experiment="mine")
    old_job(place, JobKind.BENCH, JobState.DONE, f"a table\nsaved as result {number}\n")
    with managed_here(place) as here, program(here) as client:
        shown = client.get("/runs/jobs/1").text
    assert f'href="/results/{number}"' in shown and 'href="/compare?ids=mine"' in shown and "Resume" not in shown


def repeat(place: Place, name: str, label: str, number: int, **more: Any) -> None:
    config = {"experiment": definition(model="a", repeats=2).as_json(), "workload": "multi-turn:turns=2"}
    save(place, experiment=name, label=label, repeat=number, config=config, **more)


def test_a_comparison_that_was_ended_early_can_be_resumed(place: Place) -> None:
    place.add("a")
    repeat(place, "ab-1", "none", 1)
    repeat(place, "ab-1", "native", 1, is_complete=False)
    save(place, experiment="ab-2", started_at=datetime.fromtimestamp(2.5, UTC))  # of somebody else, at the same time
    output = "warning: none: slow\nexperiment ab-1: 4 measurements, 0 of them done; vLLM's logs: x\n"
    old_job(place, JobKind.AB, JobState.STOPPED, output, a="none", b="native:1GiB")
    with managed_here(place) as here, program(here) as client:
        shown = client.get("/runs/jobs/1").text
        assert "Resume" in shown and 'href="/results/1"' in shown and 'href="/results/3"' not in shown
        compared = client.get("/compare?ids=ab-1")
        assert compared.status_code == 200 and "overspill ab --resume ab-1" in compared.text
        went_on = client.post("/runs/jobs/1/resume")
        assert went_on.headers["hx-redirect"] == "/runs/jobs/2"
        job = client.get("/api/jobs/2").json()
        assert (job["kind"], job["model"], job["given"]) == ("ab", "a", {"resume": "ab-1"})
        client.post("/api/jobs/2/stop")


@pytest.mark.parametrize(
    ("state", "output", "is_complete"),
    [
        (JobState.DONE, "experiment ab-1: 4 measurements", False),
        (JobState.FAILED, "experiment ab-1: 4 measurements", True),
        (JobState.STOPPED, "error: no such model", False),
        (JobState.STOPPED, "experiment ab-9: 4 measurements", False),
    ],
    ids=["done", "complete, and its tier was not used", "nothing was begun", "nothing was measured"],
)
def test_what_has_nothing_missing_or_nothing_to_go_on_with_is_not_resumed(
    place: Place, state: JobState, output: str, is_complete: bool
) -> None:
    place.add("a")
    for label in ("none", "native"):
        for number in (1, 2):
            repeat(place, "ab-1", label, number, is_complete=is_complete or number == 1)
    old_job(place, JobKind.AB, state, output)
    with managed_here(place) as here, program(here) as client:
        assert "Resume" not in client.get("/runs/jobs/1").text
        refused = client.post("/runs/jobs/1/resume")
        assert refused.status_code == 400 and "start a new one" in refused.text


def test_a_tuning_that_is_resumed_still_leaves_settings_alone() -> None:
    job = Job(
        id=1, kind="tune", model="a", given={"goal": "ttft", "budget": "1h", "dry_run": "on"}, log_file="", asked_at=0.0
    )
    assert given_to_resume(job, "tune-1") == {"resume": "tune-1", "budget": "1h", "dry_run": "on"}


def test_the_list_of_jobs_tells_when_one_has_ended_since(place: Place) -> None:
    place.add("a")
    old_job(place, JobKind.BENCH, JobState.DONE, "")
    with managed_here(place) as here, program(here) as client:
        listed = client.get("/runs/jobs")
        assert 'name="ended" value="3.0"' in listed.text and "hx-trigger" not in listed.headers
        assert "hx-trigger" not in client.get("/runs/jobs?ended=3.0").headers
        assert client.get("/runs/jobs?ended=2.0").headers["hx-trigger"] == "job-ended"
        assert "Nothing was measured yet" in client.get("/runs/results").text


def test_forms_offer_what_there_is_and_show_what_is_taken_otherwise(client: httpx.Client) -> None:
    shown = client.get("/runs").text
    goal = re.search(r'<select id="tune-goal".*?</select>', shown)
    assert goal and re.findall(r"<option[^>]*>(\w+)", goal[0]) == ["throughput", "ttft", "context"]
    assert '<option value="">nothing</option><option>offload</option><option>spill</option>' in shown
    assert 'placeholder="multi-turn"' in shown and '<option value="long-context">' in shown
    fields = {(kind, one.name): one.default for kind, some in FIELDS.items() for one in some}
    assert fields[JobKind.BENCH, "workload"] == fields[JobKind.AB, "workload"] == DEFAULT_WORKLOAD
    assert fields[JobKind.AB, "repeats"] == str(Definition(model="a", configurations=()).repeats)
    tuning = Tuning.__dataclass_fields__
    assert fields[JobKind.TUNE, "repeats"] == str(tuning["repeats"].default)
    wrong = client.post("/api/jobs", json={"kind": "tune", "model": "a", "given": {"goal": "speed"}})
    assert wrong.status_code == 400 and "none of throughput, ttft, context" in wrong.text


# The rest


def test_a_log_can_be_followed_by_the_command_that_the_page_tells(here: Here, client: httpx.Client) -> None:
    shown = client.get("/logs?name=a").text
    command = re.search("<code>(curl.*?)</code>", shown)
    assert command
    told = shlex.split(command[1].replace("&#39;", "'").replace("&amp;", "&"))
    assert told == ["curl", "-N", f"{here.url}/api/logs/a?follow=true"]
    client.post("/api/engines/start/a")
    with client.stream("GET", told[2]) as log:
        assert "serves a" in next(log.iter_lines())


def test_times_are_told_so_that_a_browser_can_write_them_in_its_zone(client: httpx.Client) -> None:
    assert words.moment(0.0) == '<time datetime="1970-01-01T00:00:00Z">1970-01-01 00:00:00 UTC</time>'
    client.post("/api/engines/start/a")
    for path in ("/models", "/audit"):
        assert re.search(r'<time datetime="20\d\d-[^"]+Z">20', client.get(path).text), path


# In a browser


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
        pages[-1].goto("/logs?name=a", timeout=10_000)
        hide(pages[-1], is_hidden=True)  # as a tab is that another one is opened over
    hide(pages[0], is_hidden=False)
    pages[0].goto("/", timeout=10_000)
    pages[0].get_by_text("live", exact=True).wait_for()
    hide(pages[0], is_hidden=True)
    pages[0].get_by_text(re.compile("stale: the last numbers are")).wait_for()
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
    assert page.locator("#turns li").count() == 0 and page.locator("#try-prompt").input_value() == "why"
    place.behave("a")
    with httpx.Client(base_url=watched.url) as client:
        client.post("/api/engines/start/a", timeout=30)
    page.get_by_role("button", name="Send").click()
    page.locator("#turns li.assistant", has_text="a-0").wait_for()
    is_done(page)
    assert sent == [["user"], ["user"]]
    assert page.evaluate("document.activeElement.id") == "try-prompt"


@needs_chromium
def test_what_was_answered_before_a_stop_is_a_turn(watched: Watched, place: Place) -> None:
    place.behave("a", token_s=0.2)
    page = watched.page()
    page.goto("/try?model=a")
    sent = roles(page)
    send(page, "one")
    page.locator("#turns li.assistant", has_text="a-1").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator("#notice", has_text="Stopped.").wait_for()
    is_done(page)
    assert page.evaluate("document.activeElement.id") == "try-prompt"
    page.get_by_label("Longest answer, tokens").fill("2")
    send(page, "two")
    page.locator("#turns li").nth(3).wait_for()
    is_done(page)
    assert sent == [["user"], ["user", "assistant", "user"]]


@needs_chromium
def test_a_model_that_starts_first_says_so_and_its_ttft_does_too(watched: Watched, place: Place) -> None:
    place.behave("a", start_s=2.0)
    page = watched.page()
    page.goto("/try?model=a")
    send(page, "one")
    page.locator("#turns li.assistant", has_text="starting: the process begins").wait_for()
    is_done(page)
    assert re.fullmatch(r"[2-9]\.\d s, with the start", page.locator("#try-ttft").text_content() or "")
    assert "starting" not in (page.locator("#turns li.assistant").text_content() or "")
    assert page.get_by_label("Model").locator("option[value=a]").text_content() == "a"
    send(page, "two")
    page.locator("#turns li").nth(3).wait_for()
    is_done(page)
    assert "start" not in (page.locator("#try-ttft").text_content() or "")


@needs_chromium
def test_the_focus_stays_on_the_card_whose_button_was_pressed(watched: Watched, place: Place) -> None:
    place.behave("a", start_s=1.0)
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
def test_the_context_that_is_shown_is_the_one_that_is_planned_and_saved(
    browser: "Browser", place: Place, llama: Path
) -> None:
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
        real.get_by_role("button", name="Save this context").click()
        real.get_by_text("Saved: max model len.").wait_for()
        real.get_by_text("With it the model cannot be started here.").wait_for()
        assert real.get_by_label("Longest context, in tokens").input_value() == "32768"
        assert box.input_value() == "99999" and client.get("/api/models/real").json()["max_model_len"] == 99999
        box.fill("")
        real.get_by_text("write how many tokens").wait_for()
        box.fill("1000")
        real.locator("dd", has_text="1,000 tokens").wait_for()
        assert real.get_by_label("Longest context, in tokens").input_value() == "1000"
        real.get_by_role("button", name="Save this context").click()
        real.get_by_text("Saved: max model len.").wait_for()
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
def test_a_job_is_stopped_with_an_answer_and_killed_after_a_question(watched: Watched) -> None:
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
        page.get_by_text("Asked to stop").wait_for()
        assert page.evaluate("document.activeElement.textContent") == "Kill it"
        asked: list[str] = []
        page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
        page.get_by_role("button", name="Kill it").click()
        page.locator(".state.stopped").wait_for()
        page.get_by_role("button", name="Kill it").wait_for(state="detached")
    assert asked == [f"Kill job {number} at once? What it has not saved is lost."] and watched.problems == []


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
