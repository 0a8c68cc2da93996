"""The vLLM internals that Overspill uses: names, and every place where Overspill changes vLLM's behaviour.

`overspill.kv.contract` lists what must exist, and is compared with the installed vLLM before this module is imported.
"""
# ruff: noqa: F401  # names that other modules use as they are

import copy
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    _estimate_max_model_len_from_groups,
    _max_memory_usage_bytes_from_groups,
    _pool_bytes_per_block,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_kv_cache_groups,
    get_none_hash_seed,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from overspill.kv.contract import Method, wrap_once
from overspill.kv.errors import OverspillError

# Blocks and their hashes.


def watch_full_blocks(
    pool: BlockPool, on_full: Callable[[Request, list[KVCacheBlock], int, int, int, int], None]
) -> None:
    """Report blocks that become full: the request, all its blocks, start and end index of the full ones, the block size
    in tokens, and the group.

    vLLM hashes blocks when it schedules the step that fills them. Hooking the method that does so makes the cost of a
    step depend on the blocks it fills, not on the requests it runs.
    """
    cache_full_blocks = pool.cache_full_blocks

    def watched(**given: Any) -> None:
        cache_full_blocks(**given)
        on_full(
            given["request"], given["blocks"], given["num_cached_blocks"], given["num_full_blocks"],
            given["block_size"], given["kv_cache_group_id"],
        )  # fmt: skip

    pool.cache_full_blocks = watched


def watch_partial_blocks(pool: BlockPool, on_partial: Callable[[Request, KVCacheBlock, int], None]) -> None:
    """Report blocks that are hashed before they are full, with the length of the hashed prefix in tokens."""
    cache_partial_block = pool.cache_partial_block

    def watched(request: Request, block: KVCacheBlock, num_tokens: int, **kwargs: Any) -> Any:
        key = cache_partial_block(request=request, block=block, num_tokens=num_tokens, **kwargs)
        on_partial(request, block, num_tokens)
        return key

    pool.cache_partial_block = watched


def reset_with_prefix_cache(pool: BlockPool, reset: Callable[[], bool]) -> None:
    """Call `reset` whenever vLLM has reset its prefix cache."""
    reset_prefix_cache = pool.reset_prefix_cache
    pool.reset_prefix_cache = lambda: reset_prefix_cache() and reset()


def watch_new_blocks(pool: BlockPool, on_taken: Callable[[int], None]) -> None:
    """Report the number of blocks before each allocation."""
    get_new_blocks = pool.get_new_blocks

    def watched(num_blocks: int) -> list[KVCacheBlock]:
        on_taken(num_blocks)
        return get_new_blocks(num_blocks)

    pool.get_new_blocks = watched


def insert_hash(pool: BlockPool, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None) -> None:
    pool._insert_block_hash(key, block, num_tokens=num_tokens)


def evict_content(pool: BlockPool, block: KVCacheBlock) -> None:
    """Forget the content of a block that is being reused, and publish its removal."""
    pool._maybe_evict_cached_block(block)


def return_to_front(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Drop references, and return blocks to the head of the free queue. vLLM would append cached ones, and evict more
    recently used blocks in their place."""
    for block in blocks:
        block.ref_cnt -= 1
    pool.free_block_queue.prepend_n([block for block in blocks if block.ref_cnt == 0])


def first_free(queue: FreeKVCacheBlockQueue) -> KVCacheBlock | None:
    return queue.fake_free_list_head.next_free_block if queue.num_free_blocks else None


def host_coordinator(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int, hash_block_size: int, pool: BlockPool
) -> KVCacheCoordinator:
    """vLLM's coordinator for the model's groups, over a pool of host blocks."""
    speculation = vllm_config.speculative_config
    coordinator = get_kv_cache_coordinator(
        kv_cache_config=replace(kv_cache_config, num_blocks=1),
        max_model_len=vllm_config.model_config.max_model_len,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        use_eagle=speculation is not None and speculation.use_eagle_block_drop(),
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=block_size,
        hash_block_size=hash_block_size,
        num_prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
        # Only full blocks are stored: a partly filled state block is overwritten by the next step.
        allow_partial_hash_hits=False,
    )
    coordinator.block_pool = pool
    for manager in coordinator.single_type_managers:
        manager.block_pool = pool
    return coordinator


# Allocation.


def around_allocation(
    manager: KVCacheManager,
    allocate: Callable[
        [Request, int, int, KVCacheBlocks | None, Callable[[], KVCacheBlocks | None]], KVCacheBlocks | None
    ],
) -> None:
    """Wrap vLLM's allocation in `allocate`, which gets the request, its numbers of new and of cached tokens, the blocks
    that hold the cached ones, and vLLM's own call."""
    allocate_slots = manager.allocate_slots

    def around(
        request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None, *args: Any, **kwargs: Any,
    ) -> KVCacheBlocks | None:  # fmt: skip
        given = (request, num_new_tokens, num_new_computed_tokens, new_computed_blocks)
        return allocate(*given, partial(allocate_slots, *given, *args, **kwargs))

    manager.allocate_slots = around


class GroupPool:
    """The block pool as one group's manager sees it; allocations run inside a context."""

    def __init__(self, pool: BlockPool, taking: Callable[[], AbstractContextManager[Any]]) -> None:
        self._pool, self._taking = pool, taking

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        with self._taking():
            return self._pool.get_new_blocks(num_blocks)


def limit_groups(
    manager: KVCacheManager,
    groups: Collection[int],
    taking: Callable[[], AbstractContextManager[Any]],
    fits: Callable[[int, Sequence[Sequence[KVCacheBlock]]], bool],
) -> None:
    """Take blocks of some groups inside a context, and refuse an allocation unless `fits` accepts the number of blocks
    these groups take and the cached blocks that were found."""
    coordinator, pool = manager.coordinator, manager.block_pool
    count_all = coordinator.get_num_blocks_to_allocate
    taken = 0

    def counting(count: Method) -> Method:
        def counted(*args: Any, **kwargs: Any) -> int:
            nonlocal taken
            num_blocks: int = count(*args, **kwargs)
            taken += num_blocks
            return num_blocks

        return counted

    for group in groups:
        single = coordinator.single_type_managers[group]
        single.block_pool = GroupPool(pool, taking)
        single.get_num_blocks_to_allocate = counting(single.get_num_blocks_to_allocate)

    def count(*args: Any, new_computed_blocks: Sequence[Sequence[KVCacheBlock]], **kwargs: Any) -> int:
        nonlocal taken
        taken = 0
        num_blocks: int = count_all(*args, new_computed_blocks=new_computed_blocks, **kwargs)
        # More than exist: vLLM then delays the request.
        return num_blocks if fits(taken, new_computed_blocks) else pool.num_gpu_blocks + 1

    coordinator.get_num_blocks_to_allocate = count


def count_skipped_blocks(manager: KVCacheManager) -> None:
    """Let requests reserve the blocks their sliding windows still need. vLLM's limit per request counts the blocks a
    window holds, but vLLM compares it with all of the request's blocks, including those its window has left. It then
    reserves nothing for a window that has moved on, so two requests with loaded KV may wait for each other for ever."""

    def count_in(single: Any, most: int) -> None:
        count = single.get_num_blocks_to_allocate

        def counted(
            request_id: str, num_tokens: int, new_computed_blocks: Any, total_computed_tokens: int,
            *args: Any, **kwargs: Any,
        ) -> int:  # fmt: skip
            if kwargs.get("apply_admission_cap"):
                num_skipped = single.get_num_skipped_tokens(total_computed_tokens) // single.block_size
                single.max_admission_blocks_per_request = most + num_skipped
            return int(count(request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs))

        single.get_num_blocks_to_allocate = counted

    for single in manager.coordinator.single_type_managers:
        most = single.max_admission_blocks_per_request
        if most is not None and isinstance(single, SlidingWindowManager | ChunkedLocalAttentionManager):
            count_in(single, most)


def requests_holding_blocks(manager: KVCacheManager, group: int) -> int:
    # vLLM also has entries without blocks, for requests that it found no room for.
    return sum(map(bool, manager.coordinator.single_type_managers[group].req_to_blocks.values()))


def blocks_behind_windows(manager: KVCacheManager) -> dict[str, set[int]]:
    """Blocks that each request's windows have left, tracked from now on. Workers' block tables still name them, and
    kernels load the rest of the tile in which a window begins."""
    behind: dict[str, set[int]] = {}

    def watch(single: Any) -> None:
        remove, pop = single._remove_blocks_in_range, single.pop_blocks_for_free

        def removing(request_id: str, first_block: int, last_block: int) -> None:
            blocks = single.req_to_blocks.get(request_id, ())[first_block:last_block]
            behind.setdefault(request_id, set()).update(block.block_id for block in blocks if not block.is_null)
            remove(request_id, first_block, last_block)

        def popping(request_id: str) -> list[KVCacheBlock]:
            behind.pop(request_id, None)
            return list(pop(request_id))

        single._remove_blocks_in_range, single.pop_blocks_for_free = removing, popping

    for single in manager.coordinator.single_type_managers:
        if not isinstance(single.kv_cache_spec, MambaSpec):  # Mamba kernels read only the last state
            watch(single)
    return behind


# Memory.


def bytes_of_block(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    return int(_pool_bytes_per_block(vllm_config, groups))


def bytes_of_longest(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Bytes of KV of one request of `max_model_len` tokens."""
    return int(_max_memory_usage_bytes_from_groups(vllm_config, groups))


def longest_that_fits(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec], num_bytes: int) -> int:
    return int(_estimate_max_model_len_from_groups(vllm_config, groups, num_bytes))


# The engine core.


def _wrap(owner: type, name: str, around: Method) -> None:
    """Replace a method by `around`, which gets the original method before the arguments."""
    wrap_once(owner, name, lambda method: lambda *args, **kwargs: around(method, *args, **kwargs))


def after_engine_calls(on_rpc: Callable[[Any, Any], None], on_adapter: Callable[[Any, LoRARequest], None]) -> None:
    """Report RPCs to workers and loads of adapters, with the engine core; also failed ones, which may have replaced
    part of the weights."""
    from vllm.v1.engine.core import EngineCore

    def rpc(collective_rpc: Method, core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return collective_rpc(core, method, *args, **kwargs)
        finally:
            on_rpc(core, method)

    def add(add_lora: Method, core: Any, lora_request: LoRARequest) -> Any:
        try:
            return add_lora(core, lora_request)
        finally:
            on_adapter(core, lora_request)

    _wrap(EngineCore, "collective_rpc", rpc)
    _wrap(EngineCore, "add_lora", add)


def before_engine_shutdown(call: Callable[[Any], None]) -> None:
    """Run `call` with an engine core that is about to shut down, while it still has its workers."""
    from vllm.v1.engine.core import EngineCore

    def watched(shutdown: Method, core: Any) -> None:
        try:
            call(core)
        finally:
            shutdown(core)

    _wrap(EngineCore, "shutdown", watched)


def call_workers(
    core: Any, method: str | Callable[..., Any], *arguments: Any, timeout: float | None = None
) -> list[Any]:
    """Call a worker's method, or a function that gets the worker, on all ranks; returns their results. Bypasses the
    engine core's own collective_rpc, which may be watched for new weights."""
    return list(core.model_executor.collective_rpc(method, timeout=timeout, args=arguments))


def connectors_of(core: Any, attribute: str) -> list[Any]:
    """An engine's connectors with an attribute, also inside a MultiConnector; empty while the engine is being built."""
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    return [one for one in getattr(connector, "_connectors", (connector,)) if hasattr(one, attribute)]


def own_connector(attribute: str) -> Any:
    """This worker's connector with an attribute, also inside a MultiConnector."""
    connector = get_kv_transfer_group()
    (found,) = (one for one in getattr(connector, "_connectors", (connector,)) if hasattr(type(one), attribute))
    return found


# Steps.


class ScheduleHooks:
    """Mixin with hooks around each pass, to be listed before vLLM's scheduler class."""

    def before_schedule(self) -> None: ...

    def after_schedule(self, scheduler_output: SchedulerOutput) -> None: ...

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.before_schedule()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        self.after_schedule(scheduler_output)


def worker_class() -> type[Any]:
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def run_dummy_step(runner: Any) -> None:
    """Run a forward of one token, with attention and without graphs, that writes to no request's blocks."""
    runner._dummy_run(1, force_attention=True, cudagraph_runtime_mode=CUDAGraphMode.NONE)


def around_steps(runner: Any, around: Callable[[SchedulerOutput], AbstractContextManager[Any]]) -> None:
    """Execute each step inside a context made from its scheduler output."""
    if "execute_model" in vars(runner):
        return  # wrapped already: the weights are loaded a second time
    execute_model = runner.execute_model

    def execute(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        with around(scheduler_output):
            return execute_model(scheduler_output, *args, **kwargs)

    runner.execute_model = execute


def batch_order(runner: Any) -> list[str]:
    """Request ids of the V1 runner's current batch, row by row."""
    return list(runner.input_batch.req_ids)


def watch_batches(runner: Any, order: list[str]) -> None:
    """Keep the request ids of the V2 runner's latest batch in `order`, row by row."""
    prepare_inputs = getattr(runner, "prepare_inputs", None)
    if prepare_inputs is None:
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        batch = prepare_inputs(*args, **kwargs)
        order[:] = batch.req_ids
        return batch

    runner.prepare_inputs = watched


def override_backend(name: str, path: str) -> None:
    """Make layers that are built from now on use a subclass of an attention backend."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[name], path)
    selector._cached_get_attn_backend.cache_clear()


@contextmanager
def without_full_graphs(runner: Any) -> Iterator[None]:
    """Run no FULL graphs inside this context. Both model runners have an object that chooses a batch's graph."""
    v2 = getattr(runner, "cudagraph_manager", None)
    chooser = v2 if v2 is not None else runner.cudagraph_dispatcher
    dispatch = chooser.dispatch

    def dispatch_v1(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        return dispatch(*args, invalid_modes={*(invalid_modes or ()), CUDAGraphMode.FULL}, **kwargs)

    def dispatch_v2(
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> Any:
        # FULL graphs are captured for decodes only (the plugin checks this); the Nones hide that a batch is one.
        return dispatch(num_reqs, num_tokens, None, num_active_loras, None, num_ubatches)

    chooser.dispatch = dispatch_v1 if v2 is None else dispatch_v2
    try:
        yield
    finally:
        del chooser.dispatch  # uncovers the class's own


@contextmanager
def with_graphs(runner: Any, graphs: Any) -> Iterator[None]:
    """Replace the V2 model runner's graphs inside this context."""
    own = runner.cudagraph_manager
    runner.cudagraph_manager = graphs
    try:
        yield
    finally:
        runner.cudagraph_manager = own


def has_decode_graphs(runner: Any) -> bool:
    """Whether the V2 runner has captured FULL graphs for decodes."""
    manager = getattr(runner, "cudagraph_manager", None)
    return manager is not None and any(is_full(each) for each in manager.graphs)


def is_full(descriptor: Any) -> bool:
    return bool(descriptor.cg_mode == CUDAGraphMode.FULL)


def capture_decode_graphs(runner: Any, model: Callable[..., Any], most_tokens: int) -> Any:
    """Capture a second set of FULL graphs, for small decode batches, with the connector's layer hooks in them."""
    from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook

    config = copy.copy(runner.vllm_config)
    compilation = config.compilation_config = copy.copy(config.compilation_config)
    compilation.cudagraph_capture_sizes = [size for size in compilation.cudagraph_capture_sizes if size <= most_tokens]
    compilation.max_cudagraph_capture_size = max(compilation.cudagraph_capture_sizes, default=0)
    manager = type(runner.cudagraph_manager)(
        config,
        runner.device,
        CUDAGraphMode.FULL_DECODE_ONLY,
        decode_query_len=runner.decode_query_len,
        lora_capture_cases=runner.lora_capture_cases,
        varlen_decode=runner.adaptive_verification is not None,
    )
    connector = get_kv_transfer_group()
    KVConnectorBase_V1.bind_connector_metadata(connector, KVConnectorMetadata())
    try:
        with _unlocked_workspace(), runner.maybe_setup_dummy_loras(runner.lora_config):
            manager.capture(
                model,
                runner.model_state,
                runner.input_buffers,
                runner.intermediate_tensors,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
                has_lora=runner.lora_config is not None,
                use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
                lora_capture_hook=create_lora_capture_hook(runner.lora_config, runner),
                progress_bar_desc="Capturing CUDA graphs for spilled KV",
            )
    finally:
        connector.clear_connector_metadata()
    return manager


@contextmanager
def _unlocked_workspace() -> Iterator[None]:
    """Let kernels add what they keep for each stream, as Marlin's experts do with their locks: vLLM locks the workspace
    after its own capture, and another capture is on another stream."""
    from vllm.v1.worker.workspace import current_workspace_manager, lock_workspace, unlock_workspace

    manager = current_workspace_manager()
    scratch = list(manager._current_workspaces)
    unlock_workspace()
    try:
        yield
    finally:
        lock_workspace()
    if any(now is not before for now, before in zip(manager._current_workspaces, scratch, strict=True)):
        raise OverspillError("graphs for spilled KV moved the workspace of vLLM's, which would read freed memory")


# Layers.


def calls_connector(module: Any) -> bool:
    """Whether vLLM calls a connector around this layer's attention."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return isinstance(module, Attention | MLAAttention)


def kv_owner(module: Any, name: str) -> str:
    """Name of the layer whose KV this layer reads, mostly its own."""
    return getattr(module, "kv_sharing_target_layer_name", None) or name


def watch_kv(module: Any, on_write: Callable[[], None], on_read: Callable[[], None]) -> Callable[[], None]:
    """Report when an attention layer writes its KV and when it attends; returns a function that stops the reports.

    A backend may write within its attention, and then no write is reported. Latent attention enters its backend by a
    method of its own.
    """
    watched = (
        [(module, "forward_impl", on_read)] if hasattr(module, "forward_impl") else [(module.impl, "forward", on_read)]
    )
    if hasattr(module.impl, "do_kv_cache_update"):
        watched.append((module.impl, "do_kv_cache_update", on_write))

    def watch(owner: Any, method: str, report: Callable[[], None]) -> None:
        call = getattr(owner, method)

        def reported(*args: Any, **kwargs: Any) -> Any:
            report()
            return call(*args, **kwargs)

        setattr(owner, method, reported)

    for one in watched:
        watch(*one)

    def end() -> None:
        for owner, method, _ in watched:
            delattr(owner, method)

    return end


# Parking.


def add_engine_method(name: str, method: Method) -> None:
    """Add a method to the engine core that front ends can call."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, name, method)


def is_paused(core: Any) -> bool:
    return bool(core.scheduler.pause_state != PauseState.UNPAUSED)


def pause(core: Any) -> None:
    """Schedule nothing from the next pass on; requests stay, and new ones wait."""
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def resume(core: Any) -> None:
    core.scheduler.set_pause_state(PauseState.UNPAUSED)


def has_steps_to_run(core: Any) -> bool:
    """Whether a paused engine has steps in flight, or a connector that needs further steps."""
    return bool(core.batch_queue) or core.scheduler.has_requests()


def run_step(core: Any) -> None:
    """Run one step for the engine's loop, which waits for the caller; outputs go where the loop's would."""
    if hasattr(core, "_process_engine_step"):
        core._process_engine_step()
        return
    # In-process, the engine's caller takes the outputs of one step at a time.
    step = core.step if core.batch_queue is None else core.step_with_batch_queue
    outputs, executed = step()
    core.post_step(executed)
    waiting: deque[Any] = vars(core).setdefault("overspill_outputs", deque())

    def deliver() -> tuple[Any, bool]:
        first = waiting.popleft()
        if not waiting:
            core.step_fn = step
        return first, False

    if outputs:
        waiting.append(outputs)
        core.step_fn = deliver


def release_waiting(scheduler: Any, is_meant: Callable[[Request], bool] = lambda _: True) -> None:
    """Free the blocks of requests that wait with loaded KV; the requests load it again."""
    for request in reversed(list(scheduler.kv_holding_waiting)):
        if not is_meant(request) or not scheduler._handle_blocked_waiting_request(request):
            continue
        scheduler._inflight_prefills.discard(request)
        scheduler._set_kv_fetch_stage(request, None)
        scheduler.kv_holding_waiting.remove_request(request)
        scheduler.deferred_waiting.discard(request)
        scheduler._free_request_blocks(request)
        request.num_computed_tokens = 0
        scheduler.waiting.prepend_request(request)


def requests_at_rest(scheduler: Any) -> list[Request]:
    """Requests that wait with loaded KV while nothing runs, loads or is about to free blocks, so that their wait will
    not end by itself. Empty while the engine is paused; a pause that lets such requests end waits for them."""
    if scheduler.running or scheduler.deferred_frees or scheduler.pause_state == PauseState.PAUSED_ALL:
        return []
    # A request that was aborted while it loaded keeps its blocks until the load ends.
    if scheduler.has_finished_requests():
        return []
    waiting = [r for r in scheduler.kv_holding_waiting if r.status != RequestStatus.WAITING_FOR_STREAMING_REQ]
    is_loading = any(
        request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        and request.request_id not in scheduler.finished_recving_kv_req_ids
        for request in waiting
    )
    return [] if is_loading or not waiting or scheduler.connector.has_pending_block_frees() else waiting


_WHILE_FROZEN = ("check_health", "shutdown")


def freeze_engine(core: Any) -> None:
    """Refuse calls that would reach a worker. Requests may still arrive and be aborted, leaving steps to run later."""
    executor = core.model_executor
    collective_rpc = executor.collective_rpc

    def refuse(method: Any = None, *args: Any, **kwargs: Any) -> Any:
        if method in _WHILE_FROZEN or getattr(method, "needs_no_gpu", False):
            return collective_rpc(method, *args, **kwargs)
        raise OverspillError("this engine is parked: wake it first")

    executor.collective_rpc = refuse
    core.resume_scheduler = refuse
    core.scheduler.has_requests = lambda: False


def thaw_engine(core: Any) -> None:
    """Undo `freeze_engine` by uncovering the classes' own methods."""
    del core.model_executor.collective_rpc, core.resume_scheduler, core.scheduler.has_requests


def end_engine(core: Any, error: Exception) -> None:
    """End the engine's loop with an error, whether or not it has requests."""

    def fail() -> Any:
        raise error

    core.step_fn = fail
    core.engines_running = True


class Allocation(NamedTuple):
    """GPU memory that vLLM allocated for its sleep mode."""

    address: int
    num_bytes: int
    is_weights: bool
    data: Any


def sleep_mode_allocations() -> list[Allocation]:
    from vllm.device_allocator import get_mem_allocator_instance

    # Copied to a list, because another thread may allocate meanwhile.
    found = list(get_mem_allocator_instance().pointer_to_data.items())
    return [Allocation(address, data.handle[1], data.tag == "weights", data) for address, data in found]


def release_allocation(allocation: Allocation) -> None:
    """Release the memory; its address stays reserved."""
    from vllm.device_allocator.cumem import unmap_and_release

    unmap_and_release(allocation.data.handle)
    allocation.data.is_asleep = True


def restore_allocation(allocation: Allocation) -> None:
    from vllm.device_allocator.cumem import create_and_map

    create_and_map(allocation.data.handle)
    allocation.data.is_asleep = False


# Elastic KV.


def is_frozen(core: Any) -> bool:
    """Whether the engine is parked."""
    return "has_requests" in vars(core.scheduler)


def on_wakeup(call: Callable[[Any], None]) -> None:
    """Run `call` in an engine core's loop whenever the loop is woken up, between two steps or while it waits."""
    from vllm.v1.engine.core import EngineCoreProc

    def watched(handle: Method, core: Any, request_type: EngineCoreRequestType, request: Any) -> None:
        handle(core, request_type, request)
        if request_type == EngineCoreRequestType.WAKEUP:
            call(core)

    _wrap(EngineCoreProc, "_handle_client_request", watched)


def before_loop(call: Callable[[Any], None]) -> None:
    """Run `call` when an engine core is about to start its loop."""
    from vllm.v1.engine.core import EngineCoreProc

    def watched(run_busy_loop: Method, core: Any) -> Any:
        call(core)
        return run_busy_loop(core)

    _wrap(EngineCoreProc, "run_busy_loop", watched)


def wake_up(core: Any) -> bool:
    """Wake the engine's loop, from any thread; False if the engine has no loop of its own or its loop has ended."""
    queue = getattr(core, "input_queue", None)
    if queue is None or not core.is_running():
        return False
    if queue.empty():  # otherwise the loop is about to run anyway
        queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    return True


def watch_outputs(core: Any, on_output: Callable[[], None]) -> int:
    """Run `on_output` after each step whose output was read, so workers are done with it; returns steps in flight."""
    scheduler = core.scheduler
    update = scheduler.update_from_output

    def update_from_output(*args: Any, **kwargs: Any) -> Any:
        outputs = update(*args, **kwargs)
        on_output()
        return outputs

    scheduler.update_from_output = update_from_output
    return len(core.batch_queue or ())


def blocks_waiting(core: Any, block_tokens: int, most: int) -> int:
    """Blocks that waiting requests would take, up to `most`."""
    num_blocks = 0
    for request in core.scheduler.waiting:
        num_blocks += -(-request.num_tokens // block_tokens)
        if num_blocks >= most:
            return most
    return num_blocks


def preempt(scheduler: Any, names: Collection[str], block_ids: Collection[int]) -> list[str]:
    """Preempt requests in `names` or holding one of the blocks, running or waiting with loaded KV; returns the
    running ones' ids. They run again after the steps in flight, whose tokens count; until then blocks may be in use."""

    def is_meant(request: Request) -> bool:
        held = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return request.request_id in names or any(number in block_ids for group in held for number in group)

    preempted = []
    for request in reversed(list(scheduler.running)):
        if is_meant(request):
            scheduler.running.remove(request)
            # A request that hands over its KV, or continues with more input, must not end without blocks.
            is_dropped = scheduler.requires_kv_delivery or request.resumable
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=is_dropped)
            # The next pass may schedule the request again, as if it had not run in the one before.
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            preempted.append(request.request_id)
    release_waiting(scheduler, is_meant)
    return preempted
