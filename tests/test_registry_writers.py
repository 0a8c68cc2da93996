"""Several processes write at once, and processes die while they write: nothing acknowledged is lost."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from overspill.registry import (
    ChangedMeanwhile,
    RegistryUnavailable,
    add_model,
    edit_model,
    get_model,
    list_models,
    list_runs,
    open_registry,
)
from tests.postgresql import new_database

WRITES_EACH = 150


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/registry.db" if request.param == "sqlite" else new_database()


def _write(url: str, writer: int, start: Any, told: Any) -> None:
    """Adds models of its own, counts in one that is shared, and changes a setting of its own of that one."""
    own_setting = ("max_num_seqs", "max_num_batched_tokens")[writer]
    conflicts = 0
    try:
        with open_registry(url) as registry:
            start.wait()
            for number in range(WRITES_EACH):
                add_model(registry, f"w{writer}/{number}", {"source": "gpt2"})
                while True:
                    seen = get_model(registry, "shared")
                    count = int(seen.settings.notes or 0)
                    try:
                        edit_model(registry, "shared", {"notes": str(count + 1)}, version=seen.version)
                        break
                    except ChangedMeanwhile:
                        conflicts += 1
                edit_model(registry, "shared", {own_setting: number + 1})
        told.put(conflicts)
    except BaseException as error:
        told.put(repr(error))


def test_two_writers_lose_nothing(url: str) -> None:
    with open_registry(url) as registry:
        add_model(registry, "shared", {"source": "gpt2", "notes": "0"})
        spawn = multiprocessing.get_context("spawn")
        start, told = spawn.Barrier(2), spawn.Queue()
        children = [spawn.Process(target=_write, args=(url, writer, start, told)) for writer in range(2)]
        for child in children:
            child.start()
        conflicts = [told.get(timeout=240) for _ in children]
        for child in children:
            child.join()
        assert all(isinstance(each, int) for each in conflicts), conflicts
        names = {model.name for model in list_models(registry)}
        assert names == {"shared", *(f"w{writer}/{n}" for writer in range(2) for n in range(WRITES_EACH))}
        shared = get_model(registry, "shared")
        assert shared.settings.notes == str(2 * WRITES_EACH), "every count was made on the one before"
        assert (shared.settings.max_num_seqs, shared.settings.max_num_batched_tokens) == (WRITES_EACH, WRITES_EACH)
        assert shared.version == 1 + 4 * WRITES_EACH
        assert sum(conflicts) > 0, "they did not meet; the test shows nothing"


def test_threads_share_an_open_registry(url: str) -> None:
    with open_registry(url) as registry:
        failed: list[BaseException] = []

        def add(thread: int) -> None:
            try:
                for number in range(20):
                    add_model(registry, f"t{thread}-{number}", {"source": "gpt2"})
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed and len(list_models(registry)) == 80


# Crashes.


_WRITER = """
import os, sys
from overspill.registry import add_model, edit_model, open_registry, start_run
url, life = sys.argv[1:]
print("ready", flush=True)
with open_registry(url) as registry:
    for number in range(100_000):
        add_model(registry, f"life{life}-{number}", {"source": "gpt2"})
        edit_model(registry, f"life{life}-{number}", {"ram": number, "notes": "x" * 3000})
        start_run(registry, f"life{life}-{number}", ["vllm"] * 100, pid=os.getpid())
        print(number, flush=True)
"""


def _kill_a_writer(url: str, life: int, after: int, seconds: float) -> int:
    """Once it has said that so many writes are done, and a moment more. How many it said in all."""
    child = subprocess.Popen([sys.executable, "-c", _WRITER, url, str(life)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    for number in range(after):
        assert child.stdout.readline() == b"%d\n" % number
    time.sleep(seconds)
    os.kill(child.pid, signal.SIGKILL)
    said = child.stdout.read().split(b"\n")  # a pipe keeps what was written before the end
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    return after + len([line for line in said[:-1] if line])


def test_what_was_acknowledged_before_a_kill_is_there(url: str) -> None:
    chance = random.Random(7)
    acknowledged = {life: _kill_a_writer(url, life, 10 + life, chance.uniform(0, 0.05)) for life in range(6)}
    with open_registry(url) as registry:
        models, runs = {model.name: model for model in list_models(registry)}, list_runs(registry, limit=100_000)
        started = {run.model for run in runs}
        for life, count in acknowledged.items():
            for number in range(count):
                settings = models[f"life{life}-{number}"].settings
                assert settings.ram == number and settings.notes == "x" * 3000
                assert f"life{life}-{number}" in started
            # The one on the way may be there or not, or a part of its three steps; no other.
            assert f"life{life}-{count + 1}" not in models
        if registry.place.file is not None:
            with registry.engine.connect() as connection:
                assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
                assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        assert add_model(registry, "after", {"source": "gpt2"}).version == 1


def test_a_kill_while_a_registry_is_made_leaves_one_that_opens(url: str) -> None:
    for life, milliseconds in enumerate((0, 20, 60, 120, 180)):
        child = subprocess.Popen([sys.executable, "-c", _WRITER, url, f"x{life}"], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(milliseconds / 1000)
        os.kill(child.pid, signal.SIGKILL)
        child.stdout.close()
        child.wait()
    with open_registry(url) as registry:
        assert add_model(registry, "after", {"source": "gpt2"}).version == 1


# Waiting.


def test_a_writer_waits_for_another_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    with open_registry(url) as registry, open_registry(url) as other:
        entered, asks = threading.Event(), threading.Event()
        let_go: list[float] = []

        def hold() -> None:
            with other.writing() as session:
                session.execute(text("UPDATE models SET name = 'x'"))
                entered.set()
                asks.wait()
                time.sleep(0.5)
                let_go.append(time.monotonic())

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait()
        assert list_models(registry) == [], "readers do not wait"
        asks.set()
        add_model(registry, "qwen", {"source": "gpt2"})
        assert let_go and time.monotonic() >= let_go[0]
        thread.join()


def test_a_writer_that_waits_too_long_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db?timeout=0.2"
    with open_registry(url) as registry, open_registry(url) as other, other.writing() as session:
        session.execute(text("UPDATE models SET name = 'x'"))
        with pytest.raises(RegistryUnavailable, match=r"another program has been writing .* for 0\.2 s; wait"):
            add_model(registry, "qwen", {"source": "gpt2"})


def test_a_transaction_that_fails_is_undone_whole(url: str) -> None:
    from overspill.registry.tables import ModelRow

    with open_registry(url) as registry:
        before = add_model(registry, "qwen", {"source": "gpt2"})
        with contextlib.suppress(KeyboardInterrupt), registry.writing() as session:
            session.query(ModelRow).one().settings = {"source": "gpt2", "ram": 5}
            session.flush()
            raise KeyboardInterrupt
        assert list_models(registry) == [before]


def test_a_restarted_server_is_connected_to_again() -> None:
    with open_registry(new_database()) as registry:
        add_model(registry, "qwen", {"source": "gpt2"})
        with (
            open_registry(registry.place.url.render_as_string(hide_password=False)) as other,
            other.writing() as session,
        ):
            session.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                                 "current_database() AND pid <> pg_backend_pid()"))  # fmt: skip
        assert [model.name for model in list_models(registry)] == ["qwen"]
