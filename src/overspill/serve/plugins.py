"""vLLM finds Overspill's plugins, also where Overspill is not installed but only on the path.

vLLM looks for plugins in the metadata of installed packages, in every process it starts. Where ours say nothing of
them, a folder with just that is put in front of the path: any folder of the path may hold a package's metadata.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

import overspill

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
