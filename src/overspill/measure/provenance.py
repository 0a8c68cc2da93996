"""Provenance of results: the machine and software they were measured with, and differences to stored results."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import overspill
from overspill.flags import without_secrets
from overspill.hardware import detect
from overspill.hardware.nvml import read_gpus
from overspill.measure.launch import MeasuredLaunch
from overspill.measure.target import Target, ask
from overspill.measure.workload import Workload
from overspill.processes import argv_of
from overspill.registry import (
    CannotNow,
    Result,
    environment_that_matters,
    installed_versions,
    list_runs,
    open_registry,
)
from overspill.serve.status import read_statuses

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    gpu: str | None
    driver: str | None
    versions: Mapping[str, str]
    git_revision: str | None
    """Git revision of Overspill's code, if it runs from a checkout."""
    machine: Mapping[str, Any] = field(default_factory=dict)

    def measurement(self, workload: Workload, seed: int, config: Mapping[str, Any], **values: Any) -> Result:
        """A result with everything needed to repeat it; `values` are its other fields."""
        sent = {"workload": workload.as_text(), "parameters": dict(workload.parameters), "seed": seed}
        if workload.file:
            sent |= {"file": workload.file, "digest": workload.digest}
        return Result(
            benchmark=workload.name, config={**sent, **config}, versions=dict(self.versions), gpu=self.gpu,
            driver=self.driver, git_revision=self.git_revision, **values,
        )  # fmt: skip


def find_provenance() -> Provenance:
    """Provenance of this machine, for engines that are started here."""
    hardware = detect()
    gpu = hardware.gpus[0] if hardware.gpus else None
    return Provenance(
        gpu=gpu.name if gpu is not None else None,
        driver=gpu.driver_version or None if gpu is not None else None,
        versions=installed_versions(),
        git_revision=git_revision(),
        machine={
            "host": platform.node(), "system": platform.platform(), "cpu": cpu_name(), "cores": os.cpu_count(),
            "ram_bytes": hardware.machine.ram_total_bytes.value,
        },
    )  # fmt: skip


def server_provenance(target: Target) -> Provenance:
    """Provenance of a running server: its version, and its GPUs if they are on this machine."""
    versions = installed_versions()
    answer = ask(target, "/version")
    if answer.status_code == 200 and answer.headers.get("content-type", "").startswith("application/json"):
        found = answer.json()
        if isinstance(found, dict) and "version" in found:
            versions["server"] = str(found["version"])
    gpus = read_gpus().gpus if target.is_here else ()
    names = [gpu.name for gpu in gpus]
    counted = ", ".join(f"{names.count(name)} × {name}" for name in sorted(set(names)))
    return Provenance(
        gpu=names[0] if len(names) == 1 else counted or None, driver=gpus[0].driver_version if gpus else None,
        versions=versions, git_revision=git_revision(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    argv: tuple[str, ...]
    """vLLM's command line, without secrets."""
    plan: dict[str, Any] | None
    """Plan of `overspill serve`, if that started the server."""


def find_server(target: Target) -> ServerCommand | None:
    """How the server was started: as recorded by this user's `overspill serve`, or read from its process. None if the
    server is on another machine, or neither is known."""
    port = urlsplit(target.url).port
    ours = [one for one in read_statuses() if one.is_alive and one.host == platform.node()] if target.is_here else []
    status = next((one for one in ours if urlsplit(one.url).port == port), None)
    argv = tuple(without_secrets(argv_of(target.pid))) if target.pid is not None else ()
    if status is not None and status.run_id is not None:
        with suppress(CannotNow), open_registry() as registry:
            argv = next((tuple(run.argv) for run in list_runs(registry) if run.id == status.run_id), argv)
    if not argv and status is None:
        return None
    return ServerCommand(argv=argv, plan=dict(status.plan) if status is not None and status.plan else None)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def git_revision(folder: Path = Path(overspill.__file__).parent) -> str | None:
    """Commit of the checkout that Overspill runs from, with `+` if tracked files changed; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def server_changes(before: Result, now: Provenance) -> list[str]:
    """Known differences between the server now and the one that `before` was measured with."""
    pairs = {
        f"the version of the server at {before.config.get('url')}": (
            before.versions.get("server"), now.versions.get("server"),
        ),
        "the GPU": (before.gpu, now.gpu),
    }  # fmt: skip
    return [f"{name} was {was}, and is {new}" for name, (was, new) in pairs.items() if was and new and was != new]


def changes(before: Result, launch: MeasuredLaunch, now: Provenance) -> list[str]:
    """Differences between a stored repeat and a launch now; a comparison needs all repeats alike."""
    found = _command_changes(_without_port(before.argv), _without_port(without_secrets(launch.command)))
    found += _value_changes("", before.versions, now.versions, absent="not installed")
    environment = environment_that_matters(launch.environment)
    found += _value_changes("variable ", before.environment, environment, absent="not set")
    machine = before.config.get("machine")
    cpu = machine.get("cpu") if isinstance(machine, dict) else None
    pairs = {"GPU": (before.gpu, now.gpu), "driver": (before.driver, now.driver), "CPU": (cpu, now.machine["cpu"])}
    found += [f"{name} is {new or 'none'}, was {old or 'none'}" for name, (old, new) in pairs.items() if old != new]
    return found


def _command_changes(before: Sequence[str], now: Sequence[str]) -> list[str]:
    if list(before) == list(now):
        return []
    new = [word for word in now if word not in before]
    gone = [word for word in before if word not in now]
    parts = [f"{what} {_shown(' '.join(words))}" for what, words in (("with", new), ("without", gone)) if words]
    return [f"its command differs, {' and '.join(parts) or 'in another order'}"]


def _value_changes(kind: str, before: Mapping[str, Any], now: Mapping[str, Any], *, absent: str) -> list[str]:
    return [
        f"{kind}{name} is {_shown(now.get(name, absent))}, was {_shown(before.get(name, absent))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _without_port(command: Sequence[str]) -> list[str]:
    """The command without its port, and without the interpreter, whose path may differ."""
    words = list(command[1:])
    place = words.index("--port") if "--port" in words else len(words)
    return words[:place] + words[place + 2 :]


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
