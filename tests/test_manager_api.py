"""The manager's API: what the page does, for programs; real processes, real registry, real HTTP."""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from overspill.kv.sizes import GiB
from overspill.manager.allowlist import FlagNotAllowed, require_allowed
from overspill.manager.job_commands import JobKind, command
from overspill.manager.web.app import make_web
from overspill.registry.access import KeyScope, create_key, set_password
from tests.managed_here import Here, managed_here
from tests.manager_process import Place

PASSWORD = "four words, not together"


@pytest.fixture
def here(place: Place) -> Iterator[Here]:
    place.add("a", behaviour={"start_s": 0.1})
    place.add("b", ram=2 * GiB)
    with managed_here(place) as running:
        yield running


@pytest.fixture
def client(here: Here) -> Iterator[httpx.Client]:
    with here.client() as opened:
        yield opened


def until(client: httpx.Client, path: str, **wanted: object) -> Any:
    deadline = time.monotonic() + 120
    while True:
        told = client.get(path).json()
        if all(told.get(name) == value for name, value in wanted.items()):
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


# Models


def test_models_are_added_changed_and_removed(client: httpx.Client, place: Place) -> None:
    source = str(place.folder / "model")
    added = client.post("/api/models", json={"name": "c", "source": source, "ram": "8GiB", "max_model_len": "4k"})
    assert added.status_code == 201 and added.json()["ram"] == 8 << 30 and added.json()["state"] == "stopped"
    assert [one["name"] for one in client.get("/api/models").json()] == ["a", "b", "c"]
    edited = client.patch("/api/models/c", json={"max_model_len": 2048, "ram": None, "version": 1}).json()
    assert edited["changed"] == ["max_model_len", "ram"] and edited["model"]["max_model_len"] == 2048
    stale = client.patch("/api/models/c", json={"notes": "x", "version": 1})
    assert stale.status_code == 409 and "changed meanwhile" in message(stale)
    assert client.delete("/api/models/c").status_code == 200
    gone = client.get("/api/models/c")
    assert gone.status_code == 404 and "there is no model 'c'" in message(gone)


def test_a_name_with_a_slash_is_one_model(client: httpx.Client, place: Place) -> None:
    body = {"name": "owner/start/c", "source": str(place.folder / "model"), "ram": GiB}
    assert client.post("/api/models", json=body).status_code == 201
    assert client.get("/api/models/owner/start/c").json()["name"] == "owner/start/c"
    place.behave("owner/start/c")
    assert client.post("/api/engines/start/owner/start/c").json()["state"] == "ready"
    assert client.post("/api/engines/stop/owner/start/c").json()["state"] == "stopped"


def test_models_from_elsewhere_are_refused(client: httpx.Client) -> None:
    for source in ("/etc", "../model", "/proc/self/root/etc", "a/../../b", "~root", "x\ny"):
        refused = client.post("/api/models", json={"name": "bad", "source": source})
        assert refused.status_code == 403, refused.text
        edited = client.patch("/api/models/a", json={"source": source})
        assert edited.status_code == 403 and client.get("/api/models/a").json()["version"] == 1


RUN_CODE = (
    "--trust-remote-code", "--trust_remote_code", "--trust-remote", "--middleware=os.system", "--worker-cls=x.Y",
    "--config=/etc/passwd", "--kv-transfer-config={}", "--chat-template=/etc/passwd", "--compilation-config.x=1",
    "-O3", "--seed.x=1", "--load-format=runai",
)  # fmt: skip


def test_the_web_refuses_flags_that_run_code_or_open_files(client: httpx.Client) -> None:
    for flag in RUN_CODE:
        refused = client.patch("/api/models/a", json={"vllm_args": ["--seed", "7", flag]})
        assert refused.status_code == 403 and "may not be set over the web" in message(refused)
        with pytest.raises(FlagNotAllowed):
            require_allowed([flag])
    assert client.patch("/api/models/a", json={"vllm_args": ["--seed", "7"]}).status_code == 200


def test_a_restricted_flag_set_elsewhere_survives_other_edits(place: Place) -> None:
    place.add("a", vllm_args=["--trust-remote-code"])
    with managed_here(place) as here, here.client() as client:
        body = {"vllm_args": ["--trust-remote-code"], "notes": "as it was"}
        assert client.patch("/api/models/a", json=body).status_code == 200
        assert client.patch("/api/models/a", json={"vllm_args": ["--trust-remote-code", "--seed=1"]}).status_code == 403
    with managed_here(place, any_vllm_flag=True) as here, here.client() as client:
        body = {"vllm_args": ["--trust-remote-code", "--seed=1"]}
        assert client.patch("/api/models/a", json=body).status_code == 200


# Engines


def test_an_engine_starts_answers_through_the_gateway_and_stops(client: httpx.Client) -> None:
    ready = client.post("/api/engines/start/a").json()
    assert ready["state"] == "ready" and ready["pid"] and ready["url"].startswith("http://127.0.0.1:")
    asked = {"model": "a", "prompt": "x", "max_tokens": 2}
    assert client.post("/v1/completions", json=asked).status_code == 200
    assert client.get("/api/engines/a").json()["traffic"]["requests"] == 1
    assert {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]} == {
        "a": "ready", "b": "stopped",
    }  # fmt: skip
    assert 'fake_answered{model="a"} 1\n' in client.get("/metrics").text
    assert 'overspill_manager_engine_state{model="a",state="ready"} 1.0' in client.get("/metrics").text
    assert 'overspill_manager_requests_total{model="a"} 1.0' in client.get("/metrics").text
    assert client.post("/api/engines/stop/a").json()["state"] == "stopped"


def test_start_without_wait_returns_the_current_state(client: httpx.Client, place: Place) -> None:
    place.behave("a", start_s=1.0)
    begun = client.post("/api/engines/start/a?wait=false")
    assert begun.status_code == 202 and begun.json()["state"] in ("stopped", "starting")
    until(client, "/api/engines/a", state="ready")


def test_start_without_room_is_a_conflict_and_switch_makes_room(client: httpx.Client) -> None:
    client.post("/api/engines/start/a")
    refused = client.post("/api/engines/start/b")
    assert refused.status_code == 409 and "Stop a first, or switch to b" in message(refused)
    assert client.post("/api/engines/switch/b").json()["state"] == "ready"
    assert client.get("/api/engines/a").json()["state"] == "stopped"
    assert client.post("/api/engines/restart/b").json()["state"] == "ready"


def test_a_failed_start_reports_the_last_lines_of_the_log(client: httpx.Client, place: Place) -> None:
    place.behave("a", dies_at_start=True, says="shard 3 of 4")
    failed = client.post("/api/engines/start/a")
    assert failed.status_code == 409 and "shard 3 of 4" in message(failed) and "exit code" in message(failed)
    engine = client.get("/api/engines/a").json()
    assert engine["state"] == "failed" and "shard 3 of 4" in "\n".join(engine["log_lines"])
    assert "shard 3 of 4" in client.get("/api/logs/a").text
    assert client.get("/api/logs/a", params={"search": "SHARD"}).text.count("\n") == 1
    page = client.get("/models").text
    assert "shard 3 of 4" in page and "failed" in page


def test_changes_of_engines_come_as_events(client: httpx.Client) -> None:
    states = []
    with client.stream("GET", "/api/events") as events:
        lines = events.iter_lines()
        client.post("/api/engines/start/a?wait=false")
        for line in lines:
            if line.startswith("data: ") and json.loads(line[6:])["name"] == "a":
                states.append(json.loads(line[6:])["state"])
                if states[-1] == "ready":
                    break
    assert states[0] == "stopped" and "starting" in states


def test_a_log_is_followed_as_plain_text(client: httpx.Client) -> None:
    client.post("/api/engines/start/a")
    with client.stream("GET", "/api/logs/a?follow=true") as told:
        assert told.headers["content-type"].startswith("text/plain")
        assert "serves a on port" in next(told.iter_text())


def test_five_hundred_watchers_leave_no_listeners_behind(here: Here, client: httpx.Client) -> None:
    assert here.application is not None
    with httpx.Client(base_url=here.url, limits=httpx.Limits(max_connections=600), timeout=60) as many:
        for path in ("/events/dashboard", "/api/events", "/events/models"):
            opened = [many.send(many.build_request("GET", path), stream=True) for _ in range(170)]
            assert all(one.status_code == 200 for one in opened)
            for one in opened:
                one.close()
    deadline = time.monotonic() + 30
    while here.application.engines.changes.has_listeners or here.application.watching.changes.has_listeners:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert client.get("/healthz").text == "ok\n" and client.head("/healthz").status_code == 200


# The machine


def test_the_machine_is_measured_and_its_history_kept(client: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while len(client.get("/api/history", params={"names": "cpu.use"}).json()["time"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    history = client.get("/api/history", params={"names": "ram.used_bytes,cpu.use"}).json()
    assert set(history["series"]) == {"ram.used_bytes", "cpu.use"} and history["time"] == sorted(history["time"])
    newer = client.get("/api/history", params={"names": "cpu.use", "after": history["time"][-2]}).json()
    assert min(newer["time"]) > history["time"][-2]
    told = client.get("/api/memory").json()
    ram = told["maps"][-1]
    assert ram["title"] == "RAM" and sum(part["bytes"] for part in ram["parts"]) == ram["total_bytes"]
    assert {chart["title"] for chart in client.get("/api/charts").json()} >= {"RAM", "CPU"}
    assert client.get("/api/sample").json()["ram"]["total_bytes"] == ram["total_bytes"]


def test_the_audit_log_has_actions_with_their_outcome(client: httpx.Client) -> None:
    client.post("/api/engines/start/a")
    client.post("/api/engines/start/b")
    client.patch("/api/models/a", json={"source": "/etc"})
    told = [(one["who"], one["action"], one["subject"], one["outcome"]) for one in client.get("/api/audit").json()]
    assert told == [
        ("local", "edit model", "a", "refused"), ("local", "start", "b", "refused"), ("local", "start", "a", "done"),
    ]  # fmt: skip


# Jobs


def test_a_job_runs_its_command_shows_output_and_can_be_stopped(client: httpx.Client) -> None:
    body = {"kind": "bench", "model": "a", "given": {"workload": "multi-turn:conversations=1,turns=1,think_time=0"}}
    job = client.post("/api/jobs", json=body).json()
    over = until_over(client, job["id"])
    assert "http://127.0.0.1:" in " ".join(over["argv"]) and over["argv"][0] == sys.executable
    assert client.get(f"/api/jobs/{job['id']}/log").text
    slow = {"kind": "bench", "model": "a", "given": {"workload": "multi-turn:conversations=1,turns=50,think_time=60"}}
    job = client.post("/api/jobs", json=slow).json()
    until(client, f"/api/jobs/{job['id']}", state="running")
    assert client.get("/api/engines/a").json()["traffic"]["in_flight"] >= 1  # it is not taken away meanwhile
    client.post(f"/api/jobs/{job['id']}/stop")
    assert until_over(client, job["id"])["state"] == "stopped"


def until_over(client: httpx.Client, number: int) -> Any:
    deadline = time.monotonic() + 60
    while (job := client.get(f"/api/jobs/{number}").json())["state"] in ("waiting", "running"):
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job


NOT_JOBS: tuple[dict[str, Any], ...] = (
    {"kind": "rm", "model": "a"},
    {"kind": "bench", "model": "a", "given": {"api_key": "x"}},
    {"kind": "bench", "model": "a", "given": {"seed": "1; rm"}},
    {"kind": "ab", "model": "a", "given": {"a": "none", "b": "vllm --trust-remote-code"}},
    {"kind": "ab", "model": "a", "given": {"a": "none", "b": "--worker-cls x.Y"}},
    {"kind": "ab", "model": "a", "given": {"a": "none", "b": "x=vllm '--trust-remote-code'"}},
    {"kind": "ab", "model": "a", "given": {"a": "none", "b": "native:1GiB --middleware x.y"}},
    {"kind": "ab", "model": "a", "given": {"a": "none", "b": "x = --log-file=/etc/passwd"}},
)


def test_jobs_that_could_run_anything_else_are_refused(client: httpx.Client) -> None:
    for body in NOT_JOBS:
        assert client.post("/api/jobs", json=body).status_code in (400, 403), body
    assert client.get("/api/jobs").json() == []


def test_a_value_that_looks_like_a_flag_is_a_value() -> None:
    words = command(JobKind.BENCH, "a", {"label": "--api-key=x"}, url="http://127.0.0.1:1", served="a")
    assert words[-1] == "--label=--api-key=x"


# Access


def test_a_password_hides_everything_until_login(place: Place) -> None:
    place.add("a")
    with place.registry() as registry:
        set_password(registry, PASSWORD)
        key, _ = create_key(registry, "laptop", KeyScope.ALL)
        narrow, _ = create_key(registry, "phone", KeyScope.GATEWAY)
    with managed_here(place) as here, here.client() as client:
        for path in ("/api/models", "/metrics", "/v1/models", "/api/openapi.json", "/events/models"):
            assert client.get(path).status_code == 401
        assert client.get("/", headers={"accept": "text/html"}).headers["location"] == "/login"
        assert client.get("/login").status_code == 200 and "Dashboard" not in client.get("/login").text
        assert client.get("/api/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        with_narrow = {"authorization": f"Bearer {narrow}"}
        assert client.get("/v1/models", headers=with_narrow).status_code == 200
        assert client.get("/api/models", headers=with_narrow).status_code == 403
        client.cookies.clear()
        origin = {"origin": here.url}
        assert client.post("/login", data={"secret": "wrong"}, headers=origin).status_code == 403
        assert client.post("/login", data={"secret": PASSWORD}, headers=origin).status_code == 303
        page = client.get("/models")
        assert page.status_code == 200 and "Log out" in page.text
        # A browser's request without the page's token changes nothing.
        assert client.post("/models/start/a", headers=origin).status_code == 403
        token = page.text.partition('data-token="')[2].partition('"')[0]
        with_token = {**origin, "x-csrf-token": token}
        assert client.post("/models/start/a", headers=with_token).status_code == 202
        assert client.post("/models/stop/a", headers={**with_token, "origin": "http://evil"}).status_code == 403
        assert client.post("/logout", headers=with_token).status_code == 200
        assert client.get("/api/models").status_code == 401


def test_wrong_passwords_have_to_wait(place: Place) -> None:
    with place.registry() as registry:
        set_password(registry, PASSWORD)
    with managed_here(place) as here, here.client() as client:
        now = time.monotonic()
        here.application.limit._clock = lambda: now  # no wait is ever over
        tried = [client.post("/login", data={"secret": f"guess {i}"}).status_code for i in range(12)]
        assert tried[0] == 403 and tried[-1] == 429
        waiting = client.post("/login", data={"secret": PASSWORD})
        assert waiting.status_code == 429 and int(waiting.headers["retry-after"]) > 0


# Found servers


def test_only_a_found_server_that_is_named_is_stopped(client: httpx.Client) -> None:
    assert isinstance(client.get("/api/found").json(), list)
    refused = client.post("/api/found/1/stop", json={"identity": "x", "confirm_name": "init"})
    assert refused.status_code == 400 and "nothing was stopped" in message(refused)


# The description


def test_every_path_of_the_openapi_description_is_documented() -> None:
    description = make_web(None).openapi()
    assert len(description["paths"]) > 25
    for path, methods in description["paths"].items():
        assert path.startswith("/api/")
        for method, one in methods.items():
            assert one["summary"] and "422" in one["responses"] and "404" in one["responses"], (path, method)


def test_errors_have_one_shape(client: httpx.Client) -> None:
    for answer in (
        client.post("/api/models", json={"name": "c", "no_such": 1}),
        client.post("/api/models", content=b"{", headers={"content-type": "application/json"}),
        client.get("/api/nothing"),
        client.get("/api/results/99"),
        client.get("/api/jobs/99"),
        client.put("/api/models"),
        client.get("/api/history?by=year"),
        client.get("/api/compare?ids="),
        client.post("/api/plan", json={"name": "nope"}),
    ):
        assert 400 <= answer.status_code < 500 and message(answer)


def test_nothing_in_a_page_comes_from_elsewhere_or_is_inline(client: httpx.Client) -> None:
    for path in ("/", "/models", "/try", "/runs", "/logs", "/found", "/audit", "/api", "/login"):
        page = client.get(path)
        assert page.status_code == 200
        assert " style=" not in page.text and " onclick=" not in page.text and "<script>" not in page.text
        # Servers of this machine that others started are named with their address; the tests beside these have some.
        text = page.text.replace("http://THIS", "").replace("http://127.0.0.1", "")
        assert not [word for word in ("https://", "//cdn", "http://") if word in text]
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
