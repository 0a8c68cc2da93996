"""The facts of a model by name: a folder, a repository in Hugging Face's cache, or one on the hub."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from overspill.model.errors import HubUnreachable, ModelNotFound
from overspill.model.facts import ModelFacts
from overspill.model.folder import read_folder
from overspill.model.hub_cache import cache_folder, find_snapshot

_REPO_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[\w][\w./-]*")
_TRUE = {"1", "on", "yes", "true"}


def read_model(
    name: str, *, revision: str = "main", dtype: str = "auto", environ: Mapping[str, str] = os.environ
) -> ModelFacts:
    """As vLLM looks for it: a folder of that name first, then the hub's cache, then the hub itself.

    HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN count, as they do for vLLM.
    """
    path = Path(os.path.expanduser(name))
    if not name or "\0" in name:
        raise ModelNotFound(
            f"{name!r} is not the name of a model; give a folder, or a repository such as Qwen/Qwen3-8B"
        )
    if os.path.exists(path) or not _is_repo_id(name):
        return read_folder(path, dtype=dtype)
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelNotFound(f"{revision!r} is not a revision; use a branch, a tag or a commit")
    snapshot = find_snapshot(cache_folder(environ), name, revision)
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE
    if snapshot is not None and (offline or _has_weights(snapshot)):
        return read_folder(snapshot, name=name, dtype=dtype)
    if offline:
        raise HubUnreachable(
            f"{name} is neither a folder nor in the cache ({cache_folder(environ)}), and HF_HUB_OFFLINE forbids to ask "
            "the hub; fetch it, or unset HF_HUB_OFFLINE"
        )
    # Here, so that nothing but the hub needs httpx.
    from overspill.model.hub import ENDPOINT, read_repository

    endpoint = environ.get("HF_ENDPOINT") or ENDPOINT
    return read_repository(name, revision=revision, token=environ.get("HF_TOKEN"), endpoint=endpoint, dtype=dtype)


def _is_repo_id(name: str) -> bool:
    return _REPO_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def _has_weights(snapshot: Path) -> bool:
    return any(entry.name.endswith(".safetensors") for entry in snapshot.iterdir())
