"""Models for the tests, made once; the engine in this process, on the CPU where there is no GPU."""

import atexit
import contextlib
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiers import starts_nothing
from tests.zygote import warm

if TYPE_CHECKING:
    from overspill.kv.ledger import Ledger
    from overspill.registry import Registry
    from tests.managed_here import Here
    from tests.manager_process import Place

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
# However the tests are started, as by nohup or behind a shell's &: what they start can be interrupted.
for _sign, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_sign) is signal.SIG_IGN:
        signal.signal(_sign, _handler)


# The longest first: begun last, one of them would keep a single process busy when the others have nothing left.
SLOWEST = (
    "test_verify.py", "test_tune.py", "test_ranks.py", "test_demo.py", "test_bench.py", "test_park.py",
    "test_remote.py", "test_elastic.py", "test_spill_loan.py", "test_manager_dashboard.py", "test_manager_elastic.py",
    "test_manager_browser.py", "test_llm.py", "test_disk.py", "test_serve.py", "test_serve_control.py",
    "test_elastic_sharing.py", "test_manager_engines.py", "test_spill_states.py", "test_manager_scripts.py",
    "test_scheduler_properties.py", "test_registry_writers.py", "test_offload.py", "test_spill_models.py",
    "test_ab.py", "test_unpacked.py", "test_registry_migrations.py", "test_manager_attacks.py", "test_examples.py",
    "test_docs.py", "test_hybrids.py", "test_contract.py", "test_wheel.py", "test_spill_with_offload.py",
    "test_tensor_parallel.py", "test_routers.py", "test_soak.py", "test_spill_soak.py", "test_manager_faults.py",
    "test_manager_behind_nginx.py", "test_model_vllm.py", "test_disk_serve.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))
    for item in items:
        if isinstance(item, pytest.Function) and starts_nothing(item):
            item.add_marker(pytest.mark.fast)


def pytest_collection_finish() -> None:
    """What vLLM and all tests consist of stays: nothing that collects garbage has to look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_ports() -> Iterator[None]:
    """A part of what free_port chooses from for each process that tests run in: a server may listen a minute after its
    port was chosen."""
    from overspill import address

    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(address, "_FIRST_PORT", 10000 + 3000 * (worker % 7))
        patched.setattr(address, "_LAST_PORT", 10000 + 3000 * (worker % 7) + 2999)
        yield


@pytest.fixture(scope="session", autouse=True)
def preloaded() -> Iterator[None]:
    """Servers and commands that tests start are forked from a process that has imported vLLM."""
    with warm():
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the tiny model of a name, once."""
    from tests.tiny_models import MODELS

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp("models") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def llama(models: Callable[[str], Path]) -> Path:
    return models("llama")


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes hybrid models with four layers in a group, so that each half of spill's window serves two of them."""
    from tests.tiny_models import MODELS

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp("deep") / name, layers=12)
        return made[name]

    return get


@pytest.fixture(params=["eager", "late"])
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of spilled KV run when they are asked for, or as late as the order of streams allows."""
    from overspill.kv.spill import worker
    from tests.late_streams import LateStreams

    if request.param == "late":
        monkeypatch.setattr(worker, "HostStreams", LateStreams)


@pytest.fixture
def registry(tmp_path: Path) -> "Iterator[Registry]":
    """An empty one, in a file."""
    from overspill.registry import open_registry

    with open_registry(f"sqlite:///{tmp_path}/registry.db") as opened:
        yield opened


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Place]":
    """For a manager over stand-ins for engines."""
    from tests.manager_process import place_in

    yield from place_in(tmp_path, monkeypatch)


@pytest.fixture
def here(place: "Place") -> "Iterator[Here]":
    """A manager in a thread, with two models."""
    from tests.managed_here import managed_here

    place.add("a", behaviour={"start_s": 0.1})
    place.add("b", ram=2 << 30, notes="x" * 300)
    with managed_here(place) as running:
        yield running


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, no process that it began outlives it."""
    from overspill.processes import below

    before = set(below(os.getpid()))
    yield
    # A database of earlier tests starts processes of its own as it pleases, so theirs are looked for after all; Python
    # keeps one to clean up after others.
    living = below(os.getpid())
    theirs = before.union(*(below(pid) for pid in before))
    left = {pid: command_line(pid) for pid in living if pid not in theirs}
    ours = ("resource_tracker", "tests.zygote")
    assert not {pid: text for pid, text in left.items() if text and not any(one in text for one in ours)}


def command_line(pid: int) -> str:
    """Empty once it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


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


@pytest.fixture
def ledger(tmp_path: Path) -> "Iterator[Ledger]":
    """Of a GPU, as the manager has it open."""
    from overspill.kv.ledger import Ledger

    opened = Ledger(tmp_path / "gpu.ledger")
    yield opened
    opened.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic engine that has to shrink waits for nothing."""
    from overspill.kv import elastic

    monkeypatch.setattr(elastic, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(elastic, "_COPYING_S", 0.0)
    monkeypatch.setattr(elastic, "_SECONDS_BETWEEN_OFFERS", 0.0)
