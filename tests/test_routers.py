"""Behind routers: vLLM's own, from its package, and what routers that follow KV events receive."""

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from overspill.address import free_port
from tests.test_serve import (
    START_S,
    Serve,
    model,  # noqa: F401 (a fixture)
    serving,
)

NAMES = ("a", "b")
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


class Events:
    """A router's end of the events."""

    def __init__(self, folder: Path) -> None:
        self.endpoints = {name: f"ipc://{folder / name}" for name in NAMES}
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("kv@")
        for endpoint in self.endpoints.values():
            self._socket.connect(endpoint)
        self.seen: list[tuple[str, Any]] = []

    def read(self) -> list[tuple[str, Any]]:
        """The engine's name, and what changed there."""
        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        while self._socket.poll(500):
            topic, _, payload = self._socket.recv_multipart()
            self.seen += [(topic.decode().split("@")[1], event) for event in decoder.decode(payload).events]
        return self.seen

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Events]:
    made = Events(tmp_path_factory.mktemp("events"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def engines(model: Path, events: Events, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serve]]:  # noqa: F811
    with ExitStack() as stack:
        made = []
        for name in NAMES:
            published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events.endpoints[name],
                         "topic": f"kv@{name}@tiny"}  # fmt: skip
            flags = ("--enable-prompt-tokens-details", "--kv-events-config", msgspec.json.encode(published).decode())
            made.append(stack.enter_context(serving(model, *flags, folder=tmp_path_factory.mktemp(name))))
        for engine in made:
            engine.wait_for("/v1 serves")
        yield made


@pytest.fixture(scope="module")
def router(engines: list[Serve], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    port, log = free_port(), tmp_path_factory.mktemp("router") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                Path(sys.executable).with_name("vllm-router"), "--host", "127.0.0.1", "--port", str(port),
                "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--policy", "consistent_hash",
                "--worker-urls", *(f"http://127.0.0.1:{engine.port}" for engine in engines),
            ],
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                if httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        process.terminate()
        process.wait(timeout=30)


def words(seed: int, number: int) -> str:
    return " ".join(f"t{3 + (seed * 97 + 31 * at) % 500}" for at in range(number))


def test_conversations_return_to_the_engine_that_has_their_kv(router: openai.OpenAI, engines: list[Serve]) -> None:
    talks = [[{"role": "user", "content": words(seed, 600)}] for seed in range(20)]

    def ask(session: int) -> Any:
        headers = {"X-Session-ID": hashlib.sha256(bytes([session])).hexdigest()}  # similar ones go to one engine
        return router.chat.completions.create(messages=talks[session], extra_headers=headers, **ASKED)  # type: ignore[call-overload]

    for session, talk in enumerate(talks):
        talk.append({"role": "assistant", "content": ask(session).choices[0].message.content})
    for session, talk in enumerate(talks):
        talk.append({"role": "user", "content": words(99, 20)})
        assert ask(session).usage.prompt_tokens_details.cached_tokens >= 512, "all full blocks"
    assert all(engine.metric("miss_tokens") for engine in engines), "one engine has served all of them"


def test_events_of_all_engines_name_the_medium(engines: list[Serve], events: Events) -> None:
    """In vLLM's own format, decoded by vLLM's own types."""
    for seed, engine in enumerate(engines):
        prompt = [{"role": "user", "content": words(200 + seed, 200)}]
        engine.client().chat.completions.create(messages=prompt, **ASKED)  # type: ignore[call-overload]
    seen = events.read()
    for name in NAMES:
        stored = [event for at, event in seen if at == name and isinstance(event, BlockStored)]
        assert {"GPU", "CPU"} <= {event.medium for event in stored}
        blocks = {
            medium: {h for e in stored if e.medium == medium for h in e.block_hashes} for medium in ("GPU", "CPU")
        }
        assert blocks["CPU"] and blocks["CPU"] <= blocks["GPU"], "a block has the same hash wherever it is"
    assert all(isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared) for _, event in seen)
