"""Status files of running servers, for other processes.

`overspill serve` keeps a small file while it runs; a process that stops it leaves the reason in another one, since a
signal carries none. They are in the state folder, not in XDG_RUNTIME_DIR, which is removed at logout though a server
may live on, and which system timers and services lack. A process is identified by its start time and boot as well.
"""

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from overspill.files import replace_file, state_folder
from overspill.processes import boot, identity
from overspill.serve.engine_report import Phase, Report

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A phase and when it began."""

    phase: Phase
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of all workers together; None means not known yet, or not available on this platform."""

    weights_bytes: int | None = None
    weights_in_ram_bytes: int | None = None
    resident_kv_bytes: int | None = None
    window_bytes: int | None = None
    activation_bytes: int | None = None
    graph_bytes: int | None = None
    non_torch_bytes: int | None = None
    context_bytes: int | None = None
    spilled_bytes: int | None = None
    pool_bytes: int | None = None
    pinned_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of one server; times are ISO 8601 in UTC."""

    pid: int
    process: str | None
    """Identity of the process: boot and start time."""
    host: str
    run_id: int | None = None
    """Run in the registry; None if it could not be recorded."""
    model: str
    """The name the user gave: a registry name, a folder or a repository."""
    source: str
    served_name: str
    url: str
    session: int | None = None
    """Session ID of all processes of the engine."""
    phase: Phase = Phase.STARTING
    phases: tuple[Reached, ...] = ()
    lines: tuple[str, ...] = ()
    """Kept report lines: warnings, and what is or is not as planned."""
    log_file: str | None = None
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    memory: Memory = Memory()
    can_park: bool = False
    started_at: str
    ready_at: str | None = None
    ended_at: str | None = None
    error: str | None = None
    """Why the server ended or did not start."""

    @property
    def is_alive(self) -> bool:
        """Whether this very process lives; for another machine's server only the file tells."""
        if self.ended_at is not None:
            return False
        return self.host != platform.node() or (self.process is not None and identity(self.pid) == self.process)

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self.ready_at is not None

    @property
    def problem(self) -> str:
        """Why the server ended badly; empty while it lives."""
        if self.is_alive or self.error:
            return self.error or ""
        if self.process is not None and self.process.partition(":")[0] != boot():
            return "the machine was restarted while it ran"
        log = f"; vLLM's log is {self.log_file}" if self.log_file is not None else ""
        return (
            f"overspill serve (process {self.pid}) was killed while {self.phase}, as by kill -9 or the kernel's OOM "
            f"killer, and could not say why; vLLM was ended too{log}"
        )

    @property
    def text(self) -> str:
        """One-line description of the server."""
        run = f", run {self.run_id} of the registry" if self.run_id is not None else ""
        return f"overspill serve of {self.model}, process {self.pid}{run}, since {self.started_at}"


def folder_of(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Folder of status files; None for a user without a home."""
    state = state_folder(environ)
    return None if state is None else state / "serving"


def path_of(status: Status, folder: Path) -> Path:
    """Status file of a server, named by host: machines may share a home."""
    return folder / f"{status.host}-{status.pid}.json"


def write_status(status: Status, folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = {"format": _FORMAT, **dataclasses.asdict(status)}
    replace_file(path_of(status, folder), json.dumps(content, default=str) + "\n")


def remove_status(status: Status, folder: Path) -> None:
    path_of(status, folder).unlink(missing_ok=True)


def read_statuses(environ: Mapping[str, str] = os.environ) -> list[Status]:
    """Servers that run or ended badly, oldest first; unreadable files are left out."""
    folder = folder_of(environ)
    found = [] if folder is None else list(_read(folder))
    return sorted(found, key=lambda status: (status.started_at, status.pid))


def forget_ended(status: Status, known: Iterable[Status], folder: Path) -> None:
    """Forget bad ends of the same model or at the same address, which a new start supersedes."""
    for other in known:
        if not other.is_alive and (other.model == status.model or other.url == status.url):
            with suppress(OSError):
                remove_status(other, folder)


def clear_ended(environ: Mapping[str, str] = os.environ) -> None:
    """Forget all servers that ended badly; `forget_ended` does so for each at its next start."""
    if (folder := folder_of(environ)) is not None:
        for one in read_statuses(environ):
            if not one.is_alive:
                remove_status(one, folder)


class Start(NamedTuple):
    """Last start of a model on this machine: seconds until its server answered, and its log."""

    seconds: float | None = None
    log_file: str | None = None


def keep_start(model: str, start: Start, environ: Mapping[str, str] = os.environ) -> None:
    """Remember a start, to estimate the model's next one and to find its log after the end."""
    if (path := _start_path(model, environ)) is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps({"model": model, **start._asdict()}) + "\n")


def last_start(model: str, environ: Mapping[str, str] = os.environ) -> Start:
    """The model's last start; empty if none is known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if (path := _start_path(model, environ)) is not None:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return Start(float(kept["seconds"]), kept.get("log_file"))
    return Start()


def _start_path(model: str, environ: Mapping[str, str]) -> Path | None:
    folder = folder_of(environ)
    name = hashlib.sha256(model.encode(errors="surrogateescape")).hexdigest()[:16]
    return None if folder is None else folder / f"{platform.node()}-{name}.start"


def memory_of(reports: Sequence[Report]) -> Memory:
    """Memory of all workers together; pinned bytes are the connector's pools and arenas."""

    def total(sizes: Iterable[int | None]) -> int | None:
        known = [size for size in sizes if size is not None]
        return sum(known) if known else None

    same = {one.name for one in dataclasses.fields(Memory)} & {one.name for one in dataclasses.fields(Report)}
    return Memory(
        **{name: total(getattr(report, name) for report in reports) for name in same},
        resident_kv_bytes=total(
            report.kv_bytes if report.resident_bytes is None else report.resident_bytes for report in reports
        ),
        pool_bytes=total(report.pool.num_bytes for report in reports if report.pool is not None),
        pinned_bytes=total(one.pinned_bytes for report in reports for one in report.host_memory),
    )


def _read(folder: Path) -> Iterator[Status]:
    # A missing folder has no files.
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, AttributeError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("format") == _FORMAT:  # others are from another version
                yield msgspec.convert(content, Status)


def leave_reason(pid: int, process: str, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Leave the reason of a stop for the process with this PID and identity, before signalling it."""
    path = _reason_path(pid, environ)
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps({"process": process, "reason": reason}) + "\n")


def take_reason(pid: int, process: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Read and remove the reason of a stop; empty if there is none, or it was meant for another process."""
    path = _reason_path(pid, environ)
    if path is None:
        return ""
    try:
        left = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    except ValueError:
        left = {}
    with suppress(FileNotFoundError):  # the process that left it removes it too
        path.unlink()
    is_ours = isinstance(left, dict) and process is not None and left.get("process") == process
    return str(left.get("reason", "")) if is_ours else ""


def _reason_path(pid: int, environ: Mapping[str, str]) -> Path | None:
    """File of a reason, beside the status files but with another suffix; named by host: machines may share a home."""
    folder = folder_of(environ)
    return None if folder is None else folder / f"{platform.node()}-{pid}.stop"
