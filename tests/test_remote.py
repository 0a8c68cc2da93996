"""KV shared through a Mooncake Store, on the real engine and a real master: found by another, and never wrong."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from overspill.kv.metrics import OverspillStats
from overspill.kv.remote import tier, worker
from overspill.verify.mooncake import Mooncake, missing, mooncake
from tests.engine import BLOCK, Engine, assert_same, engine, overspill, random_prompt, stock
from tests.managed_process import until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PROMPT = random_prompt(1, 20 * BLOCK + 5)
SLOT = 64 << 10  # of the tiny Llama: 4 layers of 16 KiB


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mooncake]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with mooncake(tmp_path, 64 << 20) as running:
        yield running


@contextmanager
def patience() -> Iterator[None]:
    """A machine that is busy with other tests is not a store that hangs."""
    with mock.patch.object(tier, "DEADLINE_S", 30.0), mock.patch.dict(os.environ, {"MC_RPC_TIMEOUT_MS": "30000"}):
        yield


@pytest.fixture
def patient() -> Iterator[None]:
    with patience():
        yield


@contextmanager
def with_store(
    model: Path, store: Mooncake, *, settings: dict[str, Any] | None = None, **extra: Any
) -> Iterator[Engine]:
    with engine(model, overspill(remote=store.address, **extra), **(settings or {})) as running:
        remote, client = running.scheduler.remote, running.worker.remote
        assert remote is not None and remote.wait_until_open(30)
        assert client is not None
        until(lambda: client.client.is_connected)  # tried again if a busy machine's store answers late
        yield running


def fill(model: Path, store: Mooncake, *prompts: list[int], **extra: Any) -> None:
    with patience(), with_store(model, store, **extra) as first:
        for prompt in prompts:
            first.ask_one(prompt)
        first.drain()
        first.assert_nothing_is_held()
        assert not first.metric("remote_failures") and not first.metric("remote_dropped_blocks")


@pytest.mark.usefixtures("patient")
def test_a_second_engine_finds_the_first_ones_kv(llama: Path, store: Mooncake) -> None:
    prompts = [random_prompt(seed, 20 * BLOCK + 5) for seed in range(4)]
    fill(llama, store, *prompts)
    with with_store(llama, store) as second:
        answers = [second.ask_one(prompt) for prompt in prompts]
        assert [answer.num_cached for answer in answers] == [20 * BLOCK] * 4
        assert second.metric("remote_hit_tokens") == 4 * 20 * BLOCK
        assert second.metric("remote_load_bytes") == 4 * 20 * SLOT
        assert second.metric("remote_bad_blocks") == 0
        second.assert_nothing_is_held()
    assert_same(answers, stock(llama, prompts))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("model", ["gemma3", "mamba-hybrid"])
def test_hybrid_models_are_shared(models: Callable[[str], Path], store: Mooncake, model: str) -> None:
    settings: dict[str, Any] = {"blocks": 200}
    if model == "mamba-hybrid":
        settings["max_num_batched_tokens"] = BLOCK
    prompt = random_prompt(1, 300)
    with with_store(models(model), store, settings=settings) as first:
        expected = first.ask_one(prompt)
        first.drain()
    with with_store(models(model), store, settings=settings) as second:
        answer = second.ask_one(prompt)
        assert answer.num_cached > 0 and second.metric("remote_hit_tokens") == answer.num_cached
        assert_same([answer], [expected])
        second.assert_nothing_is_held()


@pytest.mark.usefixtures("patient")
def test_ram_disk_and_store_hold_one_prefix_together(llama: Path, store: Mooncake, tmp_path: Path) -> None:
    disk = {"disk_bytes": "64MiB", "disk_path": str(tmp_path / "kv")}
    half = PROMPT[: 10 * BLOCK + 1]
    fill(llama, store, PROMPT)
    with with_store(llama, store, **disk) as second:
        second.ask_one(half)  # is on disk at the stop
        second.drain()
        answer = second.ask_one(PROMPT)
        assert answer.num_cached == 20 * BLOCK and second.metric("remote_hit_tokens") == 20 * BLOCK
    with with_store(llama, store, **disk) as third:
        assert third.scheduler.disk is not None and third.scheduler.disk.wait_until_open(30)
        answer = third.ask_one(PROMPT + random_prompt(2, BLOCK))
        assert third.metric("disk_hit_tokens") == answer.num_cached == 20 * BLOCK
        assert not third.metric("remote_hit_tokens")
        third.assert_nothing_is_held()


@pytest.mark.usefixtures("patient")
def test_a_flipped_byte_is_a_miss(llama: Path, store: Mooncake, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(llama, store, PROMPT)
    with with_store(llama, store) as second:
        remote = second.worker.remote
        assert remote is not None and second.worker.memory is not None
        memory, get = second.worker.memory, remote.client.get

        def get_damaged(keys: list[str], slots: list[int]) -> list[int]:
            codes = get(keys, slots)
            memory.slots[slots[12]][7] ^= 1
            return codes

        monkeypatch.setattr(remote.client, "get", get_damaged)
        answer = second.ask_one(PROMPT)
        assert answer.num_cached == 12 * BLOCK
        assert second.metric("remote_corrupt_blocks") == second.metric("remote_bad_blocks") == 1
        second.assert_nothing_is_held()
    assert_same([answer], stock(llama, [PROMPT]))


@pytest.mark.usefixtures("patient")
def test_content_of_another_key_is_a_miss(llama: Path, store: Mooncake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that reuses memory under a reader gives a whole block, with a digest that matches it."""
    fill(llama, store, PROMPT)
    with with_store(llama, store) as second:
        remote = second.worker.remote
        assert remote is not None
        get = remote.client.get
        monkeypatch.setattr(remote.client, "get", lambda keys, slots: get(keys[::-1], slots))
        answer = second.ask_one(PROMPT)
        assert answer.num_cached == 0 and second.metric("remote_corrupt_blocks") == 20
        second.assert_nothing_is_held()
    assert_same([answer], stock(llama, [PROMPT]))


@pytest.mark.usefixtures("patient")
def test_a_block_that_exists_and_is_gone_is_a_miss(
    llama: Path, store: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_store(llama, store) as first:
        remote = first.worker.remote
        assert remote is not None
        monkeypatch.setattr(remote.client, "find", lambda keys: [1] * len(keys))
        answer = first.ask_one(PROMPT)
        assert answer.num_cached == 0 and first.metric("remote_bad_blocks") == 20
        assert first.metric("remote_failures") == 0
        first.assert_nothing_is_held()
    assert_same([answer], stock(llama, [PROMPT]))


def test_an_engines_memory_cannot_be_reached_from_outside(
    llama: Path, store: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse, ports = worker._refuse_connections, []

    def noted(descriptor: int) -> None:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            ports.append(one.getsockname()[1])
        refuse(descriptor)

    monkeypatch.setattr(worker, "_refuse_connections", noted)
    with with_store(llama, store):
        assert len(ports) == 2  # handshakes and data
        for port in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=1)


# Faults.

TURNS = [random_prompt(seed, 6 * BLOCK + 5) for seed in range(20, 28)]


@pytest.mark.parametrize("process", ["master", "store"])
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_no_answer_depends_on_the_store(llama: Path, store: Mooncake, process: str, fault: str) -> None:
    fill(llama, store, PROMPT, *TURNS)
    with with_store(llama, store) as second:
        answers = [second.ask_one(TURNS[0])]
        victim = getattr(store, process)
        victim.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        answers += second.ask(TURNS[1:4])
        answers += [second.ask_one(turn) for turn in TURNS[4:6]]
        if fault == "killed":
            victim.wait()
            getattr(store, f"start_{process}")()
        else:
            victim.send_signal(signal.SIGCONT)
        answers += [second.ask_one(turn) for turn in TURNS[6:]]
    assert_same(answers, stock(llama, TURNS))


@pytest.mark.usefixtures("patient")
def test_an_engine_starts_without_a_store_and_finds_it_later(
    llama: Path, store: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_RETRY_S", 0.2)
    monkeypatch.setattr(tier, "_PAUSE_S", 0.0)
    fill(llama, store, PROMPT)
    store.master.send_signal(signal.SIGSTOP)
    with engine(llama, overspill(remote=store.address)) as late:
        remote = late.worker.remote
        assert remote is not None and late.scheduler.remote is not None
        assert late.scheduler.remote.wait_until_open(30)
        answers = [late.ask_one(TURNS[0])]
        assert not remote.client.is_connected and late.metric("remote_failures")
        store.master.send_signal(signal.SIGCONT)
        while not remote.client.is_connected:
            time.sleep(0.05)
        answers += [late.ask_one(turn) for turn in TURNS[1:3]]  # one of them sees that it is back
        found = late.ask_one(PROMPT)
        assert found.num_cached == 20 * BLOCK
    assert_same([*answers, found], stock(llama, [*TURNS[:3], PROMPT]))


def test_a_master_that_answers_does_not_hide_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = tier.Breaker(OverspillStats())
    for _ in range(3):
        assert breaker.is_closed
        breaker.succeeded("find")
        breaker.failed("load")
    assert not breaker.is_closed and not breaker.may_try()
    later = time.monotonic() + 6
    monkeypatch.setattr(tier.time, "monotonic", lambda: later)
    assert breaker.may_try() and not breaker.may_try()  # one at a time
    breaker.succeeded("find")
    assert not breaker.is_closed and not breaker.may_try()
    breaker.succeeded("load")
    assert breaker.is_closed


@pytest.mark.usefixtures("patient")
def test_a_put_finds_that_an_empty_store_is_back(llama: Path, store: Mooncake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_PAUSE_S", 0.0)
    with with_store(llama, store) as running:
        remote, scheduler = running.worker.remote, running.scheduler.remote
        assert remote is not None and scheduler is not None
        with monkeypatch.context() as down:
            down.setattr(remote.client, "put", lambda keys, slots: [-1] * len(keys))
            for turn in TURNS[:4]:
                running.ask_one(turn)
                running.drain()
            assert not scheduler.breaker.is_closed
        running.ask_one(TURNS[4])
        running.drain()
        assert scheduler.breaker.is_closed
        running.assert_nothing_is_held()
