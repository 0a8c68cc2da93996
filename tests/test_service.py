"""Units as systemd itself reads them: names, quoting, limits, and what is done to files."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from overspill.kv.errors import OverspillError
from overspill.service import installation
from overspill.service.definition import other_users_settings
from overspill.service.installation import ServiceError, SystemctlFailed, Units
from overspill.service.units import MARKER, TEMPLATE, Mode, ModelService, escape_instance, quote_program, unit_name
from tests.test_service_cli import SMALL, overspill

SYSTEMD = Path("/lib/systemd/systemd")
NOBODY = 65534
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or not SYSTEMD.exists(), reason="systemd is not installed here"
)
ODD_NAMES = [
    "Qwen/Qwen3-8B",
    "/srv/models/a model with spaces",
    "100% of $HOME",
    "../../etc/passwd",
    "quo\"te's and back\\slash",
    "modèle é",
    ".hidden",
    "tab\tand\nnewline",
    "a;b ; c",
    "-flag",
]


def service(name: str = "Qwen/Qwen3-8B", mode: Mode = Mode.USER, *more: str, **changes: object) -> ModelService:
    arguments: dict[str, object] = {
        "mode": mode,
        "name": name,
        "command": (sys.executable, "-m", "overspill", "serve", name, *more),
        "memory_max_bytes": 12 << 30,
        "run_as": "root" if mode is Mode.SYSTEM else None,
        **changes,
    }
    return ModelService(**arguments)  # type: ignore[arg-type]


@pytest.fixture
def folder() -> Iterator[Path]:
    """That another user may read."""
    made = Path(tempfile.mkdtemp(prefix="units-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def ask_systemd(*command: str, folder: Path, user: int | None = None) -> subprocess.CompletedProcess[str]:
    runtime = folder / f".runtime-{user}"
    runtime.mkdir(exist_ok=True, mode=0o700)
    if user is not None:
        os.chown(runtime, user, user)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(runtime), "XDG_RUNTIME_DIR": str(runtime),
        # The colon: and where units usually are, for the targets.
        "SYSTEMD_UNIT_PATH": f"{folder}:",
    }  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment, user=user, group=user
    )


def verify(folder: Path, unit: str, mode: Mode) -> str:
    """What systemd-analyze has against a unit; of some complaints its exit code tells nothing."""
    answer = ask_systemd("systemd-analyze", "verify", f"--{mode}", "--man=no", str(folder / unit), folder=folder)
    said = answer.stdout + answer.stderr
    assert not answer.returncode, said
    return "\n".join(line for line in said.splitlines() if "overspill" in line)


def as_read_by_systemd(folder: Path, unit: str, mode: Mode) -> str:
    """systemd's own account of a unit: --test loads what it would start, tells it, and starts nothing.

    It refuses to do that for root.
    """
    user = NOBODY if os.geteuid() == 0 else None
    answer = ask_systemd(str(SYSTEMD), "--test", f"--{mode}", f"--unit={unit}", folder=folder, user=user)
    assert not answer.returncode, answer.stderr
    told = (answer.stdout + answer.stderr).partition(f"-> Unit {unit}:\n")[2]
    assert told, answer.stdout + answer.stderr
    return told.partition("\n-> Unit ")[0]


def words(told: str) -> list[str]:
    """Of the server's command, before variables are put in. shlex knows of no escaped `$`."""
    return shlex.split(figure(told.partition("-> ExecStart:")[2], "Command Line").replace("\\$", "$"))


def figure(told: str, name: str) -> str:
    found = re.search(rf"^\s*{name}: (.*)$", told, re.MULTILINE)
    assert found, f"no {name} in {told}"
    return found[1]


# What systemd makes of it.


@needs_systemd
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", ODD_NAMES)
def test_systemd_accepts_the_units_of_any_name(folder: Path, name: str, mode: Mode) -> None:
    installation.install(Units(mode, folder, None), service(name, mode))
    assert verify(folder, unit_name(name), mode) == ""


@needs_systemd
@pytest.mark.parametrize("mode", Mode)
def test_a_fault_in_a_unit_would_be_found(folder: Path, mode: Mode) -> None:
    installation.install(Units(mode, folder, None), service(mode=mode))
    (folder / TEMPLATE).write_text((folder / TEMPLATE).read_text().replace("KillMode=mixed", "KillMode=mixt"))
    assert "mixt" in verify(folder, unit_name("Qwen/Qwen3-8B"), mode)


ODD_WORDS = ["a b", "100%", "%h", "$HOME", "${HOME}", "$$", 'a"b', "it's", "back\\slash", "\\x41", ";", "#", "é"]


@needs_systemd
@pytest.mark.parametrize("word", ODD_WORDS)
def test_systemd_reads_the_words_that_were_meant(folder: Path, word: str) -> None:
    given = service("m", Mode.USER, "--served-model-name", word, "last")
    installation.install(Units(Mode.USER, folder, None), given)
    read = words(as_read_by_systemd(folder, given.unit, Mode.USER))
    # What is left to systemd is to make one `$` of two.
    assert read == [each.replace("$", "$$") for each in given.command]


@needs_systemd
@pytest.mark.parametrize("mode", Mode)
def test_systemd_reads_the_limits_that_were_meant(folder: Path, mode: Mode) -> None:
    given = service(mode=mode, environment=(("HF_HOME", "/models/100% $x"),))
    installation.install(Units(mode, folder, None), given)
    told = as_read_by_systemd(folder, given.unit, mode)
    assert figure(told, "MemoryMax") == str(12 << 30)
    assert figure(told, "LimitMEMLOCK") == str(2**64 - 1)
    assert figure(told, "KillMode") == "mixed"
    assert figure(told, "Restart") == "on-failure"
    assert figure(told, "Description") == "Overspill serving Qwen/Qwen3-8B"
    assert "HF_HOME=/models/100% $x" in told
    assert ("NoNewPrivileges" in (folder / TEMPLATE).read_text()) == (mode is Mode.SYSTEM)


@needs_systemd
def test_the_template_alone_serves_the_model_it_is_named_after(folder: Path) -> None:
    template, _ = service().files
    (folder / template.path).write_text(template.text)
    told = as_read_by_systemd(folder, unit_name("Qwen/Qwen3-8B"), Mode.USER)
    assert words(told) == [sys.executable, "-m", "overspill", "serve", "Qwen/Qwen3-8B"]


@needs_systemd
@pytest.mark.parametrize("mode", Mode)
def test_systemd_starts_the_unit_of_an_oddly_named_folder(
    llama: Path, folder: Path, tmp_path: Path, mode: Mode
) -> None:
    model = tmp_path / """100% of $HOME "quoted" and it's; back\\slash"""
    model.symlink_to(llama)
    answer = overspill("service", "install", str(model), *SMALL, f"--{mode}", "--folder", str(folder),
                       "--", "--skip-tokenizer-init")  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    unit = unit_name(str(model))
    assert verify(folder, unit, mode) == ""
    read = [word.replace("$$", "$") for word in words(as_read_by_systemd(folder, unit, mode))]
    assert read[:5] == [sys.executable, "-m", "overspill", "serve", str(model)]


@pytest.mark.skipif(shutil.which("systemd-escape") is None, reason="systemd is not installed here")
@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_are_escaped_as_systemd_escape_does(name: str) -> None:
    answer = subprocess.run(["systemd-escape", "--", name], capture_output=True, text=True, check=True)
    assert escape_instance(name) == answer.stdout.removesuffix("\n")


@pytest.mark.parametrize("name", ODD_NAMES)
def test_no_name_leaves_the_folder(name: str) -> None:
    for file in service(name).files:
        assert not file.path.is_absolute() and ".." not in file.path.parts and len(file.path.parts) <= 2


def test_devices_stay_within_reach() -> None:
    """ProtectClock implies a list of allowed devices, which has no GPU in it."""
    template, _ = service(mode=Mode.SYSTEM).files
    for directive in ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"):
        assert f"{directive}=" not in template.text


@pytest.mark.parametrize("path", ["/opt/$HOME/python", '/opt/a"b/python', "/opt/back\\slash/python", "/opt/new\nline"])
def test_an_interpreter_that_systemd_cannot_start_is_refused(path: str) -> None:
    with pytest.raises(OverspillError, match="install the unit with a Python"):
        quote_program(path)


def test_a_name_that_is_too_long_is_refused_with_the_name_flag() -> None:
    with pytest.raises(OverspillError, match=r"240 is the most; give a shorter one with --name"):
        unit_name("/" + "-" * 80)
    with pytest.raises(OverspillError, match="--name"):
        unit_name("")


@pytest.mark.parametrize("name", ["zero\0byte", "not utf-8 \udcff"])
def test_a_name_that_no_file_could_have_is_refused(name: str) -> None:
    with pytest.raises(OverspillError):
        assert service(name).files


# Files.


def test_install_writes_both_files_and_is_idempotent(tmp_path: Path) -> None:
    units = Units(Mode.USER, tmp_path / "systemd/user", None)
    written = installation.install(units, service())
    assert [path.relative_to(units.folder) for path in written] == [
        PurePosixPath(TEMPLATE),
        PurePosixPath(r"overspill@Qwen-Qwen3\x2d8B.service.d/overspill.conf"),
    ]
    before = [path.read_text() for path in written]
    assert all(text.startswith(MARKER) for text in before)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in written)
    assert installation.install(units, service()) == written
    assert [path.read_text() for path in written] == before
    assert sorted(path for path in units.folder.rglob("*") if path.is_file()) == sorted(written)


def test_a_unit_of_somebody_else_is_kept_unless_forced(tmp_path: Path) -> None:
    units = Units(Mode.USER, tmp_path, None)
    (tmp_path / TEMPLATE).write_text("[Service]\nExecStart=/bin/true\n")
    with pytest.raises(ServiceError, match=r"was not written by Overspill; .*--force"):
        installation.install(units, service())
    assert list(tmp_path.iterdir()) == [tmp_path / TEMPLATE]
    installation.install(units, service(), force=True)
    assert (tmp_path / TEMPLATE).read_text().startswith(MARKER)


def test_a_masked_unit_is_kept_and_force_replaces_only_the_link(tmp_path: Path) -> None:
    units, target = Units(Mode.USER, tmp_path / "units", None), tmp_path / "target"
    target.write_text("mine")
    units.folder.mkdir()
    (units.folder / TEMPLATE).symlink_to(target)
    with pytest.raises(ServiceError, match="not written by Overspill"):
        installation.install(units, service())
    installation.install(units, service(), force=True)
    assert target.read_text() == "mine" and not (units.folder / TEMPLATE).is_symlink()


def test_a_folder_that_is_a_link_is_never_written_through(tmp_path: Path) -> None:
    units, elsewhere = Units(Mode.USER, tmp_path / "units", None), tmp_path / "elsewhere"
    elsewhere.mkdir()
    units.folder.mkdir()
    (units.folder / f"{service().unit}.d").symlink_to(elsewhere)
    with pytest.raises(ServiceError, match="is a link"):
        installation.install(units, service(), force=True)
    assert not list(elsewhere.iterdir())


def test_remove_deletes_its_files_and_finally_the_template(tmp_path: Path) -> None:
    units = Units(Mode.USER, tmp_path, None)
    installation.install(units, service("one"))
    installation.install(units, service("two"))
    (tmp_path / "overspill@one.service.d/mine.conf").write_text("[Service]\n")
    (tmp_path / "other.service").write_text("[Service]\n")
    assert installation.installed(tmp_path) == ["overspill@one.service", "overspill@two.service"]
    assert installation.remove(units, "one") == [tmp_path / "overspill@one.service.d/overspill.conf"]
    assert (tmp_path / TEMPLATE).exists() and (tmp_path / "overspill@one.service.d/mine.conf").exists()
    assert installation.remove(units, "two")[-1] == tmp_path / TEMPLATE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.service", "overspill@one.service.d"]


def test_remove_leaves_what_others_wrote(tmp_path: Path) -> None:
    units = Units(Mode.USER, tmp_path, None)
    with pytest.raises(ServiceError, match="does not exist; nothing is installed there"):
        installation.remove(units, "one")
    installation.install(units, service("one"))
    with pytest.raises(ServiceError, match=r"installed: overspill@one\.service"):
        installation.remove(units, "two")
    drop_in = tmp_path / "overspill@one.service.d/overspill.conf"
    drop_in.write_text("[Service]\nMemoryMax=1\n")
    with pytest.raises(ServiceError, match="not written by Overspill"):
        installation.remove(units, "one")
    assert drop_in.exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceError, match=r"cannot be written: File exists; name another --folder"):
        installation.install(Units(Mode.USER, tmp_path / "file", None), service())


# systemctl, played by a program that writes down how it was called.


@pytest.fixture
def systemctl(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        f'if [ -e {tmp_path}/refuses ]; then echo "Access denied" >&2; exit 4; fi\n'
    )
    program.chmod(0o755)
    return program


def test_systemd_is_told_and_nothing_is_started_unless_asked(tmp_path: Path, systemctl: Path) -> None:
    units = Units(Mode.USER, tmp_path / "units", (str(systemctl), "--user"))
    calls = tmp_path / "calls"
    installation.install(units, service("one"))
    assert calls.read_text().splitlines() == ["--user daemon-reload"]
    installation.install(units, service("one"), now=True)
    unit = "overspill@one.service"
    told = ["--user daemon-reload", f"--user enable {unit}", f"--user start {unit}"]
    assert calls.read_text().splitlines()[1:] == told
    calls.unlink()
    # `enable --now` would leave one that runs as it is.
    installation.install(units, service("one", memory_max_bytes=5 << 30), now=True)
    assert calls.read_text().splitlines() == [*told[:2], f"--user restart {unit}"]
    calls.unlink()
    installation.remove(units, "one")
    assert calls.read_text().splitlines() == ["--user disable --now overspill@one.service", "--user daemon-reload"]


def test_an_error_of_systemctl_is_passed_on(tmp_path: Path, systemctl: Path) -> None:
    (tmp_path / "refuses").touch()
    units = Units(Mode.USER, tmp_path / "units", (str(systemctl), "--user"))
    with pytest.raises(SystemctlFailed, match="daemon-reload failed: Access denied"):
        installation.install(units, service("one"))


def test_a_users_manager_is_found_by_its_socket(tmp_path: Path, systemctl: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": str(systemctl.parent)}
    found = installation.units_of(Mode.USER, None, environment)
    assert found.folder == tmp_path / "config/systemd/user" and found.systemctl is None
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/private").touch()
    environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    assert installation.units_of(Mode.USER, None, environment).systemctl == (str(systemctl), "--user")
    # Another folder is not the manager's.
    assert installation.units_of(Mode.USER, tmp_path, environment).systemctl is None
    assert installation.units_of(Mode.SYSTEM, None, environment).folder == Path("/etc/systemd/system")


def test_planning_for_another_user_warns_whose_settings_count() -> None:
    assert other_users_settings(None, "root") == [] == other_users_settings("root", "root")
    (warning,) = other_users_settings("ai", "root")
    assert "runs as ai" in warning and "root's config.toml" in warning


def test_services_on_one_port_are_found(tmp_path: Path) -> None:
    units = Units(Mode.USER, tmp_path, None)
    one = service("one")
    two = replace(one, name="two", command=("/a b/python", "serve", "two", "--port", "9000"))
    installation.install(units, one)
    installation.install(units, two)
    assert installation.on_port(tmp_path, replace(one, name="new")) == ["overspill@one.service"]
    assert installation.on_port(tmp_path, one) == [], "itself"
    assert installation.on_port(tmp_path, replace(two, name="new")) == ["overspill@two.service"]
    assert (
        installation.on_port(tmp_path, replace(two, name="new", command=("/p", "--port", "9000", "--port", "9001")))
        == []
    )
