"""What each connector adds to one scheduler step, in microseconds; runs without a GPU.

Real vLLM scheduler, real connectors in the SCHEDULER role; only the model and the worker are
played by this script: every running request gets one token per step, and every transfer is
reported complete one step after it was ordered. Three scenarios:

    decode     every request decodes; none ends. Eager stores what is filled, lazy has nothing to do.
    turnover   one request ends and one of 512 tokens begins in every step, so that blocks are freed,
               come near eviction and are evicted all the time: lazy's work.
    herd       all requests wait for one prefix of 100k tokens that is being loaded for the first of them, and ask
               for it in every step. With Overspill only.

    python benchmarks/scheduler_cost.py --running 64 256
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import numpy as np

import record
import shapes
from markdown_tables import SCHEDULER_CALLS
from record import Json, say
from systems import DEFAULT_SYSTEMS, System, system

BLOCK_TOKENS = 16
HOOKS = ("build_connector_meta", "update_connector_output", "get_kv_connector_stats", "take_events")
SCENARIOS = ("decode", "turnover", "herd")
FILLER_TOKENS = 4096
MAX_MODEL_LEN = 8192
HERD_TOKENS = 100_000


class Clock:
    """Collects the CPU seconds of wrapped calls, one sum per step. Other work on the machine does not count."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self._step[name] += time.thread_time() - began

        setattr(owner, name, timed)

    def end_step(self) -> None:
        self.steps.append(dict(self._step))
        self._step.clear()

    def restart(self) -> None:
        self.steps.clear()
        self._step.clear()


class Worker:
    """Stands in for the worker side: completes in step n+1 what the scheduler ordered in step n."""

    def __init__(self, connector: Any) -> None:
        self._report = REPORTS[type(connector).__name__]
        self._due: Any = None
        self.transfers = 0

    def step(self, metadata: Any) -> Any:
        """What the worker tells the scheduler in this step, given this step's orders."""
        from vllm.v1.outputs import KVConnectorOutput

        done, self._due = self._due, self._report(metadata)
        self.transfers += done is not None
        return KVConnectorOutput(kv_connector_worker_meta=done) if done is not None else None


def _report_none(metadata: Any) -> Any:
    return None


def _report_simple(metadata: Any) -> Any:
    from vllm.v1.simple_kv_offload.metadata import INVALID_JOB_ID, SimpleCPUOffloadWorkerMetadata

    if metadata.store_event == INVALID_JOB_ID:
        return None
    return SimpleCPUOffloadWorkerMetadata(completed_store_events={metadata.store_event: 1})


def _report_native(metadata: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

    jobs = {job: 1 for job in (*metadata.store_jobs, *metadata.load_jobs)}
    return OffloadingWorkerMetadata(completed_jobs=jobs) if jobs else None


def _report_overspill(metadata: Any) -> Any:
    from overspill.kv.jobs import StepReport

    stored = {job.job_id: 1 for job in metadata.stores}
    return StepReport(stored=stored) if stored else None


REPORTS: dict[str, Callable[[Any], Any]] = {
    "NoneType": _report_none,
    "SimpleCPUOffloadConnector": _report_simple,
    "OffloadingConnector": _report_native,
    "OverspillConnector": _report_overspill,
}


def make_scheduler(
    model: Path, target: System, running: int, num_blocks: int, max_model_len: int = MAX_MODEL_LEN
) -> Any:
    """vLLM's scheduler as its engine core builds it, for a Llama with one full-attention group."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.structured_output import StructuredOutputManager

    transfer = KVTransferConfig(**target.kv_transfer_config) if target.kv_transfer_config else None
    vllm_config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
        max_model_len=max_model_len, max_num_seqs=running, max_num_batched_tokens=8192,
        enable_prefix_caching=True, kv_transfer_config=transfer, disable_log_stats=False,
    ).create_engine_config()  # fmt: skip
    # The CPU platform insists on 128; the scheduler's cost is wanted for CUDA's 16.
    vllm_config.cache_config.block_size = BLOCK_TOKENS
    vllm_config.cache_config.num_gpu_blocks = num_blocks

    shape = vllm_config.model_config.hf_config
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=shape.num_key_value_heads,
        head_size=shape.hidden_size // shape.num_attention_heads, dtype=torch.bfloat16,
    )  # fmt: skip
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(shape.num_hidden_layers)]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * num_blocks * len(layers),
        layers=layers,
        layer_stride=page,
        block_stride=page * len(layers),
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        kv_cache_layout="BLNHC", hash_block_size=BLOCK_TOKENS, cache_hit_alignment_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return Scheduler(
        vllm_config=vllm_config, kv_cache_config=kv_cache_config, log_stats=True,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size, hash_block_size=hash_block_size,
    )  # fmt: skip


class Driver:
    """Steps a scheduler as the engine core does, with a model that answers at once."""

    def __init__(self, scheduler: Any, seed: int) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self._random = np.random.default_rng(seed)
        self._names = (f"request-{i}" for i in itertools.count())
        self.scheduler = scheduler
        self.worker = Worker(scheduler.connector)

    def add(self, prompt_tokens: int, max_tokens: int, prefix: Sequence[int] = ()) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False)
        parameters.update_from_generation_config({}, eos_token_id=2)
        prompt = [*prefix, *self._random.integers(1000, 100_000, prompt_tokens).tolist()]
        self.scheduler.add_request(
            Request(
                request_id=next(self._names),
                prompt_token_ids=prompt,
                sampling_params=parameters,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        scheduled = list(output.num_scheduled_tokens)
        sampled = [[int(token)] for token in self._random.integers(1000, 100_000, len(scheduled))]
        for i, name in enumerate(scheduled):
            request = self.scheduler.requests[name]
            # A prompt that is not through yet yields no token in this step.
            if request.num_computed_tokens < request.num_prompt_tokens:
                sampled[i] = []
        reported = self.worker.step(output.kv_connector_metadata) if self.scheduler.connector else None
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=scheduled,
                req_id_to_index={name: i for i, name in enumerate(scheduled)},
                sampled_token_ids=sampled,
                kv_connector_output=reported,
            ),
        )


def measure(
    model: Path, name: str, scenario: str, running: int, settings: argparse.Namespace
) -> tuple[list[dict[str, float]], int]:
    """Seconds per step and call, and in how many of those steps a transfer was reported complete."""
    steps = settings.warm_steps + settings.steps
    longest = settings.prompt_tokens + BLOCK_TOKENS + steps + running
    # A third more than the running requests need; the rest holds blocks of finished requests, so that
    # every block allocated evicts one.
    num_blocks = running * (longest // BLOCK_TOKENS + 1) * 4 // 3 + FILLER_TOKENS // BLOCK_TOKENS
    block_bytes = BLOCK_TOKENS * shapes.kv_bytes_per_token(model)
    target = system(name, int(settings.host_ratio * num_blocks * block_bytes))
    scheduler = make_scheduler(model, target, running, num_blocks)
    driver = Driver(scheduler, settings.seed)
    fill_cache(driver, num_blocks)
    admit(driver, running, settings.prompt_tokens)
    if scenario == "turnover":
        stagger_ends(driver)

    clock = Clock()
    for owner, names in ((scheduler, SCHEDULER_CALLS), (scheduler.connector, HOOKS)):
        for call in names if owner is not None else ():
            clock.wrap(owner, call)

    def step() -> None:
        if scenario == "turnover":
            for _ in range(running - len(scheduler.requests)):
                driver.add(settings.prompt_tokens, max_tokens=running)
        driver.step()
        clock.end_step()

    for _ in range(settings.warm_steps):
        step()
    clock.restart()
    transfers_before = driver.worker.transfers
    # The engine core freezes its heap too: collections of what start-up made are not a step's cost.
    gc.collect()
    gc.freeze()
    for _ in range(settings.steps):
        step()
    gc.unfreeze()
    if len(scheduler.running) < running - 1:
        raise RuntimeError(f"{len(scheduler.running)} of {running} requests still ran at the end")
    return clock.steps, driver.worker.transfers - transfers_before


def measure_herd(model: Path, name: str, running: int, settings: argparse.Namespace) -> list[dict[str, float]]:
    num_blocks = 2 * HERD_TOKENS // BLOCK_TOKENS
    block_bytes = BLOCK_TOKENS * shapes.kv_bytes_per_token(model)
    # Whatever the link: the requests are to wait for a load.
    target = system(name, int(settings.host_ratio * num_blocks * block_bytes), {"load": "always"})
    scheduler = make_scheduler(model, target, running, num_blocks, max_model_len=HERD_TOKENS + 2 * BLOCK_TOKENS)
    driver = Driver(scheduler, settings.seed)
    prefix = np.random.default_rng(settings.seed).integers(1000, 100_000, HERD_TOKENS).tolist()
    for _ in range(2):  # lazy stores what is used again
        driver.add(1, 1, prefix)
        while scheduler.has_requests():
            driver.step()
    scheduler.kv_cache_manager.block_pool.evict_blocks(set(range(1, num_blocks)))
    for _ in range(running):
        driver.add(1, 1, prefix)
    driver.step()  # the load begins, and is never reported complete
    clock = Clock()
    clock.wrap(scheduler, "schedule")
    for call in ("get_num_new_matched_tokens", *HOOKS):
        clock.wrap(scheduler.connector, call)
    for _ in range(settings.steps // 4):
        driver.step()
        clock.end_step()
    if scheduler.running or not scheduler.connector.scheduler.loads.in_flight:
        raise RuntimeError("nobody waited for a load")
    return clock.steps


def fill_cache(driver: Driver, num_blocks: int) -> None:
    """Leave the GPU's free queue full of hashed blocks."""
    for _ in range(num_blocks * BLOCK_TOKENS // FILLER_TOKENS + 1):
        driver.add(FILLER_TOKENS, max_tokens=1)
    while driver.scheduler.has_unfinished_requests():
        driver.step()


def admit(driver: Driver, running: int, prompt_tokens: int) -> None:
    """Get `running` requests past their prompts, their block boundaries spread over the steps."""
    for i in range(running):
        driver.add(prompt_tokens + i % BLOCK_TOKENS, max_tokens=MAX_MODEL_LEN - prompt_tokens - BLOCK_TOKENS)
    while any(r.num_computed_tokens < r.num_prompt_tokens for r in driver.scheduler.requests.values()):
        driver.step()


def stagger_ends(driver: Driver) -> None:
    """Let one running request end per step from here on."""
    for i, request in enumerate(driver.scheduler.running):
        request.max_tokens = request.num_output_tokens + i + 1


def summarise(steps: Sequence[dict[str, float]]) -> Json:
    names = sorted({name for step in steps for name in step})
    return {
        name: {
            "median": 1e6 * statistics.median(step.get(name, 0.0) for step in steps),
            "mean": 1e6 * statistics.fmean(step.get(name, 0.0) for step in steps),
            "p99": 1e6 * record.percentile([step.get(name, 0.0) for step in steps], 99),
        }
        for name in names
    }


def connector_microseconds(steps: Sequence[dict[str, float]]) -> float:
    """Everything the connector was called for in a median step."""
    return 1e6 * statistics.median(sum(s for call, s in step.items() if call not in SCHEDULER_CALLS) for step in steps)


def row(steps: Sequence[dict[str, float]], transfers: int) -> Json:
    return {
        "steps": len(steps),
        "steps_with_finished_transfers": transfers,
        "connector_microseconds": connector_microseconds(steps),
        "microseconds": summarise(steps),
    }


def print_table(rows: Sequence[Json]) -> None:
    columns = f"{'connector µs':>13} {'its mean':>9} {'schedule µs':>12} {'update µs':>10}"
    print(f"{'scenario':9} {'running':>7} {'system':24} {columns}")
    for line in rows:
        place = f"{line['scenario']:9} {line['running']:>7} {line['system']:24}"
        if "error" in line:
            print(f"{place} {line['error']}")
            continue
        times = line["microseconds"]
        # Work that comes in bursts is in the mean and not in the median.
        mean = sum(times[call]["mean"] for call in times if call not in SCHEDULER_CALLS)
        own = [times.get(call, {}).get("median", 0.0) for call in SCHEDULER_CALLS]
        print(f"{place} {line['connector_microseconds']:>13.0f} {mean:>9.0f} {own[0]:>12.0f} {own[1]:>10.0f}")


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--systems", nargs="+", default=[*DEFAULT_SYSTEMS, "native-decode"])
    parser.add_argument("--scenarios", nargs="+", default=SCENARIOS, choices=SCENARIOS)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=2, help="fresh schedulers per row, in turns; steps are pooled")
    parser.add_argument("--steps", type=int, default=200, help="timed steps per round")
    parser.add_argument("--warm-steps", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--host-ratio", type=float, default=1.5, help="host pool over GPU cache, in blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def measure_row(model: Path, scenario: str, running: int, settings: argparse.Namespace) -> list[Json]:
    """One row per system; the systems take turns, so that a slow minute of the machine hits all of them."""
    systems = [name for name in settings.systems if scenario != "herd" or name.startswith("overspill")]
    pooled: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    transfers = dict.fromkeys(systems, 0)
    errors: dict[str, str] = {}
    for round_number in range(settings.rounds):
        for name in [name for name in systems if name not in errors]:
            say(f"{scenario}, {running} running, round {round_number + 1}: {name}")
            try:
                if scenario == "herd":
                    steps, finished = measure_herd(model, name, running, settings), 0
                else:
                    steps, finished = measure(model, name, scenario, running, settings)
            except Exception as error:
                # One connector that cannot be driven here must not cost the others their numbers.
                errors[name] = f"{type(error).__name__}: {error}"
                continue
            pooled[name] += steps
            transfers[name] += finished
    rows = []
    for name in systems:
        place = {"scenario": scenario, "running": running, "system": name}
        rows.append(place | ({"error": errors[name]} if name in errors else row(pooled[name], transfers[name])))
    return rows


def main() -> None:
    settings = parse_arguments()
    out = settings.out or record.default_path("scheduler-cost")
    result = record.header("scheduler-cost", record.settings(settings)) | {"rows": []}
    # A scheduler counts blocks, not bytes: with one layer a pool for 256 requests fits any machine.
    model = shapes.llama_3_1_8b(num_hidden_layers=1)
    for scenario in settings.scenarios:
        for running in settings.running:
            result["rows"] += measure_row(model, scenario, running, settings)
            record.write(out, result)
    print_table(result["rows"])
    say(f"written to {out}")


if __name__ == "__main__":
    main()
