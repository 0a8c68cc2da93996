"""A model by name: a folder, a repository in Hugging Face's cache, or one on the hub."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from overspill.model import ModelError
from overspill.model.checkpoint import (
    LENGTH_BYTES,
    MAX_FILE_BYTES,
    Files,
    header_length,
    read_tensors,
    weight_map,
)
from overspill.model.config import Config, parse_object
from overspill.model.description import describe
from overspill.model.facts import ModelFacts

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
_REPO_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[\w][\w./-]*")
_TRUE = {"1", "on", "yes", "true"}


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Cache of Hugging Face's tools: HF_HUB_CACHE, else hub in HF_HOME, else in XDG_CACHE_HOME, else in ~/.cache
    (huggingface_hub/constants.py)."""
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def hub_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Token for the hub: HF_TOKEN, else the one that `hf auth login` stored."""
    if token := environ.get("HF_TOKEN", "").strip():
        return token
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface"
    try:
        return Path(environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser().read_text().strip() or None
    except OSError:
        return None


def find_snapshot(cache: Path, repo_id: str, revision: str) -> Path | None:
    """Snapshot folder of a branch, tag or commit; None if it was never fetched."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision  # a commit needs no ref
    snapshot = repository / "snapshots" / commit
    # huggingface_hub never writes a ref that points out of its folder.
    is_plain = Path(commit).name == commit
    return snapshot if is_plain and (snapshot / CONFIG).is_file() else None


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path

    @property
    def where(self) -> str:
        return str(self.path)

    def content(self, name: str) -> bytes | None:
        try:
            with _opened(self.path / name) as (file, _):
                return file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return None

    def safetensors(self) -> list[str]:
        with _explained(self.path):
            return sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(".safetensors"))

    def headers(self, names: Sequence[str]) -> Iterator[tuple[bytes, int]]:
        for name in names:
            yield self._header(name)

    def _header(self, name: str) -> tuple[bytes, int]:
        try:
            with _opened(self.path / name) as (file, size):
                length = header_length(file.read(LENGTH_BYTES), size, f"{name} in {self.where}")
                return file.read(length), size
        except FileNotFoundError as error:
            raise ModelError(
                f"{self.where} should hold {name}, and does not; the download was cut short, fetch it again"
            ) from error


# The shards of a model without an index: model-00001-of-00004.safetensors.
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors")


def is_whole(snapshot: Path) -> bool:
    """Whether a snapshot has all its weight files; a download that was cut short has some."""
    there = set(Folder(snapshot).safetensors())
    if (placed := weight_map(Folder(snapshot))) is not None:
        return there.issuperset(placed.values())
    shards = Counter((found["stem"], int(found["count"])) for name in there if (found := _SHARD.fullmatch(name)))
    return bool(there) and all(num_files == count for (_, count), num_files in shards.items())


def read_folder(path: Path, *, name: str | None = None, dtype: str = "auto") -> ModelFacts:
    """Read a model from a folder; `name` is used in place of the folder's name, and `dtype` is vLLM's --dtype."""
    with _explained(path):
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise ModelError(f"{path} {what}, and a folder with a {CONFIG} was expected; check the path")
    return read_files(Folder(path), name=name or path.resolve().name, folder=path, dtype=dtype)


def read_files(files: Files, *, name: str, folder: Path | None = None, dtype: str = "auto") -> ModelFacts:
    content = files.content(CONFIG)
    if content is None:
        instead = _instead(files) if isinstance(files, Folder) else ""
        raise ModelError(f"{files.where} holds no {CONFIG}{instead}; vLLM needs a model in Hugging Face's format")
    config = Config.parse(content, where=f"{CONFIG} in {files.where}")
    quant_file = files.content(QUANT_CONFIG) if config.raw.get("quantization_config") is None else None
    quant = None if quant_file is None else parse_object(quant_file, f"{QUANT_CONFIG} in {files.where}")
    return describe(config, read_tensors(files), name=name, folder=folder, quant_file=quant, dtype=dtype)


def _instead(folder: Folder) -> str:
    with _explained(folder.path):
        names = sorted(entry.name for entry in folder.path.iterdir())
    return f" (it holds {', '.join(names[:5])}{', ...' if names[5:] else ''})" if names else " and nothing else"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file and yield it with its size; the caller knows whether a missing file is an error."""
    with _explained(path):
        # Checked before opening: a pipe would block until a writer comes.
        if path.exists() and not path.is_file():
            raise ModelError(f"{path} is not a file, and one was expected; remove it")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into messages that say what to do."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise ModelError(
            f"{path} may not be read by this user; change its permissions, or run as another user"
        ) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}); check the path") from error


def read_model(
    name: str, *, revision: str = "main", dtype: str = "auto", environ: Mapping[str, str] = os.environ
) -> ModelFacts:
    """Read a model from where vLLM would: a folder of that name first, then the hub's cache, then the hub itself.

    HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and a stored token apply, as they do for vLLM.
    """
    path = Path(os.path.expanduser(name))
    if not name or "\0" in name:
        raise ModelError(f"{name!r} is not the name of a model; give a folder, or a repository such as Qwen/Qwen3-8B")
    if os.path.exists(path) or not is_repo_id(name):
        return read_folder(path, dtype=dtype)
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelError(f"{revision!r} is not a revision; use a branch, a tag or a commit")
    snapshot = find_snapshot(cache_folder(environ), name, revision)
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE
    if snapshot is not None and is_whole(snapshot):
        return read_folder(snapshot, name=name, dtype=dtype)
    if offline and snapshot is not None and any(snapshot.glob("*.safetensors")):
        raise ModelError(
            f"{snapshot} lacks some of the weight files of {name}: its download was cut short, and HF_HUB_OFFLINE "
            "forbids the hub; fetch it again, or unset HF_HUB_OFFLINE"
        )
    if offline and snapshot is not None:
        return read_folder(snapshot, name=name, dtype=dtype)
    if offline:
        raise ModelError(
            f"{name} is neither a folder nor in the cache ({cache_folder(environ)}), and HF_HUB_OFFLINE forbids the "
            "hub; fetch it, or unset HF_HUB_OFFLINE"
        )
    # Imported here, so that only the hub needs httpx.
    from overspill.model.hub import open_repository

    endpoint = environ.get("HF_ENDPOINT")
    with open_repository(name, revision=revision, token=hub_token(environ), endpoint=endpoint) as repository:
        return read_files(repository, name=name, dtype=dtype)


def is_repo_id(name: str) -> bool:
    return _REPO_ID.fullmatch(name) is not None and ".." not in name and "--" not in name
