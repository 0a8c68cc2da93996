"""Every request through the gateway is in a table: how it ended, its tokens and its times."""

import asyncio
import contextlib
import csv
import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from overspill.manager.activity import Activity
from overspill.manager.gateway import Gateway
from overspill.manager.messages import (
    GatewayError,
    Usage,
    asked_of,
    end_of_events,
    error_event,
    one_shape,
    with_usage,
    without_usage,
)
from overspill.registry import Registry, RegistryUnavailable, open_registry
from overspill.registry.activity import (
    Request,
    RequestOutcome,
    add_requests,
    forget_old_requests,
    list_requests,
    use_by_client,
)
from tests.chromium import Watched, chromium, needs_chromium
from tests.managed_here import Here, managed_here
from tests.manager_process import Place
from tests.pages import program

NUM_REQUESTS = 1000
JSON = b"application/json"


@pytest.fixture
def here(place: Place) -> Iterator[Here]:
    place.add("a")
    place.add("slow", behaviour={"token_s": 0.05})
    with managed_here(place) as one:
        yield one


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as one:
        yield one


def told(client: httpx.Client, number: int, **wanted: Any) -> list[dict[str, Any]]:
    """The table, once it has so many rows."""
    deadline = time.monotonic() + 60
    while len(rows := client.get("/api/activity", params={"limit": 5000, **wanted}).json()) < number:
        assert time.monotonic() < deadline, len(rows)
        time.sleep(0.1)
    return rows


def body(model: str = "a", **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "x", **more}


async def many(url: str) -> Counter[str]:
    """Requests of each kind, as many as NUM_REQUESTS in all; how many of each were sent."""
    kinds = ("whole", "stream", "stream with usage", "cancelled", "unknown model", "refused by the engine")
    sent: Counter[str] = Counter()
    limit = asyncio.Semaphore(50)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        kind = kinds[number % len(kinds)]
        sent[kind] += 1
        async with limit:
            if kind == "whole":
                assert (await client.post("/v1/completions", json=body(max_tokens=5))).is_success
            elif kind == "stream":
                text = (await client.post("/v1/chat/completions", json=body(max_tokens=6, stream=True))).text
                assert "usage" not in text and text.count("data: {") == 6 and text.endswith("data: [DONE]\n\n")
            elif kind == "stream with usage":
                asked = body(max_tokens=7, stream=True, stream_options={"include_usage": True})
                assert '"usage":{' in (await client.post("/v1/completions", json=asked)).text
            elif kind == "cancelled":
                asked = body("slow", max_tokens=1000, stream=True)
                async with client.stream("POST", "/v1/completions", json=asked) as answer:
                    async for _ in answer.aiter_bytes():
                        break
            elif kind == "unknown model":
                assert (await client.post("/v1/completions", json=body("nope"))).status_code == 404
            else:
                assert (await client.post("/v1/no-such-path", json=body())).status_code == 404

    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(one(client, number) for number in range(NUM_REQUESTS)))
    return sent


def test_a_thousand_requests_are_all_counted(here: Here) -> None:
    with program(here) as client:
        for name in ("a", "slow"):  # both are ready
            assert client.post(f"/api/engines/start/{name}").is_success
        sent = asyncio.run(many(here.url))
        rows = told(client, NUM_REQUESTS)
        assert len(rows) == NUM_REQUESTS and sent.total() == NUM_REQUESTS
        tokens = Counter((row["outcome"], row["prompt_tokens"], row["cached_tokens"]) for row in rows)
        answered = Counter(row["completion_tokens"] for row in rows if row["outcome"] == "ok")
        assert answered == {5: sent["whole"], 6: sent["stream"], 7: sent["stream with usage"]}
        assert tokens["ok", 3, 2] == sent["whole"] + sent["stream"] + sent["stream with usage"]
        cancelled = [row for row in rows if row["outcome"] == "cancelled"]
        assert len(cancelled) == sent["cancelled"] and all(1 <= row["completion_tokens"] < 1000 for row in cancelled)
        failed = Counter((row["http_status"], row["reason"].partition(";")[0]) for row in rows if row["reason"])
        assert failed == {
            (404, "there is no model 'nope' in the registry"): sent["unknown model"],
            (404, "no such path"): sent["refused by the engine"],
        }
        streams = [row for row in rows if row["outcome"] == "ok" and row["completion_tokens"] != 5]
        assert all(0 < row["ttft_s"] <= row["duration_s"] and row["who"] == "local" for row in streams)
        total = sum(one["traffic"]["completion_tokens"] for one in client.get("/api/engines").json())
        assert total == sum(row["completion_tokens"] or 0 for row in rows)


def test_the_table_is_filtered_and_exported(here: Here) -> None:
    with program(here) as client:
        assert client.post("/v1/completions", json=body()).is_success
        assert client.post("/v1/completions", json=body("slow")).is_success
        assert client.post("/v1/completions", json=body("=1+1")).status_code == 404
        told(client, 3)
        assert [row["model"] for row in told(client, 1, model="slow")] == ["slow"]
        assert [row["model"] for row in told(client, 1, outcome="failed")] == ["=1+1"]
        assert client.get("/api/activity", params={"who": "key nobody"}).json() == []
        assert client.get("/api/activity", params={"outcome": "odd"}).status_code == 422
        exported = list(csv.DictReader(io.StringIO(client.get("/api/activity?form=csv").text)))
        assert {row["model"] for row in exported} == {"a", "slow", "'=1+1"}  # not a formula
        assert exported[-1]["completion_tokens"] == "4"


def test_an_engine_that_dies_is_a_failed_request(here: Here, place: Place) -> None:
    place.behave("a", dies_after_tokens=2)
    with program(here) as client:
        assert '"error"' in client.post("/v1/completions", json=body(stream=True)).text
        (row,) = told(client, 1)
        assert row["outcome"] == "failed" and "died or closed the connection" in row["reason"]
        assert row["completion_tokens"] == 2 and row["prompt_tokens"] is None


def test_usage_is_asked_for_and_hidden_again() -> None:
    def passed(path: str = "/v1/completions", **more: Any) -> Any:
        asked = json.dumps({"model": "a", **more}).encode()
        sent = with_usage(asked, asked_of(asked, JSON), path)
        return None if sent is None else json.loads(sent)

    assert passed(stream=True) == {"model": "a", "stream": True, "stream_options": {"include_usage": True}}
    assert passed(stream=True, stream_options=None)["stream_options"] == {"include_usage": True}
    off = {"include_usage": False, "continuous_usage_stats": True}
    assert passed(stream=True, stream_options=off)["stream_options"] == {"include_usage": True}
    assert passed() is None and passed(stream=False) is None and passed("/v1/responses", stream=True) is None
    assert passed(stream=True, stream_options={"include_usage": True}) is None
    token = b'data: {"choices":[{"text":"\\"usage\\":{ "}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n'
    continuous = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":3}}\n\n'
    done = b"data: [DONE]\n\n"
    assert without_usage(token + usage + done) == token + done and without_usage(usage) == b""
    assert without_usage(token + continuous + done) == token + continuous + done
    spaced = usage.replace(b":", b": ").replace(b"\n", b"\r\n")
    assert without_usage(token + spaced + done) == token + done
    assert end_of_events(token + spaced + b"data: ") == len(token + spaced) and end_of_events(b"data: {}\r\n\r") == 0


def test_a_count_that_no_answer_has_is_not_taken() -> None:
    """It did not fit into the registry, and no later request was written."""
    usage = Usage()
    usage.read(b'{"usage": {"prompt_tokens": 7, "completion_tokens": %d}}' % 10**20)
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, None)


def test_an_error_in_a_stream_has_the_form_of_its_clients() -> None:
    body = GatewayError(503, "no room", code="no_room").body
    assert error_event(body, "/v1/chat/completions") == b"data: " + body + b"\n\n"
    first, data = error_event(body, "/v1/messages").decode().strip().split("\n")
    assert first == "event: error" and json.loads(data.removeprefix("data: ")) == {"type": "error", **json.loads(body)}


def noted(**more: Any) -> Request:
    values = {"at": datetime.now(UTC), "model": "a", "who": "key x", "path": "/v1/completions"}
    return Request(**{**values, "outcome": RequestOutcome.OK, **more})


def test_old_requests_go(registry: Registry) -> None:
    add_requests(registry, [noted(model=str(number)) for number in range(10)], keep=4)
    assert [one.model for one in list_requests(registry)] == ["9", "8", "7", "6"]
    add_requests(registry, [noted(model="old", at=datetime.now(UTC) - timedelta(days=40))])
    forget_old_requests(registry)
    assert [one.model for one in list_requests(registry, before=10**15)] == ["9", "8", "7", "6"]
    assert use_by_client(registry)["key x"].requests == 4


def test_speed_is_that_after_the_first_token() -> None:
    assert noted(completion_tokens=11, ttft_s=1.0, duration_s=3.0).tokens_per_s == 5
    assert noted(completion_tokens=10, waited_s=3.0, duration_s=5.0).tokens_per_s == 5
    assert noted(completion_tokens=1, ttft_s=1.0, duration_s=1.0).tokens_per_s is None


def test_requests_outlast_a_registry_that_fails(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity(registry)

    def fail(*_: object) -> None:
        raise RegistryUnavailable("locked")

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("overspill.manager.activity.add_requests", fail)
            activity.note(noted())
            await activity.write()
        activity.note(noted())
        await activity.write()
        await activity.write()

    asyncio.run(run())
    assert len(list_requests(registry)) == 2


def test_a_request_before_the_earlier_ones_are_read_is_shown(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_requests(registry, [noted(model=str(number)) for number in range(10)])
    activity = Activity(registry)

    def read(*args: Any, **limits: Any) -> list[Request]:
        found = list_requests(*args, **limits)
        activity.note(noted(model="new"))
        return found

    async def run() -> None:
        monkeypatch.setattr("overspill.manager.activity.list_requests", read)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(activity.run(), 0.2)

    asyncio.run(run())
    assert [one.model for one in activity.recent] == ["new", "9", "8", "7", "6", "5", "4", "3"]


def test_spilled_tokens_are_those_beyond_the_gpu() -> None:
    plan: dict[str, Any] = {"kv_bytes_per_token": 10, "resident_kv_bytes": 1000, "spilled_kv_bytes": 5000}

    def spilled(plan: dict[str, Any], prompt_tokens: int | None, completion_tokens: int | None = None) -> int | None:
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        gateway: Any = SimpleNamespace(engines=SimpleNamespace(plan=lambda name: plan))
        exchange: Any = SimpleNamespace(usage=usage, model="a")
        return Gateway._spilled(gateway, exchange)

    assert [spilled(plan, 90), spilled(plan, 90, 30), spilled(plan, 150)] == [0, 20, 50]
    assert spilled({**plan, "spilled_kv_bytes": 0}, 150) == 0
    assert spilled({}, 150) is None and spilled(plan, None) is None


@needs_chromium
def test_the_page_shows_new_requests_and_filters_them(here: Here) -> None:
    with program(here) as client, chromium() as browser:
        assert client.post("/v1/completions", json=body()).is_success
        told(client, 1)
        watched = Watched(browser, here.url)
        page = watched.page()
        page.goto("/activity")
        page.get_by_role("cell", name="a", exact=True).wait_for()
        assert client.post("/v1/completions", json=body("<b>x</b>")).status_code == 404
        page.get_by_role("cell", name="<b>x</b>", exact=True).wait_for()
        page.get_by_label("Status").select_option("failed")
        page.get_by_role("button", name="Show").click()
        page.get_by_role("cell", name="<b>x</b>", exact=True).wait_for()
        assert page.get_by_role("cell", name="a", exact=True).count() == 0
        with page.expect_download() as download:
            page.get_by_role("link", name="CSV").click()
        assert "there is no model" in Path(download.value.path()).read_text()
        assert watched.problems == [] and watched.elsewhere == []
        watched.close()


def test_an_engines_refusal_has_the_shape_of_all_others() -> None:
    for body, message in (
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"oh no", "oh no"),
        (b"", "the engine answered 404"),
    ):
        told = json.loads(one_shape(404, body))
        assert told["error"]["message"] == message and told["source"] == "engine"
        assert set(told["error"]) == {"message", "type", "param", "code"}
    known = b'{"error": {"message": "no such path", "type": "NotFoundError", "code": 404}}'
    assert one_shape(404, known) == known


def test_a_name_may_have_a_tag(place: Place) -> None:
    place.add("qwen3:8b")
    with managed_here(place) as here, program(here) as client:
        assert (
            client.post("/v1/completions", json=body("qwen3:8b")).json()["choices"][0]["text"].startswith("qwen3:8b-0")
        )
        assert client.get("/v1/models/qwen3:8b").json()["state"] == "ready"
        assert client.post("/api/engines/stop/qwen3:8b").json()["state"] == "stopped"
