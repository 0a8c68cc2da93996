"""The gateway, with OpenAI's own client over real sockets: what it passes, what it refuses, and who it says failed."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvloop

from overspill.kv.sizes import GiB
from overspill.manager import logs
from overspill.manager.backend import EngineProcess, Launched, OwnProcesses, identify
from overspill.manager.fleet import Engines
from overspill.manager.messages import asked_of, rewritten
from overspill.manager.states import State
from overspill.registry import add_model, edit_model
from tests.certificates import make_certificate
from tests.manager_process import IMPATIENT, QUICK_TO_END, Place, eventually, gateway, managing, of_folder


@dataclasses.dataclass
class Served:
    engines: Engines
    url: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    async def post(self, model: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        return await self.http.post(f"{self.url}{path}", json={"model": model, "prompt": "x", **more})

    async def metric(self, model: str, name: str) -> int:
        url = self.engines.snapshot(model).url
        told = (await self.http.get(f"{url}/metrics", headers={"connection": "close"})).text
        return int(dict(line.split() for line in told.splitlines())[name])

    async def until_it_runs(self, model: str) -> None:
        """A request, in the engine."""
        async with asyncio.timeout(60):
            while not await self.metric(model, "fake_running"):
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(
    place: Place, *, body_limit: int = 1 << 20, pause_s: float = 20.0, **options: Any
) -> AsyncIterator[Served]:
    async with (
        managing(place, **options) as engines,
        gateway(engines, max_body_bytes=body_limit, body_pause_s=pause_s) as url,
        httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=None)) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=240) as client,
    ):
        yield Served(engines, url, http, client)


def with_gateway(place: Place, run: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with serving(place, **options) as served:
            await run(served)

    # The event loop that servers use where it is installed: its transports differ from asyncio's.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    told = answer.json()
    assert set(told["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, told["error"]["code"], told["source"]


def test_a_request_loads_its_model_and_gets_its_answer(place: Place) -> None:
    place.add("a", behaviour={"start_s": 0.2})
    place.add("org/b")

    async def run(served: Served) -> None:
        answer = await served.client.chat.completions.create(
            model="a", messages=[{"role": "user", "content": "x"}], max_tokens=3
        )
        assert answer.choices[0].message.content == "a-0 a-1 a-2 "
        stream = await served.client.completions.create(model="org/b", prompt="x", max_tokens=3, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
        assert texts == ["org/b-0 ", "org/b-1 ", "org/b-2 "]
        listed = await served.client.models.list()
        assert {model.id: model.state for model in listed.data} == {"a": "ready", "org/b": "ready"}  # type: ignore[attr-defined]
        assert (await served.client.models.retrieve("org/b")).id == "org/b"
        traffic = served.engines.traffic("a")
        assert (traffic.requests, traffic.in_flight, traffic.prompt_tokens, traffic.completion_tokens) == (1, 0, 3, 3)
        assert served.engines.traffic("org/b").completion_tokens == 3

    with_gateway(place, run)


def test_cumulative_usage_in_a_stream_is_counted_once(place: Place) -> None:
    """Each token came with the sum so far, and all sums were added."""
    place.add("a", behaviour={"token_s": 0.01})
    place.add("b", behaviour={"dies_after_tokens": 3})
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"stream": True, "max_tokens": 5, "stream_options": options}

    def counted(served: Served, name: str) -> tuple[int, int]:
        traffic = served.engines.traffic(name)
        return traffic.prompt_tokens, traffic.completion_tokens

    async def run(served: Served) -> None:
        assert (await served.post("a", **asked)).text.count('"usage":{') == 6
        assert counted(served, "a") == (3, 5)
        assert "engine_died" in (await served.post("b", **asked)).text
        assert counted(served, "b") == (3, 3)
        url, body = f"{served.url}/v1/completions", {"model": "a", "prompt": "x", **asked, "max_tokens": 9999}
        async with served.http.stream("POST", url, json=body) as stream:
            await anext(stream.aiter_bytes())
        await eventually(lambda: served.engines.traffic("a").cancelled)
        prompt, completion = counted(served, "a")
        assert prompt == 6 and 5 < completion < 1000

    with_gateway(place, run)


def test_bytes_go_through_unchanged_and_secrets_do_not(place: Place) -> None:
    place.add("a")

    async def run(served: Served) -> None:
        body = b'{ "model":"a",  "odd":  [1.0, "\\u00e4", 1e5] }'
        headers = {"authorization": "Bearer secret", "cookie": "session=1", "x-request-id": "7", "x-api-key": "secret"}
        answer = await served.http.post(f"{served.url}/v1/echo?n=1", content=body, headers=headers)
        told = answer.json()
        assert told["body"].encode() == body and told["headers"]["x-request-id"] == "7"
        assert "secret" not in answer.text and "session" not in answer.text
        assert "x-private" not in answer.headers and "access-control-allow-origin" not in answer.headers
        direct = await served.http.post(f"{served.engines.snapshot('a').url}/v1/completions", json=STREAMED)
        through = await served.http.post(f"{served.url}/v1/completions", json=STREAMED)
        assert direct.content == through.content and through.headers["content-type"] == "text/event-stream"

    with_gateway(place, run)


STREAMED = {"model": "a", "prompt": "x", "stream": True, "max_tokens": 5}


def test_a_stream_comes_as_it_is_made_and_not_at_its_end(place: Place) -> None:
    place.add("a", behaviour={"token_s": 0.05})

    async def run(served: Served) -> None:
        stream = await served.client.completions.create(model="a", prompt="x", max_tokens=500, stream=True)
        async for _ in stream:
            # The rest of the answer would take 25 s.
            assert await served.metric("a", "fake_running") == 1
            break
        await stream.close()

    with_gateway(place, run)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_ends_its_request_in_the_engine(place: Place, is_stream: bool) -> None:
    place.add("a", behaviour={"token_s": 0.05})

    async def run(served: Served) -> None:
        asking = asyncio.create_task(served.post("a", stream=is_stream, max_tokens=2000))
        await eventually(lambda: served.engines.traffic("a").in_flight)
        await served.until_it_runs("a")
        asking.cancel()
        await eventually(lambda: not served.engines.traffic("a").in_flight)
        async with asyncio.timeout(60):
            while not await served.metric("a", "fake_aborted"):
                await asyncio.sleep(0.05)
        assert await served.metric("a", "fake_running") == 0
        traffic = served.engines.traffic("a")
        assert (traffic.cancelled, traffic.failed) == (1, 0)

    with_gateway(place, run)


def test_a_client_leaving_during_a_load_leaves_the_queue(place: Place) -> None:
    place.add("a", behaviour={"start_s": 30})

    async def run(served: Served) -> None:
        asking = asyncio.create_task(served.post("a"))
        await eventually(lambda: served.engines.traffic("a").waiting)
        asking.cancel()
        await eventually(lambda: not served.engines.traffic("a").waiting)
        assert served.engines.traffic("a").cancelled == 1

    with_gateway(place, run)


BAD_REQUESTS: dict[str, tuple[bytes, tuple[int, str]]] = {
    "no JSON": (b"{", (400, "bad_json")),
    "not text": (b"\xff\xfe\x00", (400, "bad_json")),
    "a list": (b"[1]", (400, "bad_json")),
    "nested without end": (b"[" * 100_000, (400, "bad_json")),
    "nothing": (b"", (400, "bad_json")),
    "nested without end in a field": (b'{"model": "qwen", "x": ' + b"[" * 100_000, (400, "bad_json")),
    "more behind it": (b'{"model": "qwen"} x', (400, "bad_json")),
    "a model that is no text": (b'{"model": "\xff"}', (400, "bad_json")),
    "half a character for a model": (b'{"model": "\\ud800 and so on"}', (400, "bad_json")),
    "a list for a model": (b'{"model": ["qwen"]}', (400, "model_missing")),
    "no model": (b"{}", (400, "model_missing")),
    "a number for a model": (b'{"model": 7}', (400, "model_missing")),
    "a model that is not there": (b'{"model": "qwem"}', (404, "model_not_found")),
    "a path for a model": (b'{"model": "../../etc/passwd"}', (404, "model_not_found")),
}


def test_errors_have_openais_shape(place: Place) -> None:
    place.add("qwen")

    async def run(served: Served) -> None:
        for name, (body, expected) in BAD_REQUESTS.items():
            answer = await served.http.post(f"{served.url}/v1/completions", content=body)
            assert error_of(answer) == (*expected, "gateway"), name

        chunk = b"100001\r\n" + b"x" * 0x100001 + b"\r\n"  # one byte more than is accepted
        for large in (b"content-length: %d\r\n\r\n" % (1 << 30), b"transfer-encoding: chunked\r\n\r\n" + chunk):
            reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + large)
            answer = (await reader.read()).decode()
            writer.close()
            assert answer.startswith("HTTP/1.1 413 ")
            told = json.loads(answer.partition("\r\n\r\n")[2])
            assert (told["error"]["code"], told["source"]) == ("too_large", "gateway")
        with pytest.raises(openai.NotFoundError, match="did you mean qwen"):
            await served.client.completions.create(model="qwem", prompt="x")
        assert error_of(await served.http.get(f"{served.url}/v1/nothing")) == (404, "unknown_url", "gateway")
        assert error_of(await served.http.get(f"{served.url}/v1/models/none"))[:2] == (404, "model_not_found")
        assert not place.starts("qwen")

    with_gateway(place, run)


def test_an_engines_refusal_is_passed_on_unchanged(place: Place) -> None:
    place.add("a")

    async def run(served: Served) -> None:
        answer = await served.post("a", path="/v1/nothing")
        assert (answer.status_code, answer.json()) == (
            404, {"error": {"message": "no such path", "type": "NotFoundError", "code": 404}},
        )  # fmt: skip

    with_gateway(place, run)


def test_the_served_model_name_is_sent_to_the_engine(place: Place) -> None:
    place.add("a", behaviour={"served": "other"})

    async def run(served: Served) -> None:
        assert (await served.post("a", max_tokens=1)).json()["choices"][0]["text"] == "other-0 "

    with_gateway(place, run)


def test_another_name_leaves_the_rest_of_a_request_as_it_was(place: Place) -> None:
    place.add("a", behaviour={"served": "other"})

    async def run(served: Served) -> None:
        body = b'{"model": "a", "odd": [1.0, "\\u00e4",  1e5, {"model": "a"}], "n": 12345678901234567890123}'
        told = (await served.http.post(f"{served.url}/v1/echo", content=body)).json()["body"].encode()
        assert told == b'{"model":"other","odd":[1.0, "\\u00e4",  1e5, {"model": "a"}],"n":12345678901234567890123}'

    with_gateway(place, run)


@pytest.mark.parametrize("served_name", [None, "other"])
def test_a_form_with_a_recording_goes_to_the_model_it_names(place: Place, served_name: str | None) -> None:
    """As OpenAI's client sends what is to be transcribed; it was refused as no JSON."""
    place.add("org/whisper", behaviour={"served": served_name})

    async def run(served: Served) -> None:
        form = {"language": "de", "model": "org/whisper"}
        request = served.http.build_request(
            "POST", f"{served.url}/v1/echo", data=form, files={"file": ("ä.wav", b"RIFF\r\n\r\n--model\r\n")}
        )
        sent = (await request.aread()).decode()
        told = (await served.http.send(request)).json()
        assert told["body"] == sent.replace("org/whisper", served_name or "org/whisper")
        assert told["headers"]["content-type"] == request.headers["content-type"]
        for data, code in (({"language": "de"}, "model_missing"), ({"model": "none"}, "model_not_found")):
            answer = await served.http.post(f"{served.url}/v1/echo", data=data, files={"file": b"RIFF"})
            assert error_of(answer)[1:] == (code, "gateway")
        headers = {"content-type": "multipart/form-data"}
        answer = await served.http.post(f"{served.url}/v1/echo", content=sent.encode(), headers=headers)
        assert error_of(answer) == (400, "bad_form", "gateway")

    with_gateway(place, run)


def test_a_prompt_of_millions_of_numbers_stops_no_stream(place: Place) -> None:
    """All of them were made into objects, and no other token passed meanwhile: 4 s for 50 MiB."""
    numbers = ", ".join(map(str, range(2_000_000)))
    body = f'{{"model": "a", "prompt": [{numbers}]}}'.encode()
    kind = b"application/json"
    began = time.process_time()
    json.loads(body)
    objects_s = time.process_time() - began
    began = time.process_time()
    assert asked_of(body, kind).model == "a"
    assert rewritten(body, kind, "other") == body.replace(b'{"model": "a", "prompt": ', b'{"model":"other","prompt":')
    assert time.process_time() - began < objects_s


class OverTls(OwnProcesses):
    """Engines that say that they speak TLS, as `overspill serve --ssl-certfile` does."""

    def launch(self, name: str, log_file: Path, folder: Path) -> Launched:
        launched = super().launch(name, log_file, folder)
        assert launched.url is not None
        return dataclasses.replace(launched, url=launched.url.replace("http:", "https:"))


def test_an_engine_that_speaks_tls_is_asked_over_tls(place: Place) -> None:
    """It was asked in plain text, and so was starting for ever."""
    certificate = make_certificate(place.folder)
    place.add("a", behaviour={"certificate": str(certificate), "token_s": 0.02})

    async def run(served: Served) -> None:
        assert (await served.post("a", max_tokens=2)).json()["choices"][0]["text"] == "a-0 a-1 "
        stream = await served.client.completions.create(model="a", prompt="x", max_tokens=3, stream=True)
        assert [chunk.choices[0].text async for chunk in stream if chunk.choices] == ["a-0 ", "a-1 ", "a-2 "]
        (kept,) = served.engines.upstream._idle.values()
        assert len(kept) == 1, "the second request made a connection of its own"
        asking = asyncio.create_task(served.post("a", max_tokens=9999, stream=True))
        await eventually(lambda: served.engines.traffic("a").in_flight)
        await served.engines.stop("a")
        assert "ended while it answered" in (await asking).text

    usual = place.options().backend
    assert isinstance(usual, OwnProcesses)
    with_gateway(place, run, backend=OverTls(program=usual.program))


def test_an_engine_that_cannot_start_is_a_503_with_its_log(place: Place) -> None:
    place.add("a", behaviour={"dies_at_start": True, "says": "shard 3 of 4"})

    async def run(served: Served) -> None:
        answer = await served.post("a")
        assert error_of(answer) == (503, "engine_failed", "engine")
        assert "the weights are broken" in answer.text and "shard 3 of 4" in answer.text
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        again = await served.post("a")
        assert again.status_code == 503 and len(place.starts("a")) == 1
        listed = (await served.http.get(f"{served.url}/v1/models")).json()["data"][0]
        assert listed["state"] == "failed" and "broken" in listed["error"]

    with_gateway(place, run)


def test_a_full_queue_and_a_load_that_takes_too_long_are_503s(place: Place) -> None:
    place.add("a", behaviour={"start_s": 30})

    async def run(served: Served) -> None:
        answers = await asyncio.gather(*(served.post("a") for _ in range(3)))
        codes = sorted(error_of(answer) for answer in answers)
        assert codes == [(503, "engine_starting", "engine")] * 2 + [(503, "queue_full", "gateway")]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)

    with_gateway(place, run, most_waiting=2, timing=dataclasses.replace(IMPATIENT, load_s=3.0))


def test_an_engine_that_dies_while_it_answers_is_a_502(place: Place) -> None:
    place.add("a", behaviour={"dies_after_tokens": 2})

    async def run(served: Served) -> None:
        assert error_of(await served.post("a")) == (502, "engine_died", "engine")
        await eventually(lambda: served.engines.snapshot("a").state is State.FAILED)
        place.behave("a")
        await served.engines.start("a")
        assert (await served.post("a")).status_code == 200

    with_gateway(place, run)


@pytest.mark.parametrize("inside", [False, True])
def test_an_engine_dying_in_a_stream_raises_an_error_in_clients(place: Place, inside: bool) -> None:
    place.add("a", behaviour={"dies_after_tokens": 2, "dies_inside_event": inside})

    async def run(served: Served) -> None:
        stream = await served.client.completions.create(model="a", prompt="x", max_tokens=9, stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="engine of a died"):
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
        assert texts == ["a-0 ", "a-1 "]
        assert served.engines.traffic("a").failed == 1

    with_gateway(place, run)


def test_a_model_that_is_stopped_ends_its_streams_and_says_so(place: Place) -> None:
    place.add("a", behaviour={"token_s": 0.05, "ignores_sigterm": True})

    async def run(served: Served) -> None:
        stream = await served.client.completions.create(model="a", prompt="x", max_tokens=999, stream=True)
        await anext(aiter(stream))
        stopping = asyncio.create_task(served.engines.stop("a"))
        with pytest.raises(openai.APIError, match="it was stopped"):
            async for _ in stream:
                pass
        await stopping

    with_gateway(place, run)


def test_an_answer_may_take_hours(place: Place) -> None:
    """vLLM sends nothing of a whole answer before its end; after half an hour of silence it was a 504."""
    place.add("a", behaviour={"token_s": 0.3})

    async def main() -> None:
        async with serving(place) as served, httpx.AsyncClient(timeout=None) as http:
            await served.engines.ensure_ready("a")
            asking = asyncio.create_task(http.post(f"{served.url}/v1/completions", json={"model": "a", "prompt": "x"}))
            await eventually(lambda: served.engines.traffic("a").in_flight)
            await served.until_it_runs("a")
            loop = asyncio.get_running_loop()
            usual = loop.time
            loop.time = lambda: usual() + 5 * 3600  # type: ignore[method-assign]
            answer = await asking
            assert answer.status_code == 200, answer.text

    asyncio.run(main())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_hung_engine_is_killed_and_its_requests_fail(place: Place, is_stream: bool) -> None:
    place.add("a", behaviour={"token_s": 0.1})

    async def run(served: Served) -> None:
        asking = asyncio.create_task(served.post("a", max_tokens=9999, stream=is_stream))
        await eventually(lambda: served.engines.traffic("a").in_flight)
        (pid,) = place.starts("a")
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        answer = await asking
        assert answer.status_code == (200 if is_stream else 502)
        told = json.loads(answer.text.rpartition("data: ")[2]) if is_stream else answer.json()
        assert told["error"]["code"] in ("engine_died", "engine_stopped"), told
        await eventually(lambda: served.engines.snapshot("a").state is State.FAILED)
        assert "had not answered for 2 s" in served.engines.snapshot("a").error

    with_gateway(place, run, timing=dataclasses.replace(QUICK_TO_END, stop_patience_s=0.3))


def test_a_client_that_sends_slowly_or_reads_nothing_is_let_go(place: Place) -> None:
    place.add("a")

    async def run(served: Served) -> None:
        await served.engines.start("a")
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
        assert b"408" in await reader.readline()
        writer.close()
        loop = asyncio.get_running_loop()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await loop.sock_connect(deaf, (host, int(port)))
            body = json.dumps({**STREAMED, "max_tokens": 200_000}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
            await loop.sock_sendall(deaf, head % len(body) + body)
            await eventually(lambda: served.engines.traffic("a").in_flight)
            await eventually(lambda: not served.engines.traffic("a").in_flight)
        assert served.engines.traffic("a").cancelled == 1

    with_gateway(place, run, pause_s=1.0, timing=dataclasses.replace(IMPATIENT, stalled_client_s=1.0))


def test_a_kept_connection_closed_by_the_engine_is_not_an_error(place: Place) -> None:
    place.add("a", behaviour={"closes_kept": True})

    async def run(served: Served) -> None:
        for i in range(4):
            assert (await served.post("a")).status_code == 200
            (kept,) = served.engines.upstream._idle.values()
            assert len(kept) == 1, "no connection is kept, so none can be closed"
            assert await served.metric("a", "fake_answered") == i + 1

    with_gateway(place, run)


def test_the_registry_being_locked_does_not_stop_what_is_known(place: Place) -> None:
    place.add("a")

    async def run(served: Served) -> None:
        with place.registry() as registry, registry.writing():
            assert (await served.post("a")).status_code == 200
        with place.registry() as registry:
            edit_model(registry, "a", {"ttl": 99})

    with_gateway(place, run)


def test_sixteen_clients_of_two_models_that_do_not_fit_together(place: Place) -> None:
    """Streams and whole answers, cancelled ones, and an engine that is killed in between."""
    for name in ("a", "b"):
        place.add(name, ram=2 * GiB, behaviour={"token_s": 0.002, "has_child": name == "a"})
    outcomes: dict[str, int] = {}

    async def one(client: openai.AsyncOpenAI, draw: random.Random) -> str:
        model, num = draw.choice("ab"), draw.randint(1, 12)
        expected = "".join(f"{model}-{i} " for i in range(num))
        kind = draw.choice(["whole", "stream", "cancelled"])
        try:
            if kind == "whole":
                answer = await client.completions.create(model=model, prompt="x", max_tokens=num)
                assert answer.choices[0].text == expected
                return "answered"
            if kind == "cancelled":
                asking = asyncio.create_task(client.completions.create(model=model, prompt="x", max_tokens=5000))
                await asyncio.sleep(draw.random() * 0.3)
                asking.cancel()
                return "cancelled"
            stream = await client.completions.create(model=model, prompt="x", max_tokens=num, stream=True)
            texts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
            assert "".join(texts) == expected
            return "answered"
        except openai.APIError as error:
            told: Any = error.body
            assert told["code"] in ("engine_died", "engine_stopped", "engine_failed"), told
            await asyncio.sleep(0.3)  # as Retry-After says, and not so long
            return "failed"

    async def client_life(served: Served, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(13):
            outcome = await one(served.client, draw)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

    async def kill_some(served: Served) -> None:
        for name in ("a", "b"):
            await eventually(lambda name=name: served.engines.traffic(name).in_flight)
            pid = served.engines.snapshot(name).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    async def run(served: Served) -> None:
        clients = [client_life(served, seed) for seed in range(16)]
        await asyncio.gather(*clients, kill_some(served))
        assert sum(outcomes.values()) == 16 * 13 and outcomes["answered"] > 100, outcomes
        assert len(place.starts("a")) > 1 and len(place.starts("b")) > 1
        assert outcomes["failed"], "the kills hit nobody"
        for name in ("a", "b"):
            await eventually(lambda name=name: not served.engines.traffic(name).in_flight)
            await eventually(lambda name=name: not served.engines.traffic(name).waiting)

    timing = dataclasses.replace(IMPATIENT, back_off_s=0.2, stop_patience_s=0.5)
    with_gateway(place, run, timing=timing)
    assert not of_folder(place.folder)


def test_a_swap_keeps_neither_model_waiting_for_ever(place: Place) -> None:
    """Two models that are asked for all the time take turns, and each serves more than one request a turn."""
    for name in ("a", "b"):
        place.add(name, ram=2 * GiB, behaviour={"token_s": 0.005})

    async def run(served: Served) -> None:
        done = {"a": 0, "b": 0}

        async def asking(name: str) -> None:
            while min(done.values()) < 12:
                assert (await served.post(name)).status_code == 200
                done[name] += 1

        await asyncio.gather(*(asking(name) for name in "ab" for _ in range(4)))
        assert len(place.starts("a")) + len(place.starts("b")) < sum(done.values()) / 2

    with_gateway(place, run)


def test_an_unwritable_log_folder_is_a_503(place: Place) -> None:
    place.add("a")

    async def run(served: Served) -> None:
        folder = place.folder / "manager" / "logs"
        folder.write_text("in the way")
        answer = await served.post("a")
        assert error_of(answer) == (503, "engine_failed", "engine") and "could not be started" in answer.text
        folder.unlink()

    with_gateway(place, run)


@pytest.mark.soak  # the pages' tests load real engines through the gateway as well
def test_a_real_engine_is_planned_loaded_asked_and_stopped(place: Place, llama: Path) -> None:
    """vLLM on the CPU, started by `overspill serve` from the registry's settings."""
    from overspill.manager.states import Timing

    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"XDG_CONFIG_HOME": "/nonexistent", "OVERSPILL_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "INFO"}
    environment["OVERSPILL_DATABASE_URL"] = f"sqlite:///{place.folder}/registry.db"
    with place.registry() as registry:
        add_model(
            registry, "tiny",
            {
                "source": str(llama), "max_model_len": 4096, "gpu_memory": "8MiB", "ram": "12GiB",
                "offload_ram": "64MiB", "dtype": "float32", "max_num_seqs": 4, "enforce_eager": True,
                "vllm_args": ["--skip-tokenizer-init"],
            },
        )  # fmt: skip

    async def run(served: Served) -> None:
        prompt = [random.Random(i).randrange(3, 512) for i in range(300)]
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = await served.http.post(f"{served.url}/v1/completions", json={"model": "tiny", **asked}, timeout=240)
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["choices"][0]["token_ids"]
        assert len(tokens) == 8
        ready = served.engines.snapshot("tiny")
        assert ready.state is State.READY and ready.needs_restart == () and "tiny" in ready.served_names
        await eventually(lambda: served.engines.snapshot("tiny").phase == "ready")
        ready = served.engines.snapshot("tiny")
        names = [name for name, _ in ready.phases]
        assert names[0] == "starting vLLM" and names[-1] == "ready" and "loading the model" in names
        # The plan's: 8 MiB in place of a GPU's memory, spilled and idle KV, and the process.
        assert ready.plan["spilled_kv_bytes"] > 0 and ready.memory["spilled_bytes"] == ready.plan["spilled_kv_bytes"]
        assert 3 * GiB < ready.holds.ram_bytes < 4 * GiB and ready.holds.gpu_bytes == 0
        told = "\n".join(logs.tail(served.engines.log_file("tiny"), 2000))
        assert "overspill: " in told and "INFO" in told  # what serve says, and what vLLM does
        stream = served.http.stream(
            "POST", f"{served.url}/v1/completions", json={"model": "tiny", **asked, "stream": True}, timeout=60
        )
        async with stream as streaming:
            events = [line.removeprefix("data: ") async for line in streaming.aiter_lines() if line]
        assert events[-1] == "[DONE]"
        streamed = [t for event in events[:-1] for c in json.loads(event)["choices"] for t in c.get("token_ids") or ()]
        assert streamed == tokens
        refused = await served.http.post(f"{served.url}/v1/completions", json={"model": "tiny", "prompt": 7})
        assert refused.status_code == 400 and "source" not in refused.json()  # vLLM's own words
        assert ready.pid is not None
        family = EngineProcess(identify(ready.pid) or pytest.fail("it is gone"))
        assert len(family.living()) >= 4  # serve, its guard, vLLM's server and engine
        assert (await served.engines.stop("tiny")).state is State.STOPPED
        assert family.living() == []

    backend = OwnProcesses(environment=environment)
    with_gateway(place, run, backend=backend, memory=None, reckon=None, timing=Timing())
