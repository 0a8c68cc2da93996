"""KV of the planned size on a GPU with neighbours. vLLM's own code runs on a card that is played: the test machine has
none, and tests/test_gpu_beside.py starts real engines."""

import itertools
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.utils import request_memory

from overspill.figures import assumed, measured
from overspill.kv.sizes import GiB, MiB
from overspill.launch.launch import prepare
from overspill.launch.machine import plan_for
from overspill.launch.vllm import Vllm
from overspill.planning.arguments import device_share, vllm_args
from overspill.planning.device_share import VARIABLE, DeviceShare, Taken
from overspill.planning.memory import Overheads
from overspill.planning.planner import Plan
from overspill.serve import planned_kv
from overspill.serve.differences import differences, profile_of
from overspill.serve.engine_report import Phase, Report, WorkerReporter
from tests.model_configs import llama_3_1_8b
from tests.test_plan import plan

SHARE = DeviceShare(budget_bytes=20 * GiB, non_torch_bytes=GiB // 4, graph_bytes=GiB // 4)
TAKEN = Taken(weights_bytes=8 * GiB, reserved_bytes=8 * GiB + 10 * MiB, activation_bytes=GiB)
# What is left of the budget if all is as planned.
KV = 10 * GiB + GiB // 2


# The decision.


def test_kv_is_as_planned_while_the_rest_is() -> None:
    assert SHARE.kv_bytes(KV, TAKEN) == KV
    assert SHARE.kv_bytes(KV, replace(TAKEN, activation_bytes=0)) == KV  # the plan decides, not what is left
    assert SHARE.kv_bytes(KV, replace(TAKEN, activation_bytes=GiB + 100 * MiB)) == KV
    assert SHARE.excess_bytes(KV, TAKEN, SHARE.graph_bytes) == 0


def test_kv_gives_way_to_weights_and_activations_beyond_the_plan() -> None:
    for beyond in ({"activation_bytes": 2 * GiB}, {"weights_bytes": 9 * GiB}, {"reserved_bytes": 9 * GiB + GiB // 4}):
        assert SHARE.kv_bytes(KV, replace(TAKEN, **beyond)) == KV - GiB
    assert SHARE.kv_bytes(KV, replace(TAKEN, activation_bytes=13 * GiB)) < 0


def test_graphs_beyond_the_plan_are_an_excess() -> None:
    assert SHARE.excess_bytes(KV, TAKEN, SHARE.graph_bytes + GiB) == GiB


def test_a_share_reaches_the_worker_by_its_variable() -> None:
    assert DeviceShare.read(SHARE.written()) == SHARE and list(SHARE.written()) == [VARIABLE]
    assert DeviceShare.read({}) is None


# Arguments.


LLAMA_8B = llama_3_1_8b()


@pytest.mark.parametrize("length", [8192, 131072])
def test_a_plan_on_a_gpu_sets_the_bytes_of_kv_and_what_must_be_free(length: int) -> None:
    made = plan(LLAMA_8B, "24GiB", "128GiB", length)
    for way in made.ways:
        words = vllm_args(made, way)
        values = dict(itertools.pairwise(words))
        share = device_share(made, way)
        assert share is not None and values["--kv-cache-memory-bytes"] == str(way.kv.device_bytes)
        # What vLLM demands free at the start is what the engine takes: all but part of a piece of memory.
        demanded = float(values["--gpu-memory-utilization"]) * made.gpu.total_bytes.value
        weights = made.facts.weights.total_bytes - way.weights.saved_bytes
        assert 0 <= demanded - (weights + way.overheads.total.value + way.kv.device_bytes) < GiB // 4
        taken = Taken(
            weights_bytes=weights, reserved_bytes=weights, activation_bytes=way.overheads.activation_bytes.value
        )
        assert share.kv_bytes(way.kv.device_bytes, taken) == way.kv.device_bytes


def test_spill_gets_the_resident_blocks_that_were_planned() -> None:
    """The worker counts them anew from the bytes that it is given."""
    from overspill.kv.spill.geometry import CUDA_GRANULARITY, num_resident_blocks

    made = plan(LLAMA_8B, "24GiB", "128GiB", 131072)
    way = next(way for way in made.ways if way.kv.spilled_bytes)
    geometry, kv = way.geometry, way.kv
    counted = num_resident_blocks(
        kv.device_bytes - kv.table_bytes, kv.spilled_bytes // geometry.bytes_per_block, geometry.page_size_bytes,
        geometry.num_regions, CUDA_GRANULARITY,
    )  # fmt: skip
    assert counted * geometry.bytes_per_block == kv.resident_bytes


def test_vllm_sizes_kv_where_the_plan_cannot() -> None:
    two = plan(LLAMA_8B, "24GiB", "128GiB", 8192, tensor_parallel_size=2)
    forced = plan(LLAMA_8B, "17.5GiB", "64GiB", 1024, weights_ram_bytes=0, force=True)
    assert forced.forced is not None and forced.forced.available_bytes > 0
    drafts = plan(LLAMA_8B, "24GiB", "128GiB", 8192, drafts="ngram")
    assert drafts.chosen is not None and "--speculative-config" in vllm_args(drafts, drafts.chosen)
    for made in (two, forced, drafts):
        assert made.chosen is not None and device_share(made, made.chosen) is None
        assert "--kv-cache-memory-bytes" not in vllm_args(made, made.chosen)


def test_the_share_is_given_to_engines_with_the_planned_kv_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    settings = {"host": "127.0.0.1", "port": 8000}
    made = plan_for(str(tmp_path), {"gpu": "24GiB", "ram": 64 * GiB, "max_model_len": 8192})
    assert made.chosen is not None
    share, inherited = device_share(made, made.chosen), {VARIABLE: "of another engine"}

    def given(*flags: str) -> DeviceShare | None:
        vllm = Vllm("0.32.0", is_cpu=False)
        prepared = prepare(str(tmp_path), made, settings, flags, vllm=vllm, environment={})
        assert VARIABLE not in prepared.line
        return DeviceShare.read(prepared.full_environment(inherited))

    assert share is not None and given() == share
    for flags in (["--kv-cache-memory-bytes", "1G"], ["--kv-cache-mem=1G"], ["--speculative-config", "{}"]):
        assert given(*flags) is None


def test_an_llm_has_the_share_while_its_engine_starts() -> None:
    from overspill.llm import _environment, _variables

    made = plan(LLAMA_8B, "24GiB", "128GiB", 8192)
    assert made.chosen is not None
    with _environment(_variables(made, {"kv_cache_memory_bytes": made.chosen.kv.device_bytes})):
        assert DeviceShare.read(os.environ) == device_share(made, made.chosen)
    for own in ({"kv_cache_memory_bytes": GiB}, {}):
        with _environment(_variables(made, own)):
            assert VARIABLE not in os.environ
    assert VARIABLE not in os.environ


# vLLM's worker on a card that is played.


@dataclass
class Card:
    """Memory of a GPU with a neighbour, and PyTorch's part of it."""

    total: int = 140 * GiB
    neighbour: int = 40 * GiB
    reserved: int = 0
    peak: int = 0
    libraries: int = 0

    @property
    def free(self) -> int:
        return self.total - self.neighbour - self.reserved - self.libraries

    def snapshot(self) -> MemorySnapshot:
        return MemorySnapshot(
            free_memory=self.free, total_memory=self.total, torch_memory=self.reserved, device="cpu", auto_measure=False
        )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    played = Card()
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(accelerator, "reset_peak_memory_stats", lambda device=None: None)
    monkeypatch.setattr(accelerator, "get_memory_info", lambda device=None: (played.free, played.total))
    monkeypatch.setattr(accelerator, "memory_reserved", lambda device=None: played.reserved)
    monkeypatch.setattr(
        accelerator, "memory_stats",
        lambda device=None: {"allocated_bytes.all.current": played.reserved, "allocated_bytes.all.peak": played.peak},
    )  # fmt: skip
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(gpu_worker.current_platform, "is_integrated_gpu", lambda index: False, raising=False)
    return played


def worker(card: Card, meanwhile: Callable[[], None], *, kv_bytes: int | None, activations: int = GiB) -> Any:
    """As it is when it has loaded 8 GiB of weights; `meanwhile` is what its neighbour does while it profiles."""
    before = card.snapshot()
    card.reserved, card.libraries = 8 * GiB + 10 * MiB, GiB // 5

    def profile_run(randomize_inputs: bool = False) -> None:
        card.peak = card.reserved + activations
        meanwhile()

    def capture_model() -> int:
        card.reserved += GiB // 8
        card.neighbour += 3 * GiB
        return 3 * GiB + GiB // 8

    return SimpleNamespace(
        device=torch.device("cpu"), device_config=SimpleNamespace(device_type="cuda"), init_snapshot=before,
        cache_config=CacheConfig(kv_cache_memory_bytes=kv_bytes, gpu_memory_utilization=20 / 140),
        requested_memory=20 * GiB, randomize_dummy_inputs=False, rank=0, parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(multimodal_config=None),
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=gpu_worker.CUDAGraphMode.NONE)
        ),
        model_runner=SimpleNamespace(
            model_memory_usage=8 * GiB, profile_run=profile_run, capture_model=capture_model
        ),
        _scoped_allocator_max_split=lambda max_split_size_mb: nullcontext(),
    )  # fmt: skip


DETERMINE = gpu_worker.Worker.determine_available_memory


def free_some(card: Card) -> Callable[[], None]:
    def free() -> None:
        card.neighbour -= 30 * GiB

    return free


def take_some(card: Card) -> Callable[[], None]:
    def take() -> None:
        card.neighbour += 5 * GiB

    return take


def test_vllm_alone_fails_or_shrinks_with_its_neighbour(card: Card) -> None:
    """What this module is for: without it, these would be the engine's KV."""
    with pytest.raises(AssertionError, match="Error in memory profiling"):
        DETERMINE(worker(card, free_some(card), kv_bytes=None))
    card.reserved = card.libraries = 0
    assert DETERMINE(worker(card, take_some(card), kv_bytes=None)) < KV - 4 * GiB


@pytest.mark.parametrize("meanwhile", [free_some, take_some], ids=["freed", "taken"])
def test_a_neighbour_changes_nothing_of_a_planned_engine(
    card: Card, meanwhile: Callable[[Card], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SHARE.written()[VARIABLE])
    one = worker(card, meanwhile(card), kv_bytes=KV)
    assert planned_kv.sized_by_plan(DETERMINE)(one) == KV
    assert one.overspill_memory.taken == TAKEN and one.overspill_memory.non_torch_bytes is None
    one.model_runner.capture_model()
    assert one.overspill_memory.graph_bytes == GiB // 8 and one.overspill_memory.excess_bytes == 0


def test_an_engine_that_takes_more_gets_less_kv_and_says_so(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SHARE.written()[VARIABLE])
    one = worker(card, lambda: None, kv_bytes=KV, activations=3 * GiB)
    assert planned_kv.sized_by_plan(DETERMINE)(one) == KV - 2 * GiB
    reporter = WorkerReporter.__new__(WorkerReporter)
    reporter._worker, reporter._free_before = one, one.init_snapshot.free_memory + GiB // 2
    assert reporter._profile(8 * GiB) == {
        "activation_bytes": 3 * GiB, "non_torch_bytes": 10 * MiB + GiB // 5, "graph_bytes": 0, "excess_bytes": 0,
        "context_bytes": GiB // 2,
    }  # fmt: skip
    reporter._free_before += 5 * GiB  # as a neighbour makes it look
    assert reporter._profile(8 * GiB)["context_bytes"] is None


def test_bytes_that_a_user_gave_are_not_touched(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    one = worker(card, free_some(card), kv_bytes=50 * GiB, activations=3 * GiB)
    assert planned_kv.sized_by_plan(DETERMINE)(one) == 50 * GiB and not hasattr(one, "overspill_memory")


def test_vllm_checks_its_fraction_before_loading_although_it_has_bytes(card: Card) -> None:
    """So the fraction has to be planned too."""
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(card.snapshot(), CacheConfig(kv_cache_memory_bytes=GiB))
    assert request_memory(card.snapshot(), CacheConfig(kv_cache_memory_bytes=GiB, gpu_memory_utilization=0.5))


def test_vllms_worker_has_the_names_that_are_used() -> None:
    import inspect

    source = inspect.getsource(gpu_worker.Worker)
    assert "self.model_runner.capture_model()" in source and "def _scoped_allocator_max_split(self, max_split" in source
    assert "skipped memory profiling" in source and "self.init_snapshot = " in source


# The check after the start.


def started(made: Plan, **sizes: int | None) -> Report:
    assert made.chosen is not None
    kv = made.chosen.kv.resident_bytes
    return Report(phase=Phase.STARTED, kv_bytes=kv, max_model_len=made.max_model_len, **sizes)  # type: ignore[arg-type]


def test_an_engine_beyond_its_budget_is_stopped_once_overheads_were_measured() -> None:
    made = plan(LLAMA_8B, "24GiB", "16GiB", 8192, offload_ram_bytes=0)
    assert made.chosen is not None and not made.chosen.connector_sizes
    size = measured(GiB // 4)
    known = Overheads(context_bytes=size, non_torch_bytes=size, activation_bytes=size, graph_bytes=size)
    seen = replace(made.chosen, overheads=known)
    guess = replace(made.chosen, overheads=replace(known, graph_bytes=assumed(GiB // 4)))
    report = started(made, excess_bytes=GiB, graph_bytes=GiB + GiB // 4)
    (stopped,), (told,) = differences(made, seen, report), differences(made, guess, report)
    assert stopped.stops and stopped.what == "GPU memory" and "1.25 GiB for CUDA graphs" in stopped.happened
    assert not told.stops and "has now been measured" in told.remedy
    assert differences(made, seen, started(made, excess_bytes=GiB // 8)) == []
    assert differences(made, seen, started(made)) == []


def test_a_profile_disturbed_by_a_neighbour_is_not_kept() -> None:
    made = plan(LLAMA_8B, "24GiB", "16GiB", 8192, offload_ram_bytes=0)
    sizes = {"activation_bytes": GiB, "graph_bytes": 0, "context_bytes": GiB // 2, "excess_bytes": 0}
    assert profile_of(started(made, **sizes, non_torch_bytes=None)) is None
    assert profile_of(started(made, **sizes, non_torch_bytes=GiB // 4)) is not None
