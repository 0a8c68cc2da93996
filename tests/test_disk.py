"""KV on disk, on the real engine: found again after a restart, after a kill, and never wrong."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest

from overspill.kv.disk import key, segments, tier
from overspill.kv.disk.folder import JOURNAL, kept_in
from overspill.kv.disk.journal import Journal
from overspill.kv.disk.segments import DiskWorker, Segments, segment_path
from overspill.kv.errors import OverspillError
from tests.engine import (
    BLOCK,
    Answer,
    Engine,
    assert_same,
    engine,
    overspill,
    random_prompt,
    stock,
)
from tests.test_new_weights import ask_adapter, behind_the_connector, write_adapter
from tests.tiny_models import make_llama

PROMPT = random_prompt(1, 20 * BLOCK + 5)
SLOT = 64 << 10  # of the tiny Llama: 4 layers of 16 KiB


def on_disk(folder: Path, **extra: Any) -> Any:
    return overspill(**{"disk_bytes": "64MiB", "disk_path": str(folder), **extra})


@contextmanager
def with_disk(model: Path, folder: Path, *, settings: dict[str, Any] | None = None, **extra: Any) -> Iterator[Engine]:
    with engine(model, on_disk(folder, **extra), **(settings or {})) as running:
        disk = running.scheduler.disk
        assert disk is not None and disk.wait_until_open(30)
        yield running


def fill(model: Path, folder: Path, prompts: list[list[int]], **extra: Any) -> list[Answer]:
    """Ask, and stop: all of it is on disk then."""
    with with_disk(model, folder, **extra) as running:
        answers = [running.ask_one(prompt) for prompt in prompts]
        running.drain()
        return answers


def key_folder(folder: Path) -> Path:
    (kept,) = kept_in(folder)
    return kept.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


# Restarts.


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a_restarted_engine_finds_a_prompt_on_disk(llama: Path, folder: Path, store: str) -> None:
    prompts = [PROMPT, PROMPT] if store == "lazy" else [PROMPT]  # lazy stores what is used again
    expected = fill(llama, folder, prompts, store=store)[:1]
    with with_disk(llama, folder, store=store) as again:
        assert not again.scheduler.host.num_cached
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 20 * BLOCK
        assert again.metric("disk_hit_tokens") == 20 * BLOCK
        assert again.metric("disk_read_bytes") == 20 * SLOT
        again.assert_nothing_is_held()
    assert_same([answer], expected)
    assert_same([answer], stock(llama, [PROMPT]))


def test_an_engine_stopped_while_parked_leaves_its_kv_on_disk(llama: Path, folder: Path) -> None:
    with with_disk(llama, folder, park=True) as parked:
        expected = parked.ask_one(PROMPT)
        parked.drain()
        assert parked.core.overspill_park()["state"] == "parked"
    with with_disk(llama, folder) as again:
        answer = again.ask_one(PROMPT)
    assert answer.num_cached == 20 * BLOCK
    assert_same([answer], [expected])


@pytest.mark.parametrize("model", ["gemma3", "chunked-local", "mamba-hybrid"])
def test_hybrid_models_are_restored(models: Callable[[str], Path], folder: Path, model: str) -> None:
    settings: dict[str, Any] = {"blocks": 200}
    if model == "mamba-hybrid":
        settings["max_num_batched_tokens"] = BLOCK
    prompt = random_prompt(1, 300)
    with with_disk(models(model), folder, settings=settings) as first:
        expected = [first.ask_one(prompt)]
        first.drain()
    with with_disk(models(model), folder, settings=settings) as again:
        answer = again.ask_one(prompt)
        assert answer.num_cached > 0 and again.metric("disk_hit_tokens") == answer.num_cached
        assert_same([answer], expected)
        again.assert_nothing_is_held()


def test_a_second_turn_continues_what_is_on_disk(llama: Path, folder: Path) -> None:
    (first,) = fill(llama, folder, [PROMPT])
    longer = PROMPT + list(first.tokens) + random_prompt(2, 100)
    with with_disk(llama, folder) as again:
        answer = again.ask_one(longer)
        assert answer.num_cached == (len(PROMPT) + 23) // BLOCK * BLOCK
        again.drain()
    assert_same([answer], stock(llama, [longer]))
    with with_disk(llama, folder) as third:
        answer = third.ask_one(longer)
        assert answer.num_cached == (len(longer) - 1) // BLOCK * BLOCK
    assert_same([answer], stock(llama, [longer]))


def test_two_ranks_are_restored(llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with with_disk(llama, folder, settings=settings) as first:
        first.ask_one(PROMPT)
        first.drain()
    with with_disk(llama, folder, settings=settings) as again:
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 20 * BLOCK
        again.drain()
    assert_same([answer], stock(llama, [PROMPT]))
    with segment_path(key_folder(folder), 1, 0).open("r+b") as file:
        file.write(b"\xff" * 8192)
    with with_disk(llama, folder, settings=settings) as third:
        damaged = third.ask_one(PROMPT)
        assert third.metric("disk_bad_blocks") > 0
    assert_same([damaged], stock(llama, [PROMPT]))


@pytest.mark.parametrize("when", ["before the journal", "after the journal"])
def test_a_killed_engine_leaves_what_was_journaled(llama: Path, folder: Path, when: str) -> None:
    command = [sys.executable, "-m", "tests.disk_script", str(llama), str(folder), when]
    killed = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=300)
    assert killed.returncode == -9
    journaled = json.loads(killed.stdout.splitlines()[-1]) if when == "after the journal" else 0
    assert journaled == (8 if when == "after the journal" else 0)
    prompts = [random_prompt(seed, 300) for seed in range(2)]
    with with_disk(llama, folder) as again:
        assert len(again.scheduler.disk.index) == journaled  # type: ignore[union-attr, arg-type]
        answers = [again.ask_one(prompt) for prompt in prompts]
        # The prompt used last is written first, from its head.
        assert sum(answer.num_cached for answer in answers) == journaled * BLOCK
        again.drain()
    assert_same(answers, stock(llama, prompts))


# Damage.


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x11]))


def damage_data(folder: Path, block: int) -> None:
    """All of one block."""
    path = segment_path(key_folder(folder), 0, 0)
    for at in range(0, SLOT, 64):
        flip(path, block * SLOT + at + 3)


def test_a_flipped_byte_on_disk_is_found_out(llama: Path, folder: Path, log: pytest.LogCaptureFixture) -> None:
    expected = fill(llama, folder, [PROMPT])
    flip(segment_path(key_folder(folder), 0, 0), 7 * SLOT + 100)
    with with_disk(llama, folder) as again:
        answer = again.ask_one(PROMPT)
        assert again.metric("disk_bad_blocks") == 1
        assert 0 < answer.num_cached < 20 * BLOCK
        assert "did not hold what was written" in log.text
        assert_same([answer], expected)
        again.assert_nothing_is_held()
    # The block was computed, and written again at the stop.
    with with_disk(llama, folder) as third:
        assert third.ask_one(PROMPT).num_cached == 20 * BLOCK
        assert third.metric("disk_bad_blocks") == 0


def test_without_the_checksum_damage_changes_the_answer(
    llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the checksum is what the tests above rest on."""
    (expected,) = fill(llama, folder, [PROMPT])
    damage_data(folder, 7)

    def unchecked(self: DiskWorker, of: Segments, call: Any, positions: list[int], digests: Any) -> Any:
        part = segments._Part(positions)
        of.read(call)
        for _, slot in call:
            self._checksums.note(slot, self._checksums.digest(slot))
        return part

    monkeypatch.setattr(DiskWorker, "_read", unchecked)
    with with_disk(llama, folder) as again:
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 20 * BLOCK
        assert answer.differs_from(expected), "the model does not notice a damaged block, so it proves nothing"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_a_torn_journal_loses_its_tail_only(llama: Path, folder: Path, share: float) -> None:
    expected = fill(llama, folder, [PROMPT, random_prompt(2, 300)])
    journal = key_folder(folder) / JOURNAL
    os.truncate(journal, int(journal.stat().st_size * share))
    with with_disk(llama, folder) as again:
        answers = [again.ask_one(PROMPT), again.ask_one(random_prompt(2, 300))]
        assert_same(answers, expected)


def test_an_old_journal_over_newer_data_gives_no_wrong_block(llama: Path, folder: Path) -> None:
    """As after a power loss that kept the data and lost the end of the journal."""
    few = {"disk_bytes": 24 * SLOT}
    expected = fill(llama, folder, [PROMPT], **few)
    journal = key_folder(folder) / JOURNAL
    old = journal.read_bytes()
    other = random_prompt(2, 20 * BLOCK + 5)
    fill(llama, folder, [other], **few)
    assert journal.read_bytes() != old
    journal.write_bytes(old)
    with with_disk(llama, folder, **few) as again:
        assert_same([again.ask_one(PROMPT)], expected)
        assert again.metric("disk_bad_blocks") > 0
        answer = again.ask_one(other)
    assert_same([answer], stock(llama, [other]))


def test_a_fine_tune_under_the_same_name_has_its_own_kv(
    llama: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 20)
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    (before,) = fill(model, folder, [PROMPT])
    shutil.rmtree(model)
    make_llama(model, seed=7)
    with with_disk(model, folder) as swapped:
        answer = swapped.ask_one(PROMPT)
        assert answer.num_cached == 0 and swapped.metric("disk_hit_tokens") == 0
        assert answer.differs_from(before)
        assert len(kept_in(folder)) == 2
        swapped.drain()
    with with_disk(model, folder) as again:
        second = again.ask_one(PROMPT)
        assert second.num_cached == 20 * BLOCK
        assert_same([second], [answer])
    shutil.rmtree(model)
    shutil.copytree(llama, model)
    with with_disk(model, folder) as back:
        third = back.ask_one(PROMPT)
        assert third.num_cached == 20 * BLOCK
        assert_same([third], [before])


@pytest.mark.parametrize("changed", [{"block_size": 64}, {"hf_overrides": {"rope_theta": 12345.0}}], ids=str)
def test_another_setup_has_its_own_kv(llama: Path, folder: Path, changed: dict[str, Any]) -> None:
    fill(llama, folder, [PROMPT])
    with engine(llama, **changed) as plain:
        expected = plain.ask_one(PROMPT)
    with with_disk(llama, folder, settings=changed) as other:
        answer = other.ask_one(PROMPT)
        assert answer.num_cached == 0
        assert_same([answer], [expected])


# A disk that fails.


def test_a_full_disk_fails_no_request(llama: Path, folder: Path, log: pytest.LogCaptureFixture) -> None:
    prompts = [random_prompt(seed, 300) for seed in range(4)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with with_disk(llama, folder) as running:
        answers = [running.ask_one(prompt) for prompt in prompts]
        running.drain()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            assert running.vllm_scheduler.connector.flush_disk(running.core, 30) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "the disk is full" in log.text
        assert running.scheduler.disk.index.num_places == 0  # type: ignore[union-attr]
        answers.append(running.ask_one(prompts[0]))
        running.assert_nothing_is_held()
    assert_same(answers, stock(llama, [*prompts, prompts[0]]))
    fill(llama, folder, prompts)
    with with_disk(llama, folder) as again:
        assert again.ask_one(prompts[0]).num_cached == 9 * BLOCK


def test_failed_reads_are_recomputed(llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fill(llama, folder, [PROMPT])

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Segments, "read", fail)
    with with_disk(llama, folder) as again:
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 0
        assert again.metric("disk_bad_blocks") == 20
        assert_same([answer], expected)
        again.assert_nothing_is_held()


Hanging = Callable[[], threading.Event]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Hanging:
    """Makes the disk hang, until the event is set."""

    def begin() -> threading.Event:
        gate, read = threading.Event(), Segments.read

        def hang(self: Segments, call: Any) -> None:
            gate.wait(60)
            read(self, call)

        monkeypatch.setattr(Segments, "read", hang)
        monkeypatch.setattr(tier, "_PATIENCE_S", 0.2)
        return gate

    return begin


def test_a_disk_that_hangs_does_not_hang_the_request(llama: Path, folder: Path, hanging: Hanging) -> None:
    expected = fill(llama, folder, [PROMPT])
    gate = hanging()
    with with_disk(llama, folder) as again:
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 0
        assert_same([answer], expected)
        gate.set()
        again.assert_nothing_is_held()


def test_a_disk_that_hangs_delays_one_request_only(llama: Path, folder: Path, hanging: Hanging) -> None:
    other = random_prompt(2, 300)
    fill(llama, folder, [PROMPT, other])
    gate = hanging()
    with with_disk(llama, folder) as again:
        again.ask_one(PROMPT)
        disk = again.scheduler.disk
        assert disk is not None and len(disk._reads) == 1
        again.ask_one(other)
        assert len(disk._reads) == 1
        gate.set()
        again.assert_nothing_is_held()


def test_abort_during_a_read_leaks_nothing(llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fill(llama, folder, [PROMPT])
    gate, read = threading.Event(), Segments.read

    def hang(self: Segments, call: Any) -> None:
        gate.wait(60)
        read(self, call)

    monkeypatch.setattr(Segments, "read", hang)
    with with_disk(llama, folder) as again:
        request = again.add(PROMPT)
        for _ in range(3):
            again.step()
        assert again.scheduler.disk.is_busy()  # type: ignore[union-attr]
        again.llm.llm_engine.abort_request([request])
        gate.set()
        again.assert_nothing_is_held()
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 20 * BLOCK
        assert_same([answer], expected)


def test_a_flush_out_of_time_keeps_what_it_wrote(
    llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier, "_FLUSH_BLOCKS", 4)
    with with_disk(llama, folder) as running:
        expected = running.ask_one(PROMPT)
        running.drain()
        disk = running.scheduler.disk
        assert disk is not None
        complete, moment = disk.complete, tier.time.monotonic()

        def slow(report: Any) -> None:
            complete(report)
            monkeypatch.setattr(tier.time, "monotonic", lambda: moment + 1e6)

        monkeypatch.setattr(disk, "complete", slow)
        assert running.vllm_scheduler.connector.flush_disk(running.core, 30) == 4
        monkeypatch.undo()
        assert "were not written to disk within 30 s" in log.text
        assert running.metric("disk_dropped_blocks") >= 0
        running.assert_nothing_is_held()
        assert_same([running.ask_one(PROMPT)], [expected])


# What is written, and the bound.


def test_only_blocks_used_again_are_written_when_they_leave_ram(llama: Path, folder: Path) -> None:
    once, twice = random_prompt(1, 300), random_prompt(2, 300)
    with with_disk(llama, folder, host_bytes=30 * SLOT, settings={"blocks": 13}) as running:
        disk = running.scheduler.disk
        assert disk is not None and disk.index is not None
        disk._most_queued = 16
        first = running.ask_one(twice)
        running.ask_one(twice)
        running.ask_one(once)
        for seed in range(10, 16):  # push both out of RAM
            running.ask_one(random_prompt(seed, 300))
        running.drain()
        assert running.metric("disk_write_bytes") >= 9 * SLOT
        assert 9 <= len(disk.index) <= 10
        again = running.ask_one(twice)
        assert again.num_cached == 9 * BLOCK and running.metric("disk_hit_tokens") == 9 * BLOCK
        assert_same([again], [first])
        assert running.ask_one(once).num_cached == 0
        running.assert_nothing_is_held()


def test_a_slow_disk_drops_tails_and_delays_nothing(llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), Segments.write

    def hang(self: Segments, call: Any) -> None:
        gate.wait(60)
        write(self, call)

    monkeypatch.setattr(Segments, "write", hang)
    monkeypatch.setattr(tier, "_WRITE_BLOCKS", 2)
    prompts = [random_prompt(seed, 300) for seed in range(6)]
    with with_disk(llama, folder, host_bytes=32 * SLOT, settings={"blocks": 13}) as running:
        answers = []
        for prompt in prompts:
            answers.append(running.ask_one(prompt))
            assert_same([running.ask_one(prompt)], answers[-1:])
        assert running.metric("disk_dropped_blocks") > 0
        gate.set()
        running.drain()
        running.assert_nothing_is_held()
    assert_same(answers, stock(llama, prompts))


def test_the_disk_stays_within_its_bound(llama: Path, folder: Path) -> None:
    bound = 25 * SLOT
    prompts = [random_prompt(seed, 300) for seed in range(6)]
    for start in (0, 2, 4):
        fill(llama, folder, prompts[start : start + 2], disk_bytes=bound)
        (kept,) = kept_in(folder)
        assert kept.num_bytes <= bound + (64 << 10)
    with with_disk(llama, folder, disk_bytes=bound) as again:
        assert again.scheduler.disk.index.num_places == 25  # type: ignore[union-attr]
        answers = [again.ask_one(prompt) for prompt in prompts]
        assert answers[5].num_cached == 9 * BLOCK, "the newest stays"
        assert answers[0].num_cached == 0, "the oldest made room"
    assert_same(answers, stock(llama, prompts))


def test_a_disk_too_small_for_a_block_is_refused(llama: Path, folder: Path) -> None:
    with (
        pytest.raises(Exception, match=r"disk_bytes of .* holds no block of KV, which takes 64 KiB"),
        engine(llama, on_disk(folder, disk_bytes=SLOT - 1)),
    ):
        pass


def test_a_long_life_does_not_grow_the_journal(llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_SMALL_JOURNAL", 10)
    few = {"disk_bytes": 12 * SLOT, "host_bytes": 24 * SLOT}
    with with_disk(llama, folder, **few) as running:
        for seed in range(8):
            running.ask_one(random_prompt(seed, 300))
            running.drain()
            running.vllm_scheduler.connector.flush_disk(running.core, 30)
        disk = running.scheduler.disk
        assert disk is not None and disk.index is not None and disk._journal is not None
        assert disk._journal.num_records <= 2 * len(disk.index) + 10 < 8 * 9
    with with_disk(llama, folder, **few) as again:
        answer = again.ask_one(random_prompt(7, 300))
        assert answer.num_cached == 9 * BLOCK
    assert_same([answer], stock(llama, [random_prompt(7, 300)]))


def test_kv_of_other_weights_makes_room(llama: Path, folder: Path, tmp_path: Path) -> None:
    bound = 24 * SLOT
    other = make_llama(tmp_path / "other", seed=7)
    fill(other, folder, [PROMPT], disk_bytes=bound)
    fill(llama, folder, [PROMPT], disk_bytes=bound)
    (kept,) = kept_in(folder)
    with with_disk(llama, folder, disk_bytes=bound) as again:
        assert again.ask_one(PROMPT).num_cached == 20 * BLOCK
    assert kept.num_bytes <= bound + (64 << 10)


def test_other_keys_leave_as_the_own_kv_grows(
    llama: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two keys made room, and the other was never looked at again."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4 * SLOT)
    bound = 30 * SLOT
    for seed in (7, 8):
        fill(
            make_llama(tmp_path / str(seed), seed=seed), folder, [random_prompt(seed, 8 * BLOCK + 5)], disk_bytes=bound
        )
    counts = []
    with with_disk(llama, folder, disk_bytes=bound) as running:
        disk = running.scheduler.disk
        for seed in range(3):
            running.ask_one(random_prompt(seed, 9 * BLOCK + 5))
            running.drain()
            running.vllm_scheduler.connector.flush_disk(running.core, 30)
            if disk._trimming is not None:
                disk._trimming.join()
            counts.append(len(kept_in(folder)))
        assert sum(kept.num_bytes for kept in kept_in(folder)) <= bound + 4 * SLOT
    assert counts == [3, 2, 1]


def test_a_prompt_longer_than_the_pool_comes_from_disk_in_part(llama: Path, folder: Path) -> None:
    expected = fill(llama, folder, [PROMPT])
    with with_disk(llama, folder, host_bytes=16 * SLOT) as small:
        answer = small.ask_one(PROMPT)
        assert 8 * BLOCK <= answer.num_cached < 20 * BLOCK
        assert_same([answer], expected)
        small.assert_nothing_is_held()


def test_kv_events_name_the_disk(llama: Path, folder: Path) -> None:
    events = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    bound = 24 * SLOT

    def asked(running: Engine, prompt: list[int]) -> list[Any]:
        seen: list[Any] = []
        connector = running.vllm_scheduler.connector
        take = type(connector).take_events
        connector.take_events = lambda: [seen.append(event) or event for event in take(connector)]
        running.ask_one(prompt)
        running.drain()
        connector.flush_disk(running.core, 30)
        running.ask_one(random_prompt(9, 10))  # events go out with a step
        running.drain()
        return seen

    def named(seen: list[Any], kind: type, medium: str) -> list[Any]:
        return [event for event in seen if isinstance(event, kind) and event.medium == medium]

    with with_disk(llama, folder, settings=events, disk_bytes=bound) as first:
        seen = asked(first, PROMPT)
        stored = named(seen, BlockStored, "STORAGE")
        assert [event.token_ids for event in stored[:2]] == [PROMPT[:BLOCK], PROMPT[BLOCK : 2 * BLOCK]]
        assert stored[1].parent_block_hash == stored[0].block_hashes[0]
        in_ram = [event.block_hashes for event in named(seen, BlockStored, "CPU")]
        assert all(event.block_hashes in in_ram for event in stored)
        removed = named(asked(first, random_prompt(2, 400)), BlockRemoved, "STORAGE")
        assert removed and all(event.block_hashes in in_ram for event in removed)
        first.ask_one(PROMPT)
        first.drain()
    with with_disk(llama, folder, settings=events, disk_bytes=bound) as again:
        seen = asked(again, PROMPT)
        assert again.metric("disk_hit_tokens") > 0
        # RAM has them now, and says so with the tokens.
        tokens = [event.token_ids for event in named(seen, BlockStored, "CPU")]
        assert PROMPT[:BLOCK] in tokens


# Decisions.


def test_a_slow_disk_is_not_read(llama: Path, folder: Path) -> None:
    fill(llama, folder, [PROMPT])
    with with_disk(llama, folder, load="auto") as again:
        again.scheduler.speeds.disk_bytes_per_s = 1000.0
        again.scheduler.speeds.prefill_tokens_per_s = 1000.0
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 0 and again.metric("disk_skipped_tokens") == 20 * BLOCK
    assert_same([answer], stock(llama, [PROMPT]))


def test_the_disks_speed_is_learnt(llama: Path, folder: Path) -> None:
    fill(llama, folder, [PROMPT])
    with with_disk(llama, folder, load="auto") as again:
        again.ask_one(PROMPT)
        again.drain()
        assert again.scheduler.speeds.disk_bytes_per_s > 0


def test_a_second_engine_on_the_folder_is_refused(llama: Path, folder: Path) -> None:
    with (
        with_disk(llama, folder) as running,
        pytest.raises(OverspillError, match="in use by another server"),
    ):
        config = running.llm.llm_engine.vllm_config
        scheduler = running.scheduler
        tier.DiskTier(
            running.vllm_scheduler.connector._options, config, None, scheduler.host, scheduler.speeds,  # type: ignore[arg-type]
            scheduler.stats, iter(()), SLOT, scheduler.adapters, scheduler._origins.event,
        )  # fmt: skip


def test_random_block_hashes_are_refused(llama: Path, folder: Path) -> None:
    with (
        pytest.raises(ValueError, match="change with every start: use --prefix-caching-hash-algo sha256"),
        engine(llama, on_disk(folder), prefix_caching_hash_algo="xxhash"),
    ):
        pass


# Weights that change.


def test_new_weights_leave_the_disk_alone(llama: Path, folder: Path) -> None:
    (old,) = fill(llama, folder, [PROMPT])
    with with_disk(llama, folder) as running:
        behind_the_connector(running)
        assert running.llm.reset_prefix_cache()
        new = running.ask_one(PROMPT)
        assert new.num_cached == 0 and new.differs_from(old)
        running.drain()
    with with_disk(llama, folder) as again:
        answer = again.ask_one(PROMPT)
        assert answer.num_cached == 20 * BLOCK
        assert_same([answer], [old])


def test_an_rpc_that_may_change_weights_detaches_the_disk(llama: Path, folder: Path) -> None:
    with with_disk(llama, folder, keep_on_reset=True) as running:
        running.ask_one(PROMPT)
        running.drain()
        running.core.collective_rpc(lambda worker: None)
        running.ask_one(PROMPT)
        running.drain()
    with with_disk(llama, folder) as again:
        assert again.ask_one(PROMPT).num_cached == 0


def test_a_reset_of_the_connector_empties_the_disk(llama: Path, folder: Path) -> None:
    fill(llama, folder, [PROMPT])
    with with_disk(llama, folder) as running:
        assert running.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    with with_disk(llama, folder) as again:
        assert again.ask_one(PROMPT).num_cached == 0


def test_a_reset_before_the_index_is_open_empties_the_disk(
    llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(llama, folder, [PROMPT])
    gate, facts = threading.Event(), tier.model_facts

    def wait(*args: Any) -> Any:
        gate.wait(60)
        return facts(*args)

    monkeypatch.setattr(tier, "model_facts", wait)
    with engine(llama, on_disk(folder)) as running:
        assert running.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        gate.set()
    with with_disk(llama, folder) as again:
        assert again.ask_one(PROMPT).num_cached == 0


def test_a_reset_empties_ram_although_the_disk_is_full(
    llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Journal, records: Any) -> None:
        raise OSError(28, "No space left on device")

    with with_disk(llama, folder, keep_on_reset=True) as running:
        running.ask_one(PROMPT)
        running.drain()
        monkeypatch.setattr(Journal, "replace", refuse)
        assert running.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        assert running.scheduler.host.num_cached == 0
        assert "cannot be deleted: [Errno 28]" in log.text


def test_an_adapter_replaced_between_starts_has_its_own_kv(llama: Path, folder: Path, tmp_path: Path) -> None:
    """vLLM's hashes hold the adapter's name and path only, and both stay the same."""
    path = tmp_path / "adapter"
    lora = {"enable_lora": True, "max_lora_rank": 8}
    adapter = LoRARequest("a", 1, str(path))

    def asked(seed: int) -> Answer:
        write_adapter(path, seed=seed)
        with with_disk(llama, folder, settings=lora) as running:
            return ask_adapter(running, adapter)

    first = asked(1)
    assert asked(1).num_cached == 10 * BLOCK, "the same adapter finds its KV"
    second = asked(2)
    assert second.num_cached == 0 and second.differs_from(first)
    write_adapter(path, seed=2)
    with engine(llama, **lora) as plain:
        assert_same([second], [ask_adapter(plain, adapter)])
    back = asked(1)
    assert back.num_cached == 10 * BLOCK
    assert_same([back], [first])


def test_an_adapter_replaced_while_it_runs_is_not_written(llama: Path, folder: Path, tmp_path: Path) -> None:
    """vLLM goes on with the adapter that it has loaded, whatever its files hold by now."""
    path = tmp_path / "adapter"
    lora = {"enable_lora": True, "max_lora_rank": 8}
    adapter = LoRARequest("a", 1, str(path))
    write_adapter(path, seed=1)
    with with_disk(llama, folder, settings=lora) as running:
        ask_adapter(running, adapter)
        write_adapter(path, seed=2)
        ask_adapter(running, adapter)
    with with_disk(llama, folder, settings=lora) as again:
        answer = ask_adapter(again, adapter)
        assert answer.num_cached == 0
    with engine(llama, **lora) as plain:
        assert_same([answer], [ask_adapter(plain, adapter)])


def test_an_adapter_replaced_under_its_name_is_another_key(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    request = LoRARequest("mine", 1, str(adapter))

    class Asked:
        lora_request = request

    def digest() -> bytes | None:
        adapters = key.AdapterDigests()
        adapters.register(request, tmp_path / "adapters.json")
        return adapters.of(Asked())  # type: ignore[arg-type]

    before = digest()
    assert before and digest() == before
    (adapter / "adapter_model.safetensors").write_bytes(b"two!")
    assert digest() not in (before, None)
    adapters = key.AdapterDigests()
    adapters.register(request, tmp_path / "adapters.json")
    adapters.bar(request)
    adapters.register(request, tmp_path / "adapters.json")
    assert adapters.of(Asked()) is None  # type: ignore[arg-type]


# Long runs.


@pytest.mark.soak
def test_a_thousand_reloads_with_damage_give_no_wrong_token(llama: Path, folder: Path) -> None:
    draw = random.Random(5)
    prompts = [random_prompt(seed, 300) for seed in range(4)]
    expected = stock(llama, prompts)
    fill(llama, folder, prompts)
    reloads = bad = hits = 0
    while reloads < 1000:
        path = key_folder(folder)
        kind = draw.choice(["data", "data", "journal", "cut", "none"])
        if kind == "data":
            for _ in range(draw.randrange(1, 6)):
                flip(segment_path(path, 0, 0), draw.randrange(40 * SLOT))
        elif kind == "journal":
            flip(path / JOURNAL, draw.randrange((path / JOURNAL).stat().st_size))
        elif kind == "cut":
            os.truncate(path / JOURNAL, draw.randrange((path / JOURNAL).stat().st_size))
        with with_disk(llama, folder) as again:
            # Again and again from disk: RAM and the GPU forget, and the disk is damaged meanwhile.
            for _ in range(25):
                reloads += 4
                answers = [again.ask_one(prompt) for prompt in prompts]
                assert_same(answers, expected)
                again.forget_gpu()
                again.scheduler.host.clear()
                if draw.random() < 0.3:
                    flip(segment_path(path, 0, 0), draw.randrange(40 * SLOT))
            hits += int(again.metric("disk_hit_tokens"))
            bad += int(again.metric("disk_bad_blocks"))
            for prompt in prompts:
                again.ask_one(prompt)
            again.drain()
    assert hits > 0 and bad > 0
