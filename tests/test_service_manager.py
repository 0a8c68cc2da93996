"""The manager's own unit: as systemd reads it, on disk, and kept to by a manager that runs."""

import contextlib
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.registry.access import set_password
from overspill.registry.place import find_place
from overspill.service import installation
from overspill.service.definition import left_out, manager_environment, manager_service, other_users_registry
from overspill.service.installation import ServiceError, Units
from overspill.service.units import MANAGER_UNIT as UNIT
from overspill.service.units import MARKER, ManagerService, Mode
from tests.managed import Managed, managed
from tests.test_service import (
    as_read_by_systemd,
    figure,
    folder,  # noqa: F401 (a fixture)
    needs_systemd,
    systemctl,  # noqa: F401 (a fixture)
    verify,
    words,
)
from tests.test_service import service as model_service
from tests.test_service_cli import overspill


def service(mode: Mode = Mode.USER, **given: object) -> ManagerService:
    run_as = "root" if mode is Mode.SYSTEM else None
    return manager_service(given, mode=mode, run_as=run_as, program=sys.executable, environment={})


def text(mode: Mode = Mode.USER) -> str:
    (file,) = service(mode).files
    return file.text


# What systemd makes of it.


@needs_systemd
@pytest.mark.parametrize("mode", Mode)
def test_systemd_accepts_the_unit(folder: Path, mode: Mode) -> None:  # noqa: F811
    installation.install(Units(mode, folder, None), service(mode, host="127.0.0.1", any_vllm_flag=True))
    assert verify(folder, UNIT, mode) == ""
    (folder / UNIT).write_text(text(mode).replace("KillMode=process", "KillMode=prozess"))
    assert "prozess" in verify(folder, UNIT, mode)


@needs_systemd
@pytest.mark.parametrize("mode", Mode)
def test_systemd_reads_what_keeps_the_managers_promises(folder: Path, mode: Mode) -> None:  # noqa: F811
    """A crash leaves engines alone, one engine's end by the kernel leaves the manager alone, and a stop may take its
    time."""
    odd = "/srv/100% of $HOME; it's"
    installation.install(Units(mode, folder, None), service(mode, port=8001, models_folder=(odd,), keep_engines=True))
    told = as_read_by_systemd(folder, UNIT, mode)
    read = [word.replace("$$", "$") for word in words(told)]
    assert read == [
        *(sys.executable, "-m", "overspill", "manager", "--port", "8001", "--models-folder", odd, "--keep-engines")
    ]
    assert figure(told, "KillMode") == "process" and figure(told, "OOMPolicy") == "continue"
    assert figure(told, "Restart") == "on-failure" and figure(told, "Type") == "notify"
    assert figure(told, "TimeoutStopSec") == "4min"
    assert figure(told, "LimitMEMLOCK") == str(2**64 - 1)


def test_a_system_service_drops_privileges_and_shares_tmp() -> None:
    """systemd gives each start a fresh private /tmp, and removes the one that engines of a crashed manager use."""
    assert "PrivateTmp" not in text(Mode.SYSTEM) and "PrivateTmp" not in text()
    assert "NoNewPrivileges=yes" in text(Mode.SYSTEM) and "NoNewPrivileges" not in text()
    for directive in ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"):
        assert f"{directive}=" not in text(Mode.SYSTEM)
    assert "MemoryMax" not in text(Mode.SYSTEM), "it would be for all engines together, which --ram is for"


# What a manager does in it.


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """As systemd listens for them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listening:
        name = f"overspill-test-manager-{os.getpid()}"
        listening.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        yield listening


def told_by(notices: socket.socket) -> list[str]:
    told = []
    with contextlib.suppress(BlockingIOError):
        while True:
            told += notices.recv(4096).decode().splitlines()
    return told


def test_systemd_is_notified_when_the_manager_listens_and_ends(tmp_path: Path, notices: socket.socket) -> None:
    with managed(tmp_path) as manager:
        manager.wait_until_it_answers()
        ready = told_by(notices)
        assert ready[0] == "READY=1" and manager.url in ready[1] and len(ready) == 2
        assert manager.end() == 0
        assert told_by(notices) == ["STOPPING=1"]


def test_a_manager_that_may_not_listen_is_never_ready(tmp_path: Path, notices: socket.socket) -> None:
    manager = Managed(tmp_path, "--host", "0.0.0.0")
    assert manager.process.wait(60) == 2 and "overspill manager password" in manager.out.read_text()
    assert told_by(notices) == []


# Files and commands.


SITES = ("--allow-origin", "https://a.example", "--allow-origin", "https://b.example")


def test_the_unit_is_installed_and_removed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    where = ("--folder", str(tmp_path / "units"))
    flags = ("--models-folder", f"{models}/../models", "--ram", "3GiB", *SITES)
    shown = overspill("service", "manager", "print", *flags, *where)
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "units").exists()
    answer = overspill("service", "manager", "install", *flags, *where)
    assert answer.returncode == 0, answer.stderr
    assert f"enable --now {UNIT}" in answer.stdout and "loginctl enable-linger" in answer.stdout
    (written,) = (tmp_path / "units").iterdir()
    assert written.name == UNIT and shown.stdout == f"# {written}\n{written.read_text()}"
    assert written.read_text().startswith(MARKER)
    (line,) = re.findall(r"^ExecStart=(.*)$", written.read_text(), re.MULTILINE)
    assert shlex.split(line)[3:] == [
        *("manager", "--host", "127.0.0.1", "--port", "7999", "--models-folder", str(models)),
        *(*SITES, "--ram", "3GiB"),
    ]
    answer = overspill("service", "manager", "remove", *where)
    assert answer.returncode == 0 and f"removed {written}" in answer.stdout and not written.exists()


def test_models_units_and_the_managers_do_not_know_each_other(tmp_path: Path) -> None:
    units = Units(Mode.USER, tmp_path, None)
    installation.install(units, service())
    installation.install(units, model_service("one"))
    assert installation.installed(tmp_path) == ["overspill@one.service"]
    installation.remove(units, "one")
    assert [path.name for path in tmp_path.iterdir()] == [UNIT]


def test_a_foreign_unit_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    units = Units(Mode.USER, tmp_path, None)
    with pytest.raises(ServiceError, match="the manager is not installed there"):
        installation.remove_manager(units)
    (tmp_path / UNIT).write_text("[Service]\nExecStart=/bin/true\n")
    with pytest.raises(ServiceError, match=r"was not written by Overspill; .*--force"):
        installation.install(units, service())
    with pytest.raises(ServiceError, match="was not written by Overspill"):
        installation.remove_manager(units)
    assert "/bin/true" in (tmp_path / UNIT).read_text()
    installation.install(units, service(), force=True)
    installation.remove_manager(units)
    assert not list(tmp_path.iterdir())


def test_systemd_starts_the_manager_and_stops_it_before_removal(tmp_path: Path, systemctl: Path) -> None:  # noqa: F811
    units = Units(Mode.USER, tmp_path / "units", (str(systemctl), "--user"))
    installation.install(units, service(), now=True)
    installation.remove_manager(units)
    assert (tmp_path / "calls").read_text().splitlines() == [
        "--user daemon-reload", f"--user enable {UNIT}", f"--user restart {UNIT}", f"--user disable --now {UNIT}",
        "--user daemon-reload",
    ]  # fmt: skip


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no such folder": (["install", "--models-folder", "/nonexistent"], "--models-folder"),
    "not a size": (["install", "--ram", "lots"], "lots"),
    "open to others": (["install", "--host", "0.0.0.0"], "overspill manager password"),
    "open through a proxy": (["install", "--public-url", "https://a.example"], "--public-url https://a.example lets"),
    "a user in user mode": (["install", "--run-as", "root"], "--system"),
    "now without systemd": (["install", "--now"], "--now"),
    "nothing to remove": (["remove"], "not installed there"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_two(tmp_path: Path, name: str) -> None:
    arguments, said = MISTAKES[name]
    answer = overspill(
        "service", "manager", *arguments, XDG_CONFIG_HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path / "state")
    )
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert answer.stderr.startswith("error: ") and said in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.service"))


def test_another_address_is_written_once_there_is_a_password(tmp_path: Path) -> None:
    from overspill.registry import open_registry

    home = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with open_registry(environ=home) as registry:
        set_password(registry, "a long enough password")
    answer = overspill("service", "manager", "print", "--host", "0.0.0.0", "--json", **home)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["command"][-4:] == ["--host", "0.0.0.0", "--port", "7999"] and told["unit"] == UNIT


def test_the_unit_keeps_registry_and_settings_but_no_secret() -> None:
    given = {
        "XDG_STATE_HOME": "/state", "HF_HOME": "/hub", "HF_TOKEN": "hf_secret", "OVERSPILL_RAM": "32GiB",
        "OVERSPILL_API_KEY": "secret", "OVERSPILL_DATABASE_URL": "sqlite:////registry.db", "OVERSPILL_FORCE": "1",
        "OVERSPILL_CONFIG": "/etc/overspill.toml",
    }  # fmt: skip
    kept = manager_environment(sys.executable, given, for_oneself=True)
    settings = {"OVERSPILL_RAM", "OVERSPILL_CONFIG", "OVERSPILL_DATABASE_URL"}
    assert set(kept) == {"PATH", "XDG_STATE_HOME", "HF_HOME"} | settings
    assert find_place(environ=kept) == find_place(environ=given)
    assert not left_out(given, for_oneself=True)
    assert set(manager_environment(sys.executable, given, for_oneself=False)) == {"PATH", "HF_HOME"}
    given["OVERSPILL_DATABASE_URL"] = "postgresql://me:password@host/registry"
    assert "OVERSPILL_DATABASE_URL" not in manager_environment(sys.executable, given, for_oneself=True)
    (warning,) = left_out(given, for_oneself=True)
    assert "EnvironmentFile" in warning and "me:password" not in warning


def test_installing_for_another_user_warns_whose_registry_counts() -> None:
    assert other_users_registry(None, "root") == [] == other_users_registry("root", "root")
    (warning,) = other_users_registry("ai", "root")
    assert "registry of ai" in warning and "of root" in warning


def test_every_flag_is_documented() -> None:
    docs = Path(__file__).parents[1] / "docs"
    tables = "".join(re.findall(r"^\|.*\|", (docs / "manager.md").read_text(), re.MULTILINE))
    commands = ("print", "install", "remove")
    told = "".join(overspill("service", "manager", command, "--help").stdout for command in commands)
    for flag in set(re.findall(r"(?<!\w)--[a-z][a-z-]+", told)) - {"--help"}:
        assert f"`{flag}`" in tables, flag
