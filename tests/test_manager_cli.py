"""`overspill manager`, `ps`, `stop` and `logs` as commands."""

import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from overspill.address import free_port
from overspill.processes import identity
from overspill.serve.engine_report import Phase
from overspill.serve.status import Status, folder_of, read_statuses, write_status
from tests.command import run_overspill
from tests.managed import Managed, managed

ROOT = Path(__file__).parents[1]
PASSWORD = "four words, not together"


class Home:
    def __init__(self, folder: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
        self.environment = {**clean, "XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": "/nonexistent",
                            "COLUMNS": "200"}  # fmt: skip

    def overspill(self, *words: str, text: str = "", **more: str) -> "subprocess.CompletedProcess[str]":
        return run_overspill(*words, env={**self.environment, **more}, text=text)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def server(home: Home, tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Anything that lives, with the status file of `overspill serve`."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    log = tmp_path / "vllm.log"
    log.write_text("loading\nready to serve\n")
    at = datetime.now(UTC).isoformat()
    folder = folder_of(home.environment)
    assert folder is not None
    status = Status(
        pid=child.pid, process=identity(child.pid), host=platform.node(), model="qwen", source="/models/qwen",
        served_name="qwen", url="http://127.0.0.1:8000", phase=Phase.READY, log_file=str(log), started_at=at,
        ready_at=at,
    )  # fmt: skip
    write_status(status, folder)
    yield child
    child.kill()
    child.wait()


# Keys and the password


def test_a_key_is_shown_once_listed_by_its_beginning_and_removed(home: Home) -> None:
    made = home.overspill("manager", "keys", "add", "laptop", "--scope", "gateway")
    key = made.stdout.strip()
    assert made.returncode == 0 and len(key) > 30
    listed = home.overspill("manager", "keys", "list").stdout
    assert "laptop" in listed and "gateway" in listed and key not in listed
    assert key.split("_")[1] in listed
    again = home.overspill("manager", "keys", "add", "laptop")
    assert again.returncode == 2 and "there is a key laptop already" in again.stderr
    assert home.overspill("manager", "keys", "rm", "laptop").returncode == 0
    assert "no keys yet" in home.overspill("manager", "keys", "list").stdout


def test_a_password_is_set_from_standard_input_and_removed(home: Home) -> None:
    short = home.overspill("manager", "password", text="short\n")
    assert short.returncode == 2 and "10 to 1000 characters" in short.stderr
    assert home.overspill("manager", "password", text=f"{PASSWORD}\n").returncode == 0
    assert "removed" in home.overspill("manager", "password", "--remove").stdout


def test_an_address_of_others_needs_a_password_or_a_key(home: Home) -> None:
    refused = home.overspill("manager", "--host", "0.0.0.0", "--port", str(free_port()))
    assert refused.returncode == 2 and "overspill manager password" in refused.stderr
    folder = home.overspill("manager", "--models-folder", "/no/such/folder")
    assert folder.returncode == 2 and "is not a folder" in folder.stderr


def test_a_port_that_is_taken_is_told_with_who_has_it(home: Home) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = home.overspill("manager", "--port", str(taken.getsockname()[1]))
    assert refused.returncode == 1 and f"process {os.getpid()}" in refused.stderr


# Without a manager


def test_ps_lists_servers_without_a_manager(home: Home, server: "subprocess.Popen[bytes]") -> None:
    told = home.overspill("ps").stdout
    assert "no manager is running" in told
    assert re.search(rf"qwen +ready +\S+ \S+ +{server.pid} +http://127.0.0.1:8000", told)
    (one,) = json.loads(home.overspill("ps", "--json").stdout)["engines"]
    assert (one["name"], one["state"], one["pid"]) == ("qwen", "ready", server.pid)


def test_logs_are_read_searched_and_followed_without_a_manager(
    home: Home, server: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    assert home.overspill("logs", "qwen").stdout == "loading\nready to serve\n"
    assert home.overspill("logs", "qwen", "--search", "READY").stdout == "ready to serve\n"
    assert home.overspill("logs", "qwen", "--lines", "1").stdout == "ready to serve\n"
    both = home.overspill("logs", "qwen", "--follow", "--search", "x")
    assert both.returncode == 2 and "leave one of them out" in both.stderr
    following = subprocess.Popen(
        [sys.executable, "-m", "overspill", "logs", "qwen", "--follow"], env=home.environment, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert following.stdout is not None
    assert [following.stdout.readline(), following.stdout.readline()] == ["loading\n", "ready to serve\n"]
    with (tmp_path / "vllm.log").open("a") as log:
        log.write("one more\n")
    assert following.stdout.readline() == "one more\n"
    following.send_signal(signal.SIGINT)
    assert following.wait(timeout=120) == 0
    following.stdout.close()


@pytest.mark.usefixtures("server")
def test_logs_of_a_server_without_a_log_file_say_so(home: Home) -> None:
    """It was "none is known here", while `ps` listed the server."""
    folder = folder_of(home.environment)
    assert folder is not None
    (status,) = read_statuses(home.environment)
    write_status(dataclasses.replace(status, log_file=None), folder)
    told = home.overspill("logs", "qwen")
    assert told.returncode == 2 and "qwen writes its log where it was started" in told.stderr


def test_stop_ends_the_server_that_is_named_and_no_other(home: Home, server: "subprocess.Popen[bytes]") -> None:
    other = home.overspill("stop", "qwem")
    assert other.returncode == 2 and "did you mean qwen" in other.stderr and server.poll() is None
    assert home.overspill("stop", "qwen").stdout == "stopped qwen\n"
    assert server.wait(timeout=10) == -signal.SIGTERM


# With one


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    with managed(tmp_path_factory.mktemp("cli")) as running:
        yield running


def test_commands_use_the_manager_that_runs(manager: Managed) -> None:
    assert f"manager: {manager.url}" in manager.overspill("ps").stdout
    assert json.loads(manager.overspill("ps", "--json").stdout) == {"manager": manager.url, "engines": []}
    unknown = manager.overspill("stop", "qwen")
    assert unknown.returncode == 2 and "there is no model 'qwen' in the registry" in unknown.stderr
    log = manager.overspill("logs", "qwen")
    assert log.returncode == 2 and "there is no model 'qwen' in the registry" in log.stderr


def test_a_manager_with_a_key_wants_it_from_commands_too(manager: Managed) -> None:
    key = manager.overspill("manager", "keys", "add", "me").stdout.strip()
    deadline = time.monotonic() + 120
    while httpx.get(f"{manager.url}/api/status", timeout=60).status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    without = manager.overspill("ps")
    assert "requires a key (--api-key)" in without.stderr and "no manager is running" in without.stdout
    assert f"manager: {manager.url}" in manager.overspill("ps", "--api-key", key).stdout
    wrong = manager.overspill("ps", "--api-key", key[:-1] + "x")
    assert wrong.returncode == 2 and "does not accept this key" in wrong.stderr


# The page about it


def test_every_flag_is_documented() -> None:
    text = (ROOT / "docs/manager.md").read_text()
    for words in ([], ["password"], ["keys", "add"], ["keys", "list"], ["keys", "rm"]):
        told = run_overspill("manager", *words, "--help", env={**os.environ, "COLUMNS": "200"}).stdout
        for flag in set(re.findall(r"--[a-z-]+", told)) - {"--help"}:
            assert f"`{flag}" in text, flag
    for name in ("ps", "stop", "logs"):
        told = run_overspill(name, "--help", env={**os.environ, "COLUMNS": "200"}).stdout
        assert f"overspill {name}" in text
        for flag in set(re.findall(r"--[a-z-]+", told)) - {"--help"}:
            assert f"`{flag}" in text, flag
