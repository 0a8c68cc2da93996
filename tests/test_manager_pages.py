"""What pages say and do, asked over HTTP; engines are stand-ins, so that they can fail and be slow."""

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from overspill.kv.sizes import GiB, MiB
from overspill.manager.job_commands import FIELDS, JobKind
from overspill.manager.jobs import Job, JobState, given_to_resume, progress
from overspill.manager.records import Records
from overspill.manager.states import Snapshot, State
from overspill.manager.web.model_pages import Card
from overspill.manager.web.rendering import element_id, fragment, moment
from overspill.measure.bench import DEFAULT_WORKLOAD
from overspill.measure.experiment import Experiment
from overspill.measure.tuning import Tuning
from overspill.registry import Model, get_model
from overspill.registry.access import set_password
from tests.experiments import definition
from tests.managed_here import Here, managed_here
from tests.manager_process import Place
from tests.pages import old_job, program, save, until

HTML = {"accept": "text/html,application/xhtml+xml"}
SLOW = "multi-turn:conversations=1,turns=50,think_time=60"


@pytest.fixture
def client(here: Here) -> Iterator[httpx.Client]:
    with program(here) as opened:
        yield opened


def snapshot(**more: Any) -> Snapshot:
    told = {"name": "a", "state": State.STARTING, "since": 0.0, "is_registered": True, "is_managed": True, **more}
    return Snapshot(**told)


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


def test_cards_show_settings_if_stopped_and_the_plan_if_running(place: Place) -> None:
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
            if 'hx-confirm="Switch to b? Others are stopped if needed. Running now: a."' in line:
                break


# The context


def test_a_context_is_saved_as_written_but_not_an_empty_one(client: httpx.Client, place: Place) -> None:
    for answer in (client.get("/models/plan/a?max_model_len="), client.post("/models/context/a", data={})):
        assert "write a number of tokens" in answer.text
    saved = client.post("/models/context/a", data={"max_model_len": "99999"})
    # A stand-in's model cannot be planned; it is saved all the same, and both are said.
    assert "Saved: Context, tokens." in saved.text and 'class="problem"' in saved.text
    assert saved.headers["hx-trigger"] == f"saved-{element_id('a')}"
    assert client.get("/api/models/a").json()["max_model_len"] == 99999
    assert client.post("/models/context/a", data={"max_model_len": ""}).status_code == 400
    assert client.get("/api/models/a").json()["max_model_len"] == 99999


# What was refused


def test_jobs_and_results_are_shown_as_a_part_of_runs(place: Place) -> None:
    number = save(place, experiment="mine")
    old_job(place, JobKind.BENCH, JobState.DONE, "")
    with managed_here(place) as here, program(here) as client:
        for path in ("/runs", "/runs/jobs/1", f"/results/{number}", "/compare?ids=mine"):
            current = re.findall(r'href="(\S+)" aria-current="(\w+)"', client.get(path).text)
            assert current == [("/runs", "page" if path == "/runs" else "true")], path


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
            assert client.get(path, headers=other).json()["source"] == "manager"
    assert client.get("/api/jobs/9", headers=HTML).json()["error"]["code"] == "not_found"
    assert client.post("/models/start/gone", headers=HTML).json()["error"]["code"] == "not_found"


def test_a_login_form_that_is_refused_is_a_page(place: Place) -> None:
    with place.registry() as registry:
        set_password(registry, "four words, not together")
    with managed_here(place) as here, program(here) as client:
        refused = client.post("/login", data={f"f{i}": "x" for i in range(200)}, headers=HTML)
    assert refused.status_code == 400 and '<a href="/login">' in refused.text


# Jobs


def test_the_page_stops_a_job_once_and_kills_it_on_request(client: httpx.Client) -> None:
    number = client.post("/api/jobs", json={"kind": "bench", "model": "a", "given": {"workload": SLOW}}).json()["id"]
    place = f"/runs/jobs/{number}"
    job = until(client, number, "running")
    assert ">Stop</button>" in client.get(place).text
    assert client.post(f"{place}/kill").status_code == 202  # nothing: it was not asked to stop
    os.kill(job["pid"], signal.SIGSTOP)  # as if it took long to end
    for _ in range(2):  # as of a double click
        answer = client.post(f"{place}/stop")
        assert answer.status_code == 202 and answer.headers["hx-trigger"] == "job-asked"
        asked = client.get(f"{place}/doing").text
        assert "Stopping: the job ends" in asked and "Kill it" in asked and 'hx-confirm="Kill job' in asked
    assert "Stopping: the job ends" in client.get(place).text
    time.sleep(0.5)
    assert client.get(f"/api/jobs/{number}").json()["state"] == "running"
    client.post(f"{place}/kill")
    assert until(client, number, "stopped")["exit_code"] == -signal.SIGKILL
    told = [one["action"] for one in client.get("/api/audit").json()]
    assert told.count("stop job") == 1 and told.count("kill job") == 1
    over = client.get(f"{place}/state")
    assert over.status_code == 286 and over.headers["hx-trigger"] == "job-over"  # which htmx takes as the last one
    assert "Stop" not in client.get(f"{place}/doing").text


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


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("12/48 requests in 5 s, 2.40/s, 15 s left, RAM 1 GiB", "0.250"),
        ("[3/4] b, repeat 2 of 2: 10/20 requests in 5 s, 2.00/s, 5 s left; 20 s left in all", "0.625"),
        ("[2/4] b, repeat 1 of 2: starting vLLM", "0.250"),
        ("reading the weights", None),
    ],
)
def test_a_running_job_shows_a_bar(place: Place, line: str, share: str | None) -> None:
    old_job(place, JobKind.AB, JobState.RUNNING, f"something\n{line}\n")
    (job,) = Records(place.folder / "manager/jobs", Job).read_all()
    shown = fragment("job_state.html", job=job, memory=[], progress=progress(job))
    value = "" if share is None else f' value="{share}"'
    assert f'<progress aria-label="Progress of the job"{value}></progress>' in shown and line in shown


def test_a_failed_comparison_says_first_which_side_failed(place: Place) -> None:
    """ "Not complete. To resume: overspill ab --resume" was all that its page and the list of jobs said."""
    place.add("a")
    repeat(place, "ab-1", "none", 1, metrics={"output_throughput": 40.0})
    why = "vLLM ended with exit code 3 after 1 s while starting vLLM\nthe last lines of x.log:\n  ValueError: too large"
    repeat(place, "ab-1", "native", 1, is_complete=False, metrics={"problem": why})
    old_job(place, JobKind.AB, JobState.FAILED, "experiment ab-1: 4 measurements, 0 of them done")
    with managed_here(place) as here, program(here) as client:
        job, compared = client.get("/runs/jobs/1").text, client.get("/compare?ids=ab-1").text
    first = "native failed: vLLM ended with exit code 3 after 1 s while starting vLLM: ValueError: too large"
    for shown in (job, compared):
        assert first in shown and shown.index(first) < shown.index("output throughput")
        assert "native / none" not in shown


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
def test_a_job_without_anything_to_resume_is_not_resumed(
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


def test_forms_list_valid_choices_and_show_defaults(client: httpx.Client) -> None:
    shown = client.get("/runs").text
    goal = re.search(r'<select id="tune-goal".*?</select>', shown)
    assert goal and re.findall(r"<option[^>]*>(\w+)", goal[0]) == ["throughput", "ttft", "context"]
    assert '<option value="">nothing</option><option>offload</option><option>spill</option>' in shown
    assert 'placeholder="multi-turn"' in shown and '<option value="long-context">' in shown
    fields = {(kind, one.name): one.default for kind, some in FIELDS.items() for one in some}
    assert fields[JobKind.BENCH, "workload"] == fields[JobKind.AB, "workload"] == DEFAULT_WORKLOAD
    assert fields[JobKind.AB, "repeats"] == str(Experiment(model="a", configurations=()).repeats)
    tuning = Tuning.__dataclass_fields__
    assert fields[JobKind.TUNE, "repeats"] == str(tuning["repeats"].default)
    wrong = client.post("/api/jobs", json={"kind": "tune", "model": "a", "given": {"goal": "speed"}})
    assert wrong.status_code == 400 and "none of throughput, ttft, context" in wrong.text


# The rest


def test_the_curl_command_on_the_page_follows_the_log(here: Here, client: httpx.Client) -> None:
    shown = client.get("/logs?name=a").text
    command = re.search("<code>(curl.*?)</code>", shown)
    assert command
    told = shlex.split(command[1].replace("&#39;", "'").replace("&amp;", "&"))
    assert told == ["curl", "-N", f"{here.url}/api/logs/a?follow=true"]
    client.post("/api/engines/start/a")
    with client.stream("GET", told[2]) as log:
        assert "serves a" in next(log.iter_lines())


def test_times_carry_utc_for_the_browser_to_localise(client: httpx.Client) -> None:
    assert moment(0.0) == '<time datetime="1970-01-01T00:00:00Z">1970-01-01 00:00:00 UTC</time>'
    client.post("/api/engines/start/a")
    for path in ("/models", "/audit"):
        assert re.search(r'<time datetime="20\d\d-[^"]+Z">20', client.get(path).text), path
