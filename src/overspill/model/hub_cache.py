"""Models that Hugging Face's tools have already fetched: models--org--name/{refs,snapshots}."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """HF_HUB_CACHE, else hub in HF_HOME, else in XDG_CACHE_HOME, else in ~/.cache (huggingface_hub/constants.py)."""
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def find_snapshot(cache: Path, repo_id: str, revision: str) -> Path | None:
    """The folder of a branch, a tag or a commit; None if it was never fetched."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision  # a commit needs no ref
    snapshot = repository / "snapshots" / commit
    # A ref that points out of its folder is not one that huggingface_hub wrote.
    is_plain = Path(commit).name == commit
    return snapshot if is_plain and (snapshot / "config.json").is_file() else None
