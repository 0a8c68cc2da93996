"""Where Overspill keeps what it can do without, and what it should not lose."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The XDG cache folder's part for Overspill; None for a user without a home, as in some containers."""
    return _folder(environ, "XDG_CACHE_HOME", ".cache")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The same of the XDG state folder: the registry, logs, and what runs."""
    return _folder(environ, "XDG_STATE_HOME", ".local/state")


def _folder(environ: Mapping[str, str], variable: str, usual: str) -> Path | None:
    base = environ.get(variable, "")
    if Path(base).is_absolute():  # others are to be ignored, says the XDG Base Directory Specification
        return Path(base) / "overspill"
    if home := environ.get("HOME"):
        return Path(home) / usual / "overspill"
    try:
        return Path.home() / usual / "overspill"
    except RuntimeError:
        return None
