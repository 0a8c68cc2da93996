"""Upstreams: models of other servers through the gateway, their keys, and what is said when they are gone."""

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import uvloop

from overspill.address import free_port
from overspill.manager import upstreams
from overspill.manager.errors import ManagerError
from overspill.manager.upstreams import Server, parse_servers
from overspill.registry.access import KeyScope, create_key
from overspill.upstream import Upstream, UpstreamLost
from tests import fake_server
from tests.managed_here import managed_here
from tests.manager_process import Place
from tests.pages import program

SECRET = "key of the upstream"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "_LOOK_S", 0.1)
    monkeypatch.setenv("REMOTE_KEY", SECRET)


@contextlib.contextmanager
def other(folder: Path, **behaviour: Any) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A server of another program, which serves org/big."""
    behaviours, port = folder / "other.json", free_port()
    behaviours.write_text(json.dumps({"org/big": behaviour}))
    words = [fake_server.__file__, str(behaviours), "org/big", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-S", *words], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listed(client: httpx.Client) -> dict[str, Any]:
    return {one["id"]: one for one in client.get("/v1/models").json()["data"]}


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    told = answer.json()
    assert set(told["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, told["error"]["code"], told["source"]


def test_models_of_an_upstream_are_listed_and_asked(place: Place, tmp_path: Path) -> None:
    place.add("a")
    place.add("remote/own")
    with other(tmp_path) as (url, process):
        servers = parse_servers([f"remote={url}/v1"], ["remote=REMOTE_KEY"])
        with managed_here(place, upstreams=servers) as here, program(here) as client:
            until(lambda: "remote/org/big" in listed(client))
            assert listed(client)["remote/org/big"]["owned_by"] == "remote"
            assert client.get("/v1/models/remote/org/big").json()["state"] == "upstream"
            with openai.OpenAI(base_url=f"{here.url}/v1", api_key="mine", max_retries=0) as users:
                asked: Any = {"model": "remote/org/big", "messages": [{"role": "user", "content": "x"}]}
                assert users.chat.completions.create(**asked).choices[0].message.content.startswith("org/big-0")
                stream = users.chat.completions.create(**asked, stream=True, max_tokens=3)
                assert [one.choices[0].delta.content for one in stream] == [f"org/big-{i} " for i in range(3)]
            echoed = client.post("/v1/echo", json={"model": "remote/org/big"}, headers={"authorization": "Bearer mine"})
            assert echoed.json()["headers"]["authorization"] == f"Bearer {SECRET}" and "mine" not in echoed.text
            assert echoed.json()["body"] == '{"model":"org/big"}'
            own = client.post("/v1/completions", json={"model": "remote/own", "max_tokens": 1})
            assert own.json()["model"] == "remote/own", "a model of the registry comes first"
            wrong = client.post("/v1/completions", json={"model": "remote/none"})
            assert wrong.status_code == 404 and wrong.json()["error"]["message"] == "wrong model"
            until(lambda: len(client.get("/api/activity", params={"model": "remote/org/big"}).json()) == 3)
            told = client.get("/api/upstreams")
            assert told.json() == [
                {"name": "remote", "url": url, "is_reachable": True, "problem": "", "models": ["remote/org/big"],
                 "requests": 4},
            ]  # fmt: skip
            page = client.get("/").text
            assert ">reachable<" in page and SECRET not in page + told.text + repr(here.application)
            process.kill()
            until(lambda: ">not reachable<" in client.get("/").text)
            lost = client.post("/v1/completions", json={"model": "remote/org/big"})
            assert error_of(lost) == (502, "upstream_lost", "upstream") and "retry-after" in lost.headers
            assert listed(client)["remote/org/big"]["error"] == f"{url} does not answer"
    assert not place.starts("a")


def test_a_stream_passes_and_is_counted_however_it_is_written(place: Place, tmp_path: Path) -> None:
    """Events that end with CRLF waited for the last one; a client got the usage that it had not asked for."""
    with (
        other(tmp_path, is_spaced=True, token_s=0.1) as (url, _),
        managed_here(place, upstreams=parse_servers([f"remote={url}"], [])) as here,
        program(here) as client,
    ):
        until(lambda: "remote/org/big" in listed(client))
        asked = {"model": "remote/org/big", "prompt": "x", "max_tokens": 4, "stream": True}
        events = client.post("/v1/completions", json=asked).text.split("\r\n\r\n")
        assert len(events) == 5 and events[-1] == "data: [DONE]\n\n" and "usage" not in "".join(events)
        until(lambda: client.get("/api/activity").json())
        (row,) = client.get("/api/activity").json()
        assert (row["prompt_tokens"], row["completion_tokens"]) == (3, 4) and row["ttft_s"] is not None
        # The last event comes after longer than a test's time, if the first ones wait for it.
        with client.stream("POST", "/v1/completions", json={**asked, "max_tokens": 10_000}) as answer:
            assert "org/big-0" in next(piece for piece in answer.iter_text() if not piece.startswith(":"))


def test_a_request_that_was_worked_on_is_not_sent_again() -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await reader.readuntil(b"\r\n\r\n"):
            asked += 1
            if asked == 2:
                await asyncio.sleep(1.2)
                writer.close()
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        upstream, url = Upstream(), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        connection, _ = await upstream.request(url, "POST", b"/x", [], b"")
        assert await connection.read_all(10) == b"ok"
        upstream.give_back(connection)
        with pytest.raises(UpstreamLost):
            await upstream.request(url, "POST", b"/x", [], b"")
        upstream.close()
        server.close()

    asyncio.run(run())
    assert asked == 2


@pytest.mark.parametrize("path", ["/v1/../../admin/keys", "/v1/%2e%2e/%2E%2e/admin/keys", "/v1/./x"])
def test_a_path_that_climbs_reaches_no_upstream(place: Place, tmp_path: Path, path: str) -> None:
    """It would have gone to any path of the upstream's host, with the manager's key."""
    with (
        other(tmp_path) as (url, _),
        managed_here(place, upstreams=parse_servers([f"remote={url}"], ["remote=REMOTE_KEY"])) as here,
        program(here) as client,
    ):
        until(lambda: "remote/org/big" in listed(client))
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(here.url).port or 0)
        body = json.dumps({"model": "remote/org/big", "prompt": "x"})
        connection.request("POST", path, body, {"content-type": "application/json"})
        assert connection.getresponse().status == 404
        connection.close()
        (told,) = client.get("/api/upstreams").json()
        assert told["requests"] == 0


def test_an_upstream_that_breaks_off_is_an_error_in_the_stream(place: Place, tmp_path: Path) -> None:
    with (
        other(tmp_path, dies_after_tokens=2) as (url, _),
        managed_here(place, upstreams=parse_servers([f"remote={url}"], [])) as here,
        program(here) as client,
    ):
        until(lambda: "remote/org/big" in listed(client))
        text = client.post("/v1/completions", json={"model": "remote/org/big", "stream": True}).text
        assert text.count('"text":"org/big-') == 2 and '"code": "upstream_lost"' in text


def test_a_key_for_some_models_counts_for_upstreams_too(place: Place, tmp_path: Path) -> None:
    with place.registry() as registry:
        create_key(registry, "owner")
        key, _ = create_key(registry, "phone", KeyScope.GATEWAY, models=["a"])
    with other(tmp_path) as (url, _):
        setup = {"upstreams": parse_servers([f"remote={url}"], [])}
        with managed_here(place, **setup) as here, here.client(authorization=f"Bearer {key}") as client:
            answer = client.post("/v1/completions", json={"model": "remote/org/big"})
            assert error_of(answer) == (403, "model_not_allowed", "gateway")
            assert client.get("/v1/models/remote/org/big").status_code == 403 and listed(client) == {}


def test_a_variable_that_is_not_set_is_said(place: Place) -> None:
    servers = parse_servers(["remote=http://127.0.0.1:9"], ["remote=NOT_SET"])
    with managed_here(place, upstreams=servers) as here, program(here) as client:
        until(lambda: "NOT_SET" in client.get("/api/upstreams").json()[0]["problem"])


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (["remote"], []),
        (["=http://x"], []),
        (["a/b=http://x"], []),
        (["remote=ftp://x"], []),
        (["remote=http://x:none"], []),
        (["remote=http://user:secret@x"], []),
        (["remote=http://x", "remote=http://y"], []),
        (["remote=http://x"], ["other=KEY"]),
        (["remote=http://x"], ["remote=sk-secret"]),
    ],
)
def test_a_bad_upstream_is_refused_without_its_secret(given: list[str], keys: list[str]) -> None:
    with pytest.raises(ManagerError, match="write for example --upstream") as refused:
        parse_servers(given, keys)
    assert "secret" not in str(refused.value)


def test_a_host_that_vanished_is_noticed_by_tcp() -> None:
    async def options() -> list[int]:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = await Upstream().connect(f"http://127.0.0.1:{port}")
        assert connection._transport is not None
        connected = connection._transport.get_extra_info("socket")
        found = [connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT):
            found.append(connected.getsockopt(socket.IPPROTO_TCP, option))
        connection.close()
        server.close()
        return found

    for run in (asyncio.run, uvloop.run):
        assert run(options()) == [1, 30, 10, 3, 60_000]


def test_an_address_may_have_a_path_before_v1() -> None:
    servers = parse_servers(["a=https://x/api/v1/", "b=http://y:1"], [])
    assert servers == (Server("a", "https://x", "/api"), Server("b", "http://y:1", ""))
