"""vLLM's real scheduler, Overspill's real scheduler and worker sides, and a model made of bookkeeping.

Nothing is computed and no bytes move. A KV slot holds a number that stands for every token up to its position (and for
the weights it was computed with), so that "the right content" can be compared instead of believed. Copies are played
by `simulated_copies`.
"""

import json
import tempfile
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from overspill.kv.jobs import StepReport
from overspill.kv.options import Options
from overspill.kv.provenance import requests_with_kv
from overspill.kv.scheduler import OffloadScheduler
from overspill.kv.worker import OffloadWorker
from tests.simulated_copies import BLOCK_BYTES, ScriptedCopier, Setup, Violation, require

MAX_MODEL_LEN = 64


@dataclass
class EventReader:
    """What somebody who only reads KV events believes to be in RAM."""

    in_ram: set[tuple[Any, int]] = field(default_factory=set)

    def publish(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if getattr(event, "medium", None) != "CPU":
                continue
            keys = {(h, event.group_idx) for h in event.block_hashes}
            if isinstance(event, BlockStored):
                self.in_ram |= keys
            elif isinstance(event, BlockRemoved):
                self.in_ram -= keys


class Engine:
    """Steps as vLLM's engine core does and checks, after every step, what must hold."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._config = _vllm_config(setup)
        self._kv_config = _kv_cache_config(setup)
        block_size, self._hash_size = resolve_kv_cache_block_sizes(self._kv_config, self._config)
        self.scheduler = (AsyncScheduler if setup.asynchronous else Scheduler)(
            vllm_config=self._config, kv_cache_config=self._kv_config, log_stats=True,
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=block_size, hash_block_size=self._hash_size,
        )  # fmt: skip
        self.events = self.scheduler.kv_event_publisher = EventReader()
        options = Options.parse(self._config.kv_transfer_config.kv_connector_extra_config)
        self.copiers = [ScriptedCopier(setup, rank) for rank in range(setup.ranks)]
        self.workers = []
        for copier in self.copiers:
            worker = OffloadWorker(options, self._config, self._kv_config)
            worker._copier, worker.checksums = copier, copier  # type: ignore[assignment]
            worker.idle_wait_s = 0.0
            worker.load_bytes_per_s = 1e12 if setup.ahead else 0.0
            self.workers.append(worker)
        self._aggregator = KVOutputAggregator(setup.ranks)
        self.link_seems_slow = setup.load == "auto" and setup.seed % 2 == 0 and not setup.ahead
        if setup.load == "auto":
            # Ten tokens a millisecond, and more are worth a load, or nothing seems to be.
            self.offload.speeds.load_bytes_per_s = 1.0 if self.link_seems_slow else 1e12
            self.offload.speeds.prefill_tokens_per_s = 1e4
            self.offload.loads.probe_after = 1  # or few sequences would be long enough
        self._hasher = get_request_block_hasher(self._hash_size, _hash_function())
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.requests: dict[str, Request] = {}
        self._tokens: dict[str, list[int]] = {}  # as the workers know them: sampled ones included at once
        self._epoch = 0
        self._epochs: dict[str, int] = {}  # of requests that began with other weights
        self._children: dict[tuple[int, int], int] = {}
        self._chains: dict[str, list[int]] = {}
        self._prefixes: dict[bytes, tuple[list[int], int]] = {}  # block hash -> tokens, end
        self._expected: dict[tuple[bytes, int], list[int]] = {}
        self.steps = 0
        self.totals: dict[str, float] = {}
        self.announced_ahead = {"busy": 0, "idle": 0}  # loads, before they were over

    @property
    def offload(self) -> OffloadScheduler:
        return self.scheduler.connector.scheduler

    # What can happen.

    def add(self, prompt: list[int], max_tokens: int, priority: int = 0) -> str:
        name = f"r{len(self.requests)}"
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False)
        parameters.update_from_generation_config({}, eos_token_id=2)
        request = self.requests[name] = Request(
            request_id=name, prompt_token_ids=prompt, sampling_params=parameters, pooling_params=None,
            block_hasher=self._hasher, priority=priority, arrival_time=float(len(self.requests)),
        )  # fmt: skip
        self._tokens[name] = list(prompt)
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.check()

    def reset(self, *, running: bool, connector: bool) -> None:
        """As an RLHF loop does after new weights: whatever it says it has reset must never be seen again."""
        self.settle()
        try:
            done = self.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError:
            require(self._holds_blocks(), "vLLM could not reset although no copy was under way")
            done = False
        if done and (connector or not self.setup.keep_on_reset):
            self._epoch += 1
            self._epochs.clear()
            self._chains.clear()
            self._expected.clear()
        self.check()

    def forget_gpu(self) -> None:
        """Empty the GPU's prefix cache, but not RAM."""
        self.settle()
        self.scheduler.kv_cache_manager.block_pool.evict_blocks(set(range(1, self.setup.gpu_blocks)))

    def change_weights(self) -> None:
        """Requests that have KV go on with it; what they compute is of neither weights."""
        have_kv = requests_with_kv(self.scheduler)
        for name in have_kv:
            self._epochs.setdefault(name, self._epoch)
        self._epoch += 1
        self._chains = {name: chain for name, chain in self._chains.items() if name in self._epochs}
        self._expected.clear()
        self.scheduler.connector.weights_changed("a test", have_kv)
        self.check()

    def _starts_again(self, names: Iterable[str]) -> None:
        for name in names:
            if self._epochs.pop(name, None) is not None:
                self._chains.pop(name, None)

    def reset_connector(self) -> None:
        self.scheduler.reset_connector_cache()
        require(self.offload.host.num_cached == 0, "content was found in RAM after a reset")
        self.check()

    def damage(self, which: int, *, every_rank: bool) -> None:
        """Bits flip in a block that nobody is reading."""
        busy = {slot for copier in self.copiers for transfer in copier.under_way for slot in transfer.slots}
        slots = [b.block_id - 1 for b in self._host_blocks() if b.block_hash is not None and b.block_id - 1 not in busy]
        if slots:
            for copier in self.copiers if every_rank else self.copiers[:1]:
                copier.damage(slots[which % len(slots)])

    def step(self) -> None:
        self.steps += 1
        output = self.scheduler.schedule()
        self._starts_again(output.preempted_req_ids or ())
        answers = [
            self._run_worker(worker, copier, output) for worker, copier in zip(self.workers, self.copiers, strict=True)
        ]
        answer = self._aggregator.aggregate(answers)  # type: ignore[arg-type]
        assert answer is not None
        self._in_flight.append((output, answer))
        full = len(self._in_flight) == (2 if self.setup.asynchronous else 1)
        if full or not (output.num_scheduled_tokens or self.scheduler.has_requests()):
            self._take_one_back()
        self.check()

    def settle(self) -> None:
        """Wait for steps in flight, not for copies."""
        while self._in_flight:
            self._take_one_back()

    def drain(self, limit: int = 600) -> None:
        """Step until the engine would go to sleep, then look for what was left behind."""
        for _ in range(limit):
            self.settle()
            if not self.scheduler.has_requests():
                break
            self.step()
        else:
            raise Violation(
                f"still busy after {limit} steps: {[r.request_id for r in self.scheduler.requests.values()]}"
            )
        for request in self.requests.values():
            if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                self._check_answer(request)
        self._check_nothing_left()

    # One step of the workers.

    def _run_worker(self, worker: OffloadWorker, copier: ScriptedCopier, output: SchedulerOutput) -> ModelRunnerOutput:
        jobs = output.kv_connector_metadata
        worker.begin_step(jobs)
        sampled = self._forward(copier, output)
        worker.end_step(jobs)
        copier.tick()
        under_way = {load.job.request_id for load in worker._loads if not load.transfer.done()}
        results = worker.results(jobs)
        ahead = under_way & (results.finished_recving - results.failed_recving)
        self.announced_ahead["busy" if output.num_scheduled_tokens else "idle"] += len(ahead)
        reported = KVConnectorOutput(
            finished_recving=results.finished_recving or None, failed_recving=results.failed_recving,
            kv_connector_stats=worker.take_stats(), kv_connector_worker_meta=_report(worker),
        )  # fmt: skip
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled,
            kv_connector_output=reported,
        )  # fmt: skip

    def _forward(self, copier: ScriptedCopier, output: SchedulerOutput) -> list[list[int]]:
        """Write the scheduled positions, then read everything attention would read."""
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in output.num_scheduled_tokens}
        reads: list[tuple[str, int, int, int, int]] = []
        sampled: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            chain = self._chain(name, end)
            for group, (size, window) in enumerate(self.setup.groups):
                for position in range(end - count, end):
                    block = tables[name][group][position // size]
                    require(block != 0, f"{name} writes position {position} of group {group} into the null block")
                    copier.gpu[block][position % size] = self._content(chain[position], group)
                first = max(0, end - count - window + 1) if window else 0
                reads.append((name, group, size, first, end))
            sampled.append([] if request.is_prefill_chunk else [self._sample(name, end)])
        for name, group, size, first, end in reads:
            chain = self._chains[name]
            for position in range(first, end):
                block = tables[name][group][position // size]
                require(
                    block != 0 and copier.gpu[block][position % size] == self._content(chain[position], group),
                    f"{name} reads what is not its own at position {position} of group {group} (block {block})",
                )
        return sampled

    def _sample(self, name: str, end: int) -> int:
        token = _sampled(self._chain_of(self._tokens[name][:end], 0)[-1])
        self._tokens[name] = [*self._tokens[name][:end], token]
        return token

    def _take_one_back(self) -> None:
        output, answer = self._in_flight.popleft()
        # Until the scheduler has heard of it, weights may change once more, and the request still holds KV.
        self._starts_again(answer.kv_connector_output.failed_recving or ())
        for outputs in self.scheduler.update_from_output(output, answer).values():
            self._check_stats(outputs.scheduler_stats)
        report = answer.kv_connector_output.kv_connector_worker_meta
        for slot in report.corrupt_slots if report is not None else ():
            found = self.offload.host.pool.blocks[slot + 1].block_hash
            require(found is None, "a block that was found corrupt can be found again")

    # Content.

    def _chain_of(self, tokens: list[int], epoch: int) -> list[int]:
        """For every position, the number of the prefix that ends there."""
        chain, last = [], -epoch - 1
        for token in tokens:
            last = self._children.setdefault((last, token), len(self._children))
            chain.append(last)
        return chain

    def _chain(self, name: str, end: int) -> list[int]:
        chain = self._chains.get(name, [])
        if len(chain) < end:
            chain = self._chains[name] = self._chain_of(self._tokens[name][:end], self._epochs.get(name, self._epoch))
        return chain

    def _content(self, prefix: int, group: int) -> int:
        return prefix * len(self.setup.groups) + group

    def _learn_hashes(self) -> None:
        for request in self.requests.values():
            for i, block_hash in enumerate(request.block_hashes):
                if block_hash not in self._prefixes:
                    end = (i + 1) * self._hash_size
                    self._prefixes[block_hash] = (list(request.all_token_ids[:end]), end)

    def _belongs(self, key: BlockHashWithGroupId) -> list[int]:
        """What a block must hold, at its beginning, that is found under this hash."""
        block_hash, group = get_block_hash(key), get_group_id(key)
        if (block_hash, group) not in self._expected:
            if block_hash not in self._prefixes:
                self._learn_hashes()
            tokens, end = self._prefixes[block_hash]
            size = self.setup.groups[group][0]
            chain = self._chain_of(tokens, self._epoch)
            self._expected[block_hash, group] = [
                self._content(prefix, group) for prefix in chain[(end - 1) // size * size : end]
            ]
        return self._expected[block_hash, group]

    # What must hold.

    def check(self) -> None:
        gpu, host = self.scheduler.kv_cache_manager.block_pool, self.offload.host.pool
        free_gpu, free_host = _check_pool(gpu, "GPU"), _check_pool(host, "RAM")
        loading: set[int] = set()
        for copier in self.copiers:
            for transfer in copier.under_way:
                what = "load" if transfer.loads else "store"
                for block in transfer.blocks:
                    require(
                        gpu.blocks[block].ref_cnt > 0 and block not in free_gpu, f"GPU block freed during its {what}"
                    )
                for slot in transfer.slots:
                    require(
                        host.blocks[slot + 1].ref_cnt > 0 and slot + 1 not in free_host,
                        f"RAM block freed during its {what}",
                    )
                if transfer.loads:
                    loading.update(transfer.blocks)
        self._check_content(gpu, host, loading)
        require(len(_cached(host)) == self.offload.host.num_cached, "the same content is in RAM twice")
        offload = self.offload
        require(
            min(offload.loads.num_blocks, offload.stores.num_blocks, 0) == 0,
            "negative count",
        )

    def _check_content(self, gpu: BlockPool, host: BlockPool, loading: set[int]) -> None:
        for copier in self.copiers:
            for key, block in _cached(gpu):
                if block not in loading:
                    expected = self._belongs(key)
                    held = copier.gpu[block][: len(expected)]
                    require(held == expected, f"GPU block {block} is found by a hash that is not its content's")
            for key, block in _cached(host):
                if block - 1 not in copier.damaged:
                    expected = self._belongs(key)
                    held = copier.host[block - 1][: len(expected)]
                    require(held == expected, f"RAM block {block} is found by a hash that is not its content's")

    def _check_stats(self, stats: Any) -> None:
        if stats is None:
            return
        for name, value in (stats.kv_connector_stats or {}).get("data", stats.kv_connector_stats or {}).items():
            if isinstance(value, int | float):
                require(value >= 0, f"{name} went to {value}")
                self.totals[name] = self.totals.get(name, 0) + value
        for seen in (stats.prefix_cache_stats, stats.connector_prefix_cache_stats):
            if seen is not None:
                require(0 <= seen.hits <= seen.queries, f"{seen.hits} hits of {seen.queries} queried tokens")

    def _check_answer(self, request: Request) -> None:
        tokens = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            require(token == _sampled(self._chain_of(tokens, 0)[-1]), f"{request.request_id} got another token")
            tokens.append(token)

    def _check_nothing_left(self) -> None:
        gpu, offload = self.scheduler.kv_cache_manager.block_pool, self.offload
        require(gpu.get_num_free_blocks() == self.setup.gpu_blocks - 1, "GPU blocks leaked")
        require(not [b for b in self._host_blocks() if b.ref_cnt], "RAM blocks leaked")
        require(not self.scheduler.connector.has_pending_push_work(), "the connector would keep an idle engine awake")
        for owner, names in (
            (offload, ("_local_tokens", "live")),
            (self.scheduler.connector._stale_hashes, ("_owners", "_mixed")),
            (
                offload.loads,
                ("_hits", "_unloadable", "_failed", "_to_requeue", "_planned", "_heads", "in_flight", "num_blocks"),
            ),
            (offload.stores, ("_incomplete", "_offered", "_deferred", "_ready", "_keys", "in_flight", "num_blocks")),
        ):
            for name in names:
                left = getattr(owner, name)
                require(not left, f"{name} remembers {left} of requests that are gone")
        in_ram = {
            (maybe_convert_block_hash(get_block_hash(b.block_hash)), get_group_id(b.block_hash))
            for b in self._host_blocks()
            if b.block_hash is not None
        }
        self.events.publish(KVEventBatch(ts=0.0, events=list(self.scheduler.connector.take_events())))
        require(self.events.in_ram == in_ram, "KV events tell of other content in RAM than there is")
        require(len(in_ram) == offload.host.num_cached, "RAM counts blocks that it does not hold")
        taken = offload.host.allocate(self.setup.host_slots + 1)
        require(
            len(taken) == self.setup.host_slots, f"only {len(taken)} of {self.setup.host_slots} idle slots can be had"
        )

    def _holds_blocks(self) -> bool:
        waiting = any(r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in self.scheduler.requests.values())
        return (
            waiting
            or bool(self.offload.stores.in_flight or self.offload.loads.in_flight)
            or len(self.scheduler.requests) > 0
        )

    def _host_blocks(self) -> list[KVCacheBlock]:
        return self.offload.host.pool.blocks[1:]


def _check_pool(pool: BlockPool, name: str) -> set[int]:
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    idle = {block.block_id for block in pool.blocks[1:] if block.ref_cnt == 0}
    require(all(block.ref_cnt >= 0 for block in pool.blocks[1:]), f"{name}: a reference was dropped twice")
    require(len(free) == len(set(free)) == pool.get_num_free_blocks(), f"{name}: free blocks are miscounted")
    require(set(free) == idle, f"{name}: free {sorted(free)}, without references {sorted(idle)}")
    return set(free)


def _cached(pool: BlockPool) -> list[tuple[BlockHashWithGroupId, int]]:
    """All that a lookup can find."""
    found = pool.cached_block_hash_to_block._cache.items()
    return [(key, b.block_id) for key, some in found for b in (some.values() if isinstance(some, dict) else [some])]


def _sampled(prefix: int) -> int:
    """The model: few different tokens, so that conversations meet again."""
    return 10 + prefix * 7919 % 3


@cache
def _hash_function() -> Any:
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return function


@cache
def _base_config() -> VllmConfig:
    folder = Path(tempfile.mkdtemp(prefix="overspill-shape-"))
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 128, "max_position_embeddings": MAX_MODEL_LEN, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
        max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=True,
    ).create_engine_config()  # fmt: skip


def _vllm_config(setup: Setup) -> VllmConfig:
    config = _base_config()
    config.cache_config.block_size = setup.groups[0][0]
    config.cache_config.num_gpu_blocks = setup.gpu_blocks
    config.scheduler_config.max_num_batched_tokens = setup.batched_tokens
    config.scheduler_config.long_prefill_token_threshold = setup.chunk_tokens
    config.scheduler_config.max_num_seqs = setup.max_seqs
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.scheduler_config.policy = setup.policy
    config.parallel_config.world_size = setup.ranks
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OverspillConnector", kv_connector_module_path="overspill.kv.connector", kv_role="kv_both",
        kv_connector_extra_config={
            "host_bytes": setup.host_slots * BLOCK_BYTES * setup.ranks, "reserve_bytes": 0, "store": setup.store,
            "eviction": setup.eviction, "load": setup.load, "verify": "all", "keep_on_reset": setup.keep_on_reset,
        },
    )  # fmt: skip
    return config


def _kv_cache_config(setup: Setup) -> KVCacheConfig:
    groups, tensors = [], []
    for index, (size, window) in enumerate(setup.groups):
        shape: dict[str, Any] = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        spec: KVCacheSpec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
        layers = [f"model.layers.{index}.self_attn.attn"]
        groups.append(KVCacheGroupSpec(layers, spec))
        tensors.append(KVCacheTensor(BLOCK_BYTES * setup.gpu_blocks, layers, BLOCK_BYTES, BLOCK_BYTES))
    return KVCacheConfig(
        num_blocks=setup.gpu_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_cache_layout="BLNHC"
    )


def _report(worker: OffloadWorker) -> StepReport | None:
    report = StepReport()
    worker.report(report)
    return None if report.is_empty() else report
