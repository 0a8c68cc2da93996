"""A PostgreSQL server for the tests, from Debian's package: own data folder, own socket, no port."""

import atexit
import ctypes
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psycopg
import pytest

_USER = "overspill"
_numbers = itertools.count()


def new_database() -> str:
    """The URL of an empty one; the server starts with the first."""
    name = f"registry_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(host=str(_server()), user=_USER, dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://{_USER}@/{name}?host={_server()}"


@cache
def _server() -> Path:
    """The folder of its socket."""
    programs = _programs()
    # Not pytest's folder: that is closed to the user which a server started by root has to run as.
    folder = Path(tempfile.mkdtemp(prefix="overspill-postgresql-"))
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    data = folder / "data"
    data.mkdir(mode=0o700)
    if user is not None:
        for path in (folder, data):
            os.chown(path, user.pw_uid, user.pw_gid)
    as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()} if user is not None else {}
    environment = {"LC_ALL": "C", "PATH": os.defpath, "TZ": "UTC"}
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        env=environment, cwd=folder, check=True, capture_output=True, **as_user,
    )  # fmt: skip
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            # Without fsync: it is programs that get killed here, not the machine.
            [programs / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"],
            # One system call, so that no server is left behind when the tests are killed.
            preexec_fn=_end_with_parent(),  # noqa: PLW1509
            env=environment, cwd=folder, stdout=log, stderr=log, **as_user,
        )  # fmt: skip
    atexit.register(_stop, server, folder)
    _wait(server, folder)
    return folder


def _programs() -> Path:
    """Debian keeps them apart from the commands of every user, a folder for each version."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if folders:
        return folders[-1].parent
    if (found := shutil.which("postgres")) is not None:
        return Path(found).parent
    missing = "needs PostgreSQL's server (apt-get install postgresql)"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


def _end_with_parent() -> Callable[[], None]:
    prctl, death_signal = ctypes.CDLL(None).prctl, 1

    def ask() -> None:
        prctl(death_signal, signal.SIGINT)

    return ask


def _wait(server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(host=str(folder), user=_USER, dbname="postgres").close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)


def _stop(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.send_signal(signal.SIGINT)  # ends open connections
    server.wait(timeout=30)
    shutil.rmtree(folder)
