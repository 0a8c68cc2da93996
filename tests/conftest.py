"""Models for the tests, made once; the engine in this process, on the CPU where there is no GPU."""

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.update(
    # Tiny models gain nothing from a second thread, and lose much when the cores are busy.
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    HF_HUB_OFFLINE="1",
    # No test writes to the registry, or among the servers, of who runs it.
    XDG_STATE_HOME=tempfile.mkdtemp(prefix="overspill-tests-"),
)
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the tiny model of a name, once."""
    from overspill.tiny import MODELS

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp("models") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def llama(models: Callable[[str], Path]) -> Path:
    return models("llama")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Overspill logs, through vLLM's loggers, which need not pass records on to the root."""
    logger = logging.getLogger("vllm")
    passes_on, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = passes_on


@pytest.fixture
def open_gate() -> Iterator[None]:
    """Tests that hold copies back let them go again whatever happens."""
    from overspill.kv.copies import PlainCopier

    yield
    PlainCopier.gate.set()
