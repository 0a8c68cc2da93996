"""Where Overspill keeps what it can do without."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The XDG cache folder's part for Overspill; None for a user without a home, as in some containers."""
    base = environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():  # others are to be ignored, says the XDG Base Directory Specification
        return Path(base) / "overspill"
    if home := environ.get("HOME"):
        return Path(home) / ".cache" / "overspill"
    try:
        return Path.home() / ".cache" / "overspill"
    except RuntimeError:
        return None
