"""vLLM's engine cores, and how to end one when a test wants it to."""

from collections.abc import Iterable
from pathlib import Path

from overspill.processes import title_of
from tests.plugin import with_plugin

DEATH_S = 60
"""In which a dead core must be noticed, told and cleared away: 2 s on an idle machine, where tests share busy cores.
Nothing else would end it: vLLM's server waits for a dead core for ever."""
# vLLM completes its configuration again in the core after loading, when it has told its server that it is ready.
_AFTER_LOADING = """
import multiprocessing, os, signal
from vllm.config import VllmConfig

def register():
    post_init = VllmConfig.__post_init__
    def dying(self):
        post_init(self)
        if multiprocessing.current_process().name.startswith("EngineCore"):
            {dies}
    VllmConfig.__post_init__ = dying
"""


def dying_after_loading(folder: Path, dies: str) -> dict[str, str]:
    """Variables for an engine whose core runs the statement `dies` at the end of its start."""
    return with_plugin(folder, _AFTER_LOADING.format(dies=dies))


def engine_cores(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if "::EngineCore" in title_of(pid)]
