"""What the manager does when the machine fails it: a locked registry, a full disk, a huge log, clients that vanish,
its own death. Each on the whole manager as a process, over stand-ins for engines."""

import contextlib
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from overspill.kv.sizes import MiB
from overspill.manager.backend import identify
from tests.managed_process import ManagedProcess, QuickPlace, managed_process, until
from tests.manager_process import Place

ASKED = {"model": "a", "prompt": "x", "max_tokens": 2}
PAGES = ("/", "/models", "/runs", "/logs", "/found", "/audit", "/api/models", "/api/engines", "/metrics")


def new_place(folder: Path) -> Place:
    (folder / "models").mkdir()
    made = QuickPlace(folder)
    made.add("a")
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return new_place(tmp_path_factory.mktemp("managed"))


@pytest.fixture(scope="module")
def manager(place: Place) -> Iterator[ManagedProcess]:
    with managed_process(place) as running:
        yield running


@pytest.fixture
def client(manager: ManagedProcess) -> Iterator[httpx.Client]:
    with manager.client() as opened:
        yield opened


def new_model(name: str) -> dict[str, object]:
    return {"name": name, "source": f"owner/{name}"}


def names(client: httpx.Client) -> list[str]:
    return [one["name"] for one in client.get("/api/models").json()]


def look(manager: ManagedProcess, path: str) -> httpx.Response:
    """As a browser that is new here: a cookie would make the next request a browser's too, which needs a token."""
    return httpx.get(manager.url + path, timeout=60, trust_env=False)


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


# The registry


@contextlib.contextmanager
def locked(place: Place) -> Iterator[Callable[[], None]]:
    """By another process, which is writing; to be called to let it go."""
    code = (
        "import sqlite3, sys; base = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "base.execute('BEGIN EXCLUSIVE');"
        "print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(place.folder / "registry.db")], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "locked\n"

    def let_go() -> None:
        holder.communicate(timeout=30)

    try:
        yield let_go
    finally:
        if holder.poll() is None:
            let_go()


def test_a_locked_registry_stops_only_writes(place: Place, manager: ManagedProcess, client: httpx.Client) -> None:
    assert client.post("/api/models", json=new_model("before")).status_code == 201
    with locked(place):
        for path in PAGES:
            assert look(manager, path).status_code == 200, path
        # A model that is not loaded yet is, and answers: the start itself writes nothing that it could not do without.
        assert client.post("/v1/completions", json=ASKED).json()["choices"][0]["text"] == "a-0 a-1 "
        refused = client.post("/api/models", json=new_model("during"))
        assert refused.status_code == 503
        assert "another program has been writing to the registry" in message(refused)
        assert client.delete("/api/models/before").status_code == 503
        stopped = client.post("/api/engines/stop/a")
        assert stopped.status_code == 200 and stopped.json()["state"] == "stopped"
    assert names(client) == ["a", "before"]
    assert client.post("/api/models", json=new_model("during")).status_code == 201
    # What could not be written in the audit log is told in the manager's own.
    assert "stop of a by local is not in the audit log" in manager.out.read_text()


def test_a_write_waits_for_a_short_lock_without_blocking_others(tmp_path: Path) -> None:
    answers: list[int] = []
    place = new_place(tmp_path)
    with managed_process(place, patience_s=60) as manager, manager.client() as client:

        def write() -> None:
            answers.append(client.post("/api/models", json=new_model("late")).status_code)

        with locked(place) as let_go:
            writing = threading.Thread(target=write)
            writing.start()
            for _ in range(5):
                assert look(manager, "/").status_code == 200 and not answers
            let_go()
            writing.join(60)
        assert answers == [201] and "late" in names(client)


def test_a_model_just_added_by_another_process_is_found(place: Place, client: httpx.Client) -> None:
    """Missed when the manager had looked for new models within the last fifth of a second."""
    for i in range(20):
        place.add(f"added-{i}")
        assert client.get(f"/api/engines/added-{i}").status_code == 200


# The disk


@contextlib.contextmanager
def disk(folder: Path, *, is_mounted: bool) -> Iterator[Callable[[int], "contextlib.AbstractContextManager[None]"]]:
    """A small one of its own, or a limit on the size of the manager's files; what it yields fills it, for a manager's
    process, as long as that context lasts."""
    if is_mounted:
        options = ["-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(folder)]
        subprocess.run(["mount", *options], check=True)

    @contextlib.contextmanager
    def full(pid: int) -> Iterator[None]:
        filler = folder / "filler"
        if is_mounted:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        else:
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
        try:
            yield
        finally:
            if is_mounted:
                filler.unlink()
            else:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    try:
        yield full
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def test_a_full_disk_stops_neither_pages_nor_engines_and_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    is_mounted = may_mount()
    with disk(folder, is_mounted=is_mounted) as full:
        place = new_place(folder)
        place.add("b")
        with managed_process(place) as manager, manager.client() as client:
            assert client.post("/v1/completions", json=ASKED).status_code == 200
            assert client.post("/api/models", json=new_model("before")).status_code == 201
            with full(manager.pid):
                for path in PAGES:
                    assert look(manager, path).status_code == 200, path
                assert client.post("/v1/completions", json=ASKED).status_code == 200
                refused = client.post("/api/models", json=new_model("during"))
                assert refused.status_code == 503 and "Make room on the disk" in message(refused)
                # Another start works, or says why it does not: nothing hangs, and nothing is left of it.
                started = client.post("/api/engines/start/b")
                why = "is full; free some space" if is_mounted else "ended while it was starting"
                assert started.status_code == 200 or why in message(started)
                assert client.post("/api/engines/stop/b").status_code == 200
                job = {"kind": "verify", "model": "a", "given": {"quick": "yes"}}
                assert client.post("/api/jobs", json=job).status_code == 201
                until(lambda: client.get("/api/jobs").json()[0]["state"] in ("failed", "done"))
                assert client.get("/healthz").text == "ok\n"
            assert names(client) == ["a", "b", "before"]
            assert client.post("/api/models", json=new_model("after")).status_code == 201
            assert client.post("/api/engines/start/b").json()["state"] == "ready"


# Logs


def test_a_gigabyte_log_is_shown_and_searched_without_reading_it(
    place: Place, manager: ManagedProcess, client: httpx.Client
) -> None:
    client.post("/api/engines/start/a")
    client.post("/api/engines/stop/a")
    log = place.folder / "manager" / "logs" / "a.log"
    os.truncate(log, 1 << 30)  # a hole: to read it would be a gigabyte of zeros
    with log.open("ab") as file:
        file.write(b"\n" + b"".join(b"line %d\n" % i for i in range(50_000)))
    before, memory = manager.bytes_read(), resident_bytes(manager.pid)
    assert client.get("/api/logs/a?lines=3").text == "line 49997\nline 49998\nline 49999\n"
    assert client.get("/api/logs/a?lines=2&search=LINE 4999").text == "line 49998\nline 49999\n"
    for path in ("/api/logs/a?follow=true&lines=1", "/events/logs/a"):
        with client.stream("GET", path) as told, log.open("ab") as file:
            lines = told.iter_lines()
            while "line 49999" not in next(lines):
                pass
            file.write(b"written now\n")
            file.flush()
            while "written now" not in next(lines):
                pass
        os.truncate(log, log.stat().st_size - len(b"written now\n"))
    assert manager.bytes_read() - before < 8 * MiB
    # One for which everything would have to be read ends where it says, and goes on from there.
    found = client.get("/api/logs/a?search=nothing")
    reached = int(found.headers["x-searched-from"])
    assert found.text == "" and 0 < reached < log.stat().st_size
    found = client.get(f"/api/logs/a?search=nothing&before={reached}")
    assert 0 < int(found.headers["x-searched-from"]) < reached
    assert look(manager, "/logs?name=a&search=line 12345").text.count("line 12345") >= 2
    assert manager.bytes_read() - before < 256 * MiB
    assert resident_bytes(manager.pid) - memory < 64 * MiB


def test_a_log_growing_to_a_gigabyte_is_cut_as_its_engine_runs(
    place: Place, manager: ManagedProcess, client: httpx.Client
) -> None:
    client.post("/api/engines/start/a")
    log = place.folder / "manager" / "logs" / "a.log"
    before = manager.bytes_read()
    os.truncate(log, 1 << 30)
    until(lambda: log.stat().st_size < MiB)
    assert log.with_name("a.log.1").stat().st_size <= 64 * MiB
    assert manager.bytes_read() - before < 96 * MiB
    assert client.post("/v1/completions", json=ASKED).status_code == 200
    client.post("/api/engines/stop/a")
    client.post("/api/engines/start/a")
    assert "serves a on port" in client.get("/api/logs/a").text


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


# Clients


def test_five_hundred_vanishing_watchers_leak_no_tasks_or_files(manager: ManagedProcess, client: httpx.Client) -> None:
    client.post("/api/engines/start/a")
    paths = ("/events/dashboard", "/events/models", "/api/events", "/events/logs/a", "/api/logs/a?follow=true")
    client.get("/healthz")
    num_tasks, num_files = manager.num_tasks(), manager.num_files()
    for round_ in range(2):
        watchers = []
        for i in range(250):
            watcher = manager.connect()
            watcher.sendall(f"GET {paths[i % len(paths)]} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            watchers.append(watcher)
        for watcher in watchers:
            assert watcher.recv(12) == b"HTTP/1.1 200"
        assert manager.num_files() >= 250
        assert manager.num_tasks() >= num_tasks + 250
        for i, watcher in enumerate(watchers):
            if (i + round_) % 2:  # one that crashes does not say goodbye
                watcher.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            watcher.close()
        # The registry keeps some connections for the next time, and the machine is being looked at.
        until(lambda: manager.num_files() <= num_files + 30 and manager.num_tasks() <= num_tasks + 4)
    assert client.get("/").status_code == 200


# Its own death


def test_a_manager_killed_mid_stream_comes_back_to_its_engine(tmp_path: Path) -> None:
    place = new_place(tmp_path)
    place.behave("a", token_s=0.05)
    place.add("gone")
    asked = {**ASKED, "max_tokens": 10_000, "stream": True}
    with managed_process(place) as first, first.client() as client:
        client.post("/api/engines/start/gone")
        assert client.post("/api/models", json=new_model("acknowledged")).status_code == 201
        with pytest.raises(httpx.TransportError), client.stream("POST", "/v1/completions", json=asked) as told:
            seen = 0
            for line in told.iter_lines():
                seen += line.startswith("data: ")
                if seen == 3:
                    first.process.kill()
        first.process.wait()
        os.kill(place.starts("gone")[0], 9)  # while nobody looks
        engine = place.starts("a")[0]
        assert identify(engine) is not None
        with managed_process(place, first.port) as second, second.client() as other:
            engines = {one["name"]: one for one in other.get("/api/engines").json()}
            assert engines["a"]["pid"] == engine and engines["gone"]["pid"] is None
            assert names(other) == ["a", "acknowledged", "gone"]
            # The request of the client that lost its manager was not left running.
            metrics = engines["a"]["url"] + "/metrics"
            ended = "fake_running 0\nfake_aborted 1\n"
            until(lambda: ended in httpx.get(metrics, trust_env=False, timeout=60).text)
            assert other.post("/v1/completions", json=ASKED).status_code == 200
            assert place.starts("a") == [engine]
            assert other.post("/v1/completions", json={**ASKED, "model": "gone"}).status_code == 200
        first.process.returncode = 0
        assert identify(engine) is None  # a proper stop ends what the first one started
