"""Library: models on this machine and on the hub, found, downloaded with progress, and removed."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from overspill.kv.sizes import format_size
from overspill.manager import logs
from overspill.manager.allowlist import is_repo_id
from overspill.manager.errors import ManagerError
from overspill.model import ModelError
from overspill.model.hub import ENDPOINT, TIMEOUT
from overspill.model.source import hub_token, is_whole

_PREFIX = "models--"
# Files that vLLM reads from a repository: not the same weights in other formats, and no code.
WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_FETCH = (
    "import sys; from huggingface_hub import snapshot_download; "
    "snapshot_download(sys.argv[1], cache_dir=sys.argv[2], allow_patterns=sys.argv[3:])"
)
_MOST_FOUND = 20
_DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    source: str
    name: str
    num_bytes: int
    where: str
    is_cached: bool = False
    """Whether the model is in the hub's cache, from which it can be removed here."""
    is_complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    source: str
    downloads: int
    is_gated: bool


def local_models(folders: Sequence[Path], cache: Path) -> list[LocalModel]:
    """Models in the hub's cache and in the folders, by name. Reads directories: not for the event loop."""
    found = [_cached(path) for path in sorted(cache.glob(f"{_PREFIX}*")) if path.is_dir()]
    for root in folders:
        for path in _with_config(root, _DEPTH):
            weights = [one for one in path.glob("*.safetensors") if one.is_file()]
            size = sum(one.stat().st_size for one in weights)
            name = path.relative_to(root).as_posix() if path != root else root.name
            found.append(LocalModel(source=str(path), name=name, num_bytes=size, where=str(root)))
    return sorted(found, key=lambda one: one.name.lower())


def _cached(path: Path) -> LocalModel:
    source = path.name.removeprefix(_PREFIX).replace("--", "/", 1)
    is_running = any(path.glob("blobs/*.incomplete"))
    return LocalModel(
        source=source, name=source, num_bytes=bytes_in(path), where="the hub's cache", is_cached=True,
        is_complete=not is_running and any(_is_complete(one.parent) for one in path.glob("snapshots/*/config.json")),
    )  # fmt: skip


def _is_complete(snapshot: Path) -> bool:
    """Whether a snapshot has all its weights: a download may have ended before, or be in another format."""
    try:
        return is_whole(snapshot) or any(snapshot.glob("*.bin"))
    except ModelError:  # an index that cannot be read
        return False


def _with_config(folder: Path, depth: int) -> list[Path]:
    # Not pathlib's, which raise for a folder that this user may not read, such as lost+found.
    if os.path.isfile(folder / "config.json"):
        return [folder]
    below: list[Path] = []
    with contextlib.suppress(OSError):
        below = sorted(one for one in folder.iterdir() if os.path.isdir(one)) if depth else []
    named = [one for one in below if not one.name.startswith((".", _PREFIX))]
    return [found for one in named for found in _with_config(one, depth - 1)]


def bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def remove_cached(cache: Path, source: str) -> int:
    """Remove a repository from the hub's cache, and return the bytes freed."""
    if not is_repo_id(source):
        raise ManagerError(f"{source!r:.200} is not a repository's id; only models in the hub's cache are removed here")
    folder = cache / f"{_PREFIX}{source.replace('/', '--')}"
    if not folder.is_dir():
        raise ManagerError(f"{source} is not in the hub's cache; look at the list again")
    freed = bytes_in(folder)
    shutil.rmtree(folder)
    return freed


# The hub


def search_hub(text: str, environ: Mapping[str, str] = os.environ) -> list[HubModel]:
    """Text models that match, most downloaded first. Blocks."""
    query = {"search": text, "filter": "text-generation", "sort": "downloads", "direction": "-1"}
    told = _asked("/api/models", {**query, "limit": str(_MOST_FOUND)}, environ)
    if not isinstance(told, list):
        raise ManagerError("the hub's answer was not a list of models; try again later")
    return [
        HubModel(
            source=str(one["id"]),
            downloads=int(one.get("downloads") or 0),
            is_gated=bool(one.get("gated")),
        )
        for one in told
        if isinstance(one, dict) and is_repo_id(str(one.get("id", "")))
    ]


def hub_bytes(source: str, environ: Mapping[str, str] = os.environ) -> int:
    """Size of the files that would be downloaded. Blocks."""
    told = _asked(f"/api/models/{source}", {"blobs": "true"}, environ)
    files = told.get("siblings", []) if isinstance(told, dict) else []
    suffixes = tuple(pattern.lstrip("*") for pattern in WANTED)
    return sum(int(one.get("size") or 0) for one in files if str(one.get("rfilename", "")).endswith(suffixes))


def _asked(path: str, query: Mapping[str, str], environ: Mapping[str, str]) -> Any:
    if environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false"):
        raise ManagerError(
            "HF_HUB_OFFLINE keeps this manager from the hub; start it without that to search and download"
        )
    endpoint = environ.get("HF_ENDPOINT") or ENDPOINT
    token = hub_token(environ)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{endpoint}{path}", params=query, headers=headers, timeout=TIMEOUT, follow_redirects=True)
    except httpx.HTTPError as error:
        raise ManagerError(
            f"the hub at {endpoint} cannot be reached from here: {error or type(error).__name__}"
        ) from error
    if answer.status_code in (401, 403, 404):
        raise ManagerError(
            "the hub has no such model, or shows it only to users who accepted its terms; check the name, or accept "
            "the terms there and start the manager with HF_TOKEN"
        )
    if answer.is_error:
        raise ManagerError(f"the hub at {endpoint} answered {answer.status_code}; try again later")
    try:
        return answer.json()
    except ValueError as error:
        raise ManagerError(f"the hub at {endpoint} did not answer with JSON: {error}") from error


# Downloads


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Snapshot of a download."""

    source: str
    state: Literal["running", "done", "failed", "stopped"]
    done_bytes: int
    total_bytes: int
    seconds: float
    error: str = ""

    @property
    def left_s(self) -> float | None:
        """Seconds left at the speed so far; None if unknown."""
        if self.state != "running" or not self.done_bytes or not self.total_bytes or self.seconds < 1:
            return None
        return max(0.0, self.total_bytes - self.done_bytes) * self.seconds / self.done_bytes


@dataclass(eq=False, slots=True)
class _Fetch:
    process: "subprocess.Popen[bytes]"
    log: Path
    total_bytes: int
    began: float = field(default_factory=time.monotonic)
    is_stopped: bool = False
    ended: float | None = None


class Downloads:
    """Downloads by huggingface_hub, one process each; a stopped one resumes later with the files that are missing."""

    def __init__(self, cache: Path, folder: Path) -> None:
        self.cache, self._folder = cache, folder
        self._fetches: dict[str, _Fetch] = {}

    async def start(self, source: str) -> None:
        if not is_repo_id(source):
            raise ManagerError(f"{source!r:.200} is not a repository's id; write for example Qwen/Qwen3-8B")
        if self._is_running(source):
            return
        total = await asyncio.to_thread(hub_bytes, source)
        at = self._place(source)
        _drop_halves(at)
        before = await asyncio.to_thread(bytes_in, at)
        there = next(one for one in (self.cache, *self.cache.parents) if one.exists())
        free = shutil.disk_usage(there).free
        if total - before > free:
            raise ManagerError(
                f"{source} is {format_size(total)}, and {format_size(free)} are free in the models' cache "
                f"({self.cache}); remove other models, or set HF_HOME to a larger disk"
            )
        if self._is_running(source):
            return  # asked for twice at once
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = self._folder / f"{at.name}.log"
        command = [sys.executable, "-P", "-c", _FETCH, source, str(self.cache), *WANTED]
        environment = {**os.environ, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment,
            )  # fmt: skip
        self._fetches[source] = _Fetch(process, log, total)

    def _is_running(self, source: str) -> bool:
        fetch = self._fetches.get(source)
        return fetch is not None and fetch.process.poll() is None

    def stop(self, source: str) -> None:
        """Stop a download; whole files are kept, and the next start fetches the rest."""
        if self._is_running(source):
            fetch = self._fetches[source]
            fetch.is_stopped = True
            fetch.process.send_signal(signal.SIGKILL)
            fetch.process.wait()
            _drop_halves(self._place(source))

    def close(self) -> None:
        for source in self._fetches:
            self.stop(source)

    def forget(self, source: str) -> None:
        self.stop(source)
        self._fetches.pop(source, None)

    def list(self) -> list[Download]:
        """All downloads since the manager started. Reads directories: not for the event loop."""
        return [self._seen(source, fetch) for source, fetch in self._fetches.items()]

    def _seen(self, source: str, fetch: _Fetch) -> Download:
        code = fetch.process.poll()
        if code is not None and fetch.ended is None:
            fetch.ended = time.monotonic()
        state: Literal["running", "done", "failed", "stopped"] = "running"
        if code is not None:
            state = "done" if code == 0 else "stopped" if fetch.is_stopped else "failed"
        done = fetch.total_bytes if state == "done" else min(bytes_in(self._place(source)), fetch.total_bytes)
        return Download(
            source=source, state=state, done_bytes=done, total_bytes=fetch.total_bytes,
            seconds=(fetch.ended or time.monotonic()) - fetch.began,
            error=logs.last_line(fetch.log) if state == "failed" else "",
        )  # fmt: skip

    def _place(self, source: str) -> Path:
        return self.cache / f"{_PREFIX}{source.replace('/', '--')}"


def _drop_halves(folder: Path) -> None:
    """Delete partial files: huggingface_hub gives each attempt a new name, and so never resumes one."""
    for path in folder.glob("blobs/*.incomplete"):
        path.unlink(missing_ok=True)
