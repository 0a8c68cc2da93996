"""What is planned for vLLM's CPU platform is what its engine makes of exactly those arguments."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from overspill.kv.buffer import granularity
from overspill.kv.errors import OverspillError
from overspill.launch.machine import plan_for
from overspill.planning.arguments import CONTRADICTING_VARIABLES, vllm_args
from overspill.planning.planner import Plan
from overspill.planning.setup import CPU
from overspill.settings import resolve
from overspill.tiny import make_llama
from tests.engine import Engine, random_prompt, stop_engines
from tests.engine_cost import without_collections

Models = Callable[[str], Path]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these plans are for the CPU platform")


@pytest.fixture(autouse=True)
def _memory_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CONTRADICTING_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def planned(model: Path, **given: object) -> Plan:
    flags = {"device": "cpu", "dtype": "float32", "ram": "8GiB", "offload_ram": "0", "max_num_seqs": "8",
             "enforce_eager": True, **given}  # fmt: skip
    return plan_for(str(model), {name: value.value for name, value in resolve(flags, {}, None).items()})


@contextmanager
def started(plan: Plan, model: Path) -> Iterator[Engine]:
    way = plan.recommended
    assert way is not None
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    # No more than is needed for a model without a tokenizer.
    arguments = ["--model", str(model), "--skip-tokenizer-init", *vllm_args(plan, way)]
    parsed = EngineArgs.from_cli_args(parser.parse_args(arguments))
    with without_collections():
        try:
            llm = LLM.from_engine_args(parsed)
        except BaseException:
            stop_engines()
            raise
        running = Engine(llm)
        try:
            yield running
        finally:
            del running.llm, llm
            stop_engines(everything=False)


def num_blocks(running: Engine) -> int:
    return int(running.vllm_scheduler.kv_cache_config.num_blocks)


@pytest.mark.parametrize(
    ("layers", "gpu_memory", "length"), [(4, "8MiB", 4096), (4, "5MiB", 1500), (12, "14MiB", 4096)]
)
def test_a_plan_that_spills_gets_the_blocks_planned(tmp_path: Path, layers: int, gpu_memory: str, length: int) -> None:
    model = make_llama(tmp_path, layers=layers)
    made = planned(model, gpu_memory=gpu_memory, max_model_len=length)
    way = made.recommended
    assert way is not None and way.name == "KV spilled to RAM"
    block_bytes = way.geometry.bytes_per_block
    with started(made, model) as running:
        spilled = running.spill_worker.geometry.num_spilled
        assert spilled * block_bytes == way.kv.spilled_bytes > 0
        # As it starts; later, GPU blocks have memory of the window's by turns.
        assert running.spill.placement.num_resident * block_bytes == way.kv.resident_bytes > 0
        assert running.spill_worker.buffer.mapped_bytes == way.kv.resident_bytes + way.kv.window_bytes
        assert len(running.ask_one(random_prompt(1, length - 8), max_tokens=4).tokens) == 4
    least = made.facts.weights.total_bytes + way.kv.device_bytes
    assert least <= made.budget.limit_bytes.value < least + 2 * granularity() * way.geometry.num_regions + block_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_plan_that_fits_gets_the_blocks_planned(models: Models, name: str) -> None:
    made = planned(models(name), gpu_memory="40MiB", max_model_len=8192)
    way = made.recommended
    assert way is not None and way.name == "everything on the GPU"
    with started(made, models(name)) as running:
        assert num_blocks(running) * way.geometry.bytes_per_block == way.kv.resident_bytes
        assert running.vllm_scheduler.connector is None
        assert len(running.ask_one(random_prompt(2, 8000), max_tokens=4).tokens) == 4


def test_idle_kv_gets_the_ram_it_was_given(models: Models) -> None:
    made = planned(models("llama"), gpu_memory="8MiB", max_model_len=4096, offload_ram="64MiB")
    assert made.recommended is not None and made.recommended.offload_bytes == 64 << 20
    arguments = vllm_args(made, made.recommended)
    sizes = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert sizes == {"host_bytes": 64 << 20, "spill_bytes": made.recommended.kv.spilled_bytes}
    with started(made, models("llama")) as running:
        assert running.scheduler.host.num_slots == (64 << 20) // made.recommended.geometry.bytes_per_block


@pytest.mark.parametrize(("given", "loads"), [("", True), ("store=eager", False)])
def test_a_pool_smaller_than_the_gpus_holds_what_it_drops(models: Models, given: str, loads: bool) -> None:
    """Prompts that together are larger than the KV cache: the first one comes back when others have pushed it out.
    Copies of what the cache still had were all that an eager pool of that size held."""
    made = planned(
        models("llama"),
        gpu_memory="14MiB",
        max_model_len=2048,
        offload_ram="5MiB",
        kv_options=given or None,
        max_num_batched_tokens=256,
    )
    way = made.recommended
    assert way is not None and way.name == "everything on the GPU" and way.offload_bytes < way.kv.resident_bytes
    length = 1536
    on_gpu = way.kv.resident_bytes // way.geometry.request_bytes(length)
    with started(made, models("llama")) as running:
        first, *others = (random_prompt(seed, length) for seed in range(on_gpu + 1))
        answer = running.ask_one(first)
        for prompt in others:
            running.ask_one(prompt)
        again = running.ask_one(first)
        assert again.tokens == answer.tokens
        assert (running.metric("hit_tokens") > 0) == loads


def test_the_engine_refuses_one_token_beyond_the_longest_context(models: Models) -> None:
    """The longest context comes from the same arithmetic as the engine's own check."""
    tight: dict[str, Any] = {"gpu_memory": "6MiB", "max_model_len": 32768}
    refused = planned(models("llama"), **tight)
    length = refused.longest_context
    assert refused.recommended is None and 2048 <= length < 32768
    longest = planned(models("llama"), gpu_memory="6MiB", max_model_len=length)
    with started(longest, models("llama")) as running:
        assert len(running.ask_one(random_prompt(3, 1000), max_tokens=2).tokens) == 2
    assert planned(models("llama"), gpu_memory="6MiB", max_model_len=length + 1).recommended is None
    with (
        # Of the memory planned not a block is left, so the longer block tables already are too much.
        pytest.raises(OverspillError, match=r"needs a window|Longest that fits"),
        started(replace(longest, max_model_len=length + 1), models("llama")),
    ):
        pass


def test_the_platform_is_described_as_it_is() -> None:
    assert CPU.granularity == granularity()
