"""Why a server is asked to stop, in words: left by who asks, and taken by `overspill serve`. A signal carries none."""

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from overspill.files import replace_file
from overspill.serve.status import folder_of


def leave_reason(pid: int, process: str, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """For the process of this number and identity, before it is signalled."""
    path = _path(pid, environ)
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps({"process": process, "reason": reason}) + "\n")


def take_reason(pid: int, process: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Once; empty if nobody left one, or if it was left for another process that had the same number."""
    path = _path(pid, environ)
    if path is None:
        return ""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    except ValueError:
        told = {}
    with suppress(FileNotFoundError):  # who left it takes it away too
        path.unlink()
    is_ours = isinstance(told, dict) and process is not None and told.get("process") == process
    return str(told.get("reason", "")) if is_ours else ""


def _path(pid: int, environ: Mapping[str, str]) -> Path | None:
    """Beside the status files, which have another ending. Homes may be shared between machines."""
    folder = folder_of(environ)
    return None if folder is None else folder / f"{platform.node()}-{pid}.stop"
