"""A plugin of vLLM's for the processes that a test starts: how a real engine is made to misbehave."""

import os
from pathlib import Path


def with_plugin(folder: Path, code: str) -> dict[str, str]:
    """Variables for processes in which vLLM calls `register` of this code; its own `__file__` is in the folder."""
    info = folder / "test_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test_plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ntest_plugin = test_plugin:register\n")
    (folder / "test_plugin.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
