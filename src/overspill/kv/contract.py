"""The contract with vLLM: the internals Overspill uses, a check that the installed vLLM has them, and method wrapping.

`overspill.kv.vllm_api` uses them. Releases change internals without notice: a missing method would fail in the middle
of a request, and a hook that is no longer called would go unnoticed. So names and parameters are compared before a
model is loaded, by parsing vLLM's source files: importing all of them takes seconds.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overspill.kv.errors import OverspillError

# A file of vLLM, then each function, method or attribute used from it. Functions list the parameters that Overspill
# passes or receives, in order. Unlisted parameters must have defaults, unless "..." stands for them: vLLM passes those,
# and Overspill only forwards them.
OFFLOAD = """
config/model.py
    ModelConfig.get_total_num_hidden_layers()
config/vllm.py
    VllmConfig.__post_init__()
    VllmConfig.max_concurrent_batches
    VllmConfig.max_in_flight_tokens
engine/arg_utils.py
    EngineArgs.create_engine_config()
    EngineArgs._api_process_count
    EngineArgs._api_process_rank
distributed/kv_events.py
    BlockStored.block_hashes
    BlockRemoved
    MEDIUM_CPU
    MEDIUM_STORAGE
distributed/kv_transfer/kv_connector/factory.py
    KVConnectorFactory.register_connector(name, module_path, class_name)
    KVConnectorFactory._registry
distributed/kv_transfer/kv_connector/v1/multi_connector.py
    MultiConnector._connectors
distributed/kv_transfer/kv_connector/v1/base.py
    KVConnectorBase_V1._cache_hit_source
    KVConnectorBase_V1._connector_metadata
    KVConnectorBase_V1._get_connector_metadata()
    KVConnectorBase_V1._kv_transfer_config
    KVConnectorBase_V1.requires_kv_delivery
    KVConnectorBase_V1.get_required_kvcache_layout(vllm_config)
    KVConnectorBase_V1.build_kv_connector_stats(data)
    KVConnectorBase_V1.build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
    KVConnectorBase_V1.register_kv_caches(kv_caches)
    KVConnectorBase_V1.bind_connector_metadata(connector_metadata)
    KVConnectorBase_V1.start_load_kv(forward_context)
    KVConnectorBase_V1.wait_for_layer_load(layer_name)
    KVConnectorBase_V1.save_kv_layer(layer_name, kv_layer, attn_metadata)
    KVConnectorBase_V1.wait_for_save()
    KVConnectorBase_V1.get_transfer_results(finished_req_ids)
    KVConnectorBase_V1.build_connector_worker_meta()
    KVConnectorBase_V1.bind_kv_cache_manager(kv_cache_manager)
    KVConnectorBase_V1.get_num_new_matched_tokens(request, num_computed_tokens)
    KVConnectorBase_V1.update_state_after_alloc(request, blocks, num_external_tokens)
    KVConnectorBase_V1.build_connector_meta(scheduler_output)
    KVConnectorBase_V1.update_connector_output(connector_output)
    KVConnectorBase_V1.request_finished(request, block_ids)
    KVConnectorBase_V1.has_pending_push_work()
    KVConnectorBase_V1.has_pending_block_frees()
    KVConnectorBase_V1.on_new_request(request)
    KVConnectorBase_V1.take_events()
    KVConnectorBase_V1.reset_cache()
    KVConnectorBase_V1.get_kv_connector_stats()
    KVConnectorBase_V1.shutdown()
    SupportsHMA.request_finished_all_groups(request, block_ids)
    KVConnectorTransferResults.finished_recving
    KVConnectorTransferResults.failed_recving
    KVConnectorWorkerMetadata.aggregate(other)
v1/core/block_pool.py
    BlockHashToBlockMap.get_one_block(key)
    BlockPool.__init__(num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events, medium)
    BlockPool.blocks
    BlockPool.cached_block_hash_to_block
    BlockPool.free_block_queue
    BlockPool.kv_event_queue
    BlockPool.null_block
    BlockPool.cache_partial_block(request, block, num_tokens, ...)
    BlockPool.cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, \
block_mask)
    BlockPool.evict_blocks(block_ids)
    BlockPool.free_blocks(ordered_blocks)
    BlockPool.get_cached_block(block_hash, kv_cache_group_ids)
    BlockPool.get_new_blocks(num_blocks)
    BlockPool.get_num_free_blocks()
    BlockPool.reset_prefix_cache()
    BlockPool.take_events()
    BlockPool.touch(blocks)
    BlockPool._insert_block_hash(block_hash_with_group_id, block, num_tokens)
    BlockPool._maybe_evict_cached_block(block)
v1/core/kv_cache_coordinator.py
    get_kv_cache_coordinator(kv_cache_config, max_model_len, max_in_flight_tokens, use_eagle, enable_caching, \
enable_kv_cache_events, dcp_world_size, pcp_world_size, scheduler_block_size, hash_block_size, num_prefill_lookahead, \
allow_partial_hash_hits)
    KVCacheCoordinator.block_pool
    KVCacheCoordinator.eagle_group_ids
    KVCacheCoordinator.group_block_sizes
    KVCacheCoordinator.single_type_managers
    KVCacheCoordinator.find_longest_cache_hit(block_hashes, max_cache_hit_length)
v1/core/kv_cache_manager.py
    KVCacheBlocks.blocks
    KVCacheManager.block_pool
    KVCacheManager.coordinator
v1/core/kv_cache_utils.py
    FreeKVCacheBlockQueue.iter_blocks_after(cursor)
    FreeKVCacheBlockQueue.prepend_n(blocks)
    KVCacheBlock.block_hash
    KVCacheBlock.block_hash_num_tokens
    KVCacheBlock.block_id
    KVCacheBlock.is_null
    KVCacheBlock.ref_cnt
    generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    get_block_hash(key)
    get_group_id(key)
    get_none_hash_seed()
    make_block_hash_with_group_id(block_hash, group_id)
    maybe_convert_block_hash(hash_bytes)
    resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    to_event_extra_keys(extra_keys)
v1/core/sched/scheduler.py
    Scheduler.connector
    Scheduler.requests
v1/core/sched/output.py
    SchedulerOutput.num_scheduled_tokens
    SchedulerOutput.preempted_req_ids
    SchedulerOutput.total_num_scheduled_tokens
v1/core/single_type_kv_cache_manager.py
    ChunkedLocalAttentionManager
    FullAttentionManager
    SingleTypeKVCacheManager.block_pool
    SingleTypeKVCacheManager.block_size
    SingleTypeKVCacheManager.max_admission_blocks_per_request
    SingleTypeKVCacheManager.get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, \
total_computed_tokens, ..., apply_admission_cap)
    SingleTypeKVCacheManager.get_num_skipped_tokens(num_computed_tokens)
    SlidingWindowManager
v1/engine/core.py
    EngineCore.add_lora(lora_request)
    EngineCore.collective_rpc(method)
    EngineCore.model_executor
    EngineCore.shutdown()
    EngineCore.scheduler
v1/executor/abstract.py
    Executor.collective_rpc(method, timeout, args)
v1/kv_cache_interface.py
    KVCacheConfig.kv_cache_groups
    KVCacheConfig.kv_cache_tensors
    KVCacheConfig.needs_kv_cache_zeroing()
    KVCacheConfig.num_blocks
    KVCacheConfig.prefix_cacheable_group_ids()
    KVCacheTensor.block_stride
    KVCacheTensor.layer_stride
    KVCacheTensor.layers
    KVCacheTensor.offset
v1/metrics/cache_hit_source.py
    CacheHitSource.HOST
v1/outputs.py
    KVConnectorOutput.failed_recving
    KVConnectorOutput.kv_connector_worker_meta
v1/request.py
    Request.all_token_ids
    Request.block_hashes
    Request.is_finished()
    Request.lora_request
    Request.num_computed_tokens
    Request.num_tokens()
    Request.request_id
    Request.skip_reading_prefix_cache
"""
SPILL = """
distributed/kv_transfer/kv_connector/v1/base.py
    KVConnectorBase_V1.get_mem_pool_context()
distributed/kv_transfer/kv_transfer_state.py
    has_kv_transfer_group()
model_executor/layers/attention/attention.py
    Attention.dtype
    Attention.impl
    Attention.layer_name
    Attention.num_heads
    Attention.num_kv_heads
    Attention.query_quant
    Attention.kv_sharing_target_layer_name
    unified_attention_with_output(..., layer_name)
    unified_kv_cache_update(..., layer_name)
model_executor/layers/attention/kv_transfer_utils.py
    maybe_transfer_kv_layer(func)
model_executor/layers/attention/mla_attention.py
    MLAAttention.forward_impl(..., kv_cache, attn_metadata, output)
    unified_mla_attention_with_output(..., layer_name)
v1/attention/backend.py
    CommonAttentionMetadata.block_table_tensor
    CommonAttentionMetadata.query_start_loc_cpu
    CommonAttentionMetadata.seq_lens
v1/attention/backends/cpu_attn.py
    CPUAttentionBackend.get_builder_cls()
    CPUAttentionBackend.get_impl_cls()
    CPUAttentionBackendImpl.forward(layer, query, key, value, kv_cache, attn_metadata, output)
    CPUAttentionMetadata.block_table
    CPUAttentionMetadata.num_actual_tokens
    CPUAttentionMetadata.query_start_loc
    CPUAttentionMetadata.seq_lens
    CPUAttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata, fast_build)
v1/attention/backends/flash_attn.py
    FlashAttentionBackend.get_builder_cls()
    FlashAttentionBackend.get_impl_cls()
    FlashAttentionImpl.alibi_slopes
    FlashAttentionImpl.forward(layer, query, key, value, kv_cache, attn_metadata, output)
    FlashAttentionImpl.head_size
    FlashAttentionImpl.kv_cache_dtype
    FlashAttentionImpl.kv_sharing_target_layer_name
    FlashAttentionImpl.logits_soft_cap
    FlashAttentionImpl.num_kv_heads
    FlashAttentionImpl.scale
    FlashAttentionImpl.sinks
    FlashAttentionImpl.sliding_window
    FlashAttentionImpl.supports_quant_query_input
    FlashAttentionImpl.vllm_flash_attn_version
    FlashAttentionMetadata.block_table
    FlashAttentionMetadata.causal
    FlashAttentionMetadata.max_num_splits
    FlashAttentionMetadata.max_query_len
    FlashAttentionMetadata.max_seq_len
    FlashAttentionMetadata.num_actual_tokens
    FlashAttentionMetadata.query_start_loc
    FlashAttentionMetadata.scheduler_metadata
    FlashAttentionMetadata.seq_lens
    FlashAttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata, fast_build)
v1/attention/backends/registry.py
    AttentionBackendEnum
    register_backend(backend, class_path)
v1/attention/ops/merge_attn_states.py
    merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse)
v1/attention/selector.py
    _cached_get_attn_backend(...)
v1/core/block_pool.py
    BlockPool.num_gpu_blocks
v1/core/kv_cache_coordinator.py
    KVCacheCoordinator.get_num_blocks_to_allocate(..., new_computed_blocks)
v1/core/kv_cache_manager.py
    KVCacheManager.get_block_ids(request_id)
    KVCacheManager.allocate_slots(request, num_new_tokens, num_new_computed_tokens)
v1/core/kv_cache_utils.py
    FreeKVCacheBlockQueue.__init__(blocks)
    FreeKVCacheBlockQueue.append(block)
    FreeKVCacheBlockQueue.append_n(blocks)
    FreeKVCacheBlockQueue.fake_free_list_head
    FreeKVCacheBlockQueue.get_all_free_blocks()
    FreeKVCacheBlockQueue.num_free_blocks
    FreeKVCacheBlockQueue.popleft()
    FreeKVCacheBlockQueue.popleft_n(n)
    FreeKVCacheBlockQueue.remove(block)
    KVCacheBlock.next_free_block
    _estimate_max_model_len_from_groups(vllm_config, kv_cache_groups, available_memory)
    _max_memory_usage_bytes_from_groups(vllm_config, kv_cache_groups)
    _pool_bytes_per_block(vllm_config, kv_cache_groups)
    get_kv_cache_groups(vllm_config, kv_cache_spec)
v1/core/sched/interface.py
    PauseState.PAUSED_ALL
v1/core/sched/output.py
    CachedRequestData.new_block_ids
    CachedRequestData.num_computed_tokens
    NewRequestData.block_ids
    NewRequestData.num_computed_tokens
    SchedulerOutput.kv_cache_block_copies
    SchedulerOutput.kv_connector_block_state
    SchedulerOutput.kv_connector_metadata
    SchedulerOutput.new_block_ids_to_zero
    SchedulerOutput.scheduled_cached_reqs
    SchedulerOutput.scheduled_new_reqs
v1/core/sched/request_queue.py
    RequestQueue.prepend_request(request)
    RequestQueue.remove_request(request)
v1/core/sched/async_scheduler.py
    AsyncScheduler
v1/core/sched/scheduler.py
    Scheduler.current_step
    Scheduler.deferred_frees
    Scheduler.deferred_waiting
    Scheduler.finished_recving_kv_req_ids
    Scheduler.has_finished_requests()
    Scheduler.kv_cache_manager
    Scheduler.kv_holding_waiting
    Scheduler.pause_state()
    Scheduler.prev_step_scheduled_req_ids
    Scheduler.requires_kv_delivery
    Scheduler.running
    Scheduler.schedule()
    Scheduler.waiting
    Scheduler._free_request_blocks(request)
    Scheduler._handle_blocked_waiting_request(request)
    Scheduler._inflight_prefills
    Scheduler._preempt_request(request, timestamp, drop_stale_output)
    Scheduler._set_kv_fetch_stage(request, stage)
    Scheduler._update_after_schedule(scheduler_output)
v1/core/single_type_kv_cache_manager.py
    MambaManager.get_num_blocks_to_allocate(...)
    SingleTypeKVCacheManager.kv_cache_spec
    SingleTypeKVCacheManager.req_to_blocks
    SingleTypeKVCacheManager.pop_blocks_for_free(request_id)
    SingleTypeKVCacheManager._remove_blocks_in_range(request_id, first_block, last_block)
v1/cudagraph_dispatcher.py
    CudagraphDispatcher.dispatch(..., invalid_modes)
v1/kv_cache_interface.py
    KVCacheConfig.has_mixed_precision_kv_cache()
    KVCacheConfig.kv_cache_layout
    KVCacheSpec.page_size_bytes()
    KVCacheSpec.prefix_replay_tokens()
    KVCacheSpec.tokens_per_state()
    MambaSpec.max_memory_usage_bytes(vllm_config)
v1/request.py
    Request.resumable
    Request.is_prefill_chunk
    Request.next_decode_eligible_step
    Request.status
v1/worker/cpu_worker.py
    CPUWorker.compile_or_warm_up_model()
    CPUWorker.determine_available_memory()
v1/worker/gpu/buffer_utils.py
    UvaBuffer.cpu
    UvaBuffer.uva()
v1/worker/gpu/cudagraph_utils.py
    BatchExecutionDescriptor.cg_mode
    CudaGraphManager.dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches)
    CudaGraphManager.graphs
    ModelCudaGraphManager.__init__(vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases, \
varlen_decode)
    ModelCudaGraphManager.capture(model, model_state, input_buffers, intermediate_tensors, block_tables, attn_groups, \
kv_cache_config, has_lora, use_aux_hidden_state_outputs, lora_capture_hook, progress_bar_desc)
    ModelCudaGraphManager.run_fullgraph(desc)
v1/worker/gpu/input_batch.py
    InputBatch.req_ids
v1/worker/gpu/lora_utils.py
    create_lora_capture_hook(lora_config, runner)
v1/worker/gpu/model_runner.py
    GPUModelRunner.adaptive_verification
    GPUModelRunner.attn_groups
    GPUModelRunner.block_tables
    GPUModelRunner.cudagraph_manager
    GPUModelRunner.decode_query_len
    GPUModelRunner.input_buffers
    GPUModelRunner.intermediate_tensors
    GPUModelRunner.kv_cache_config
    GPUModelRunner.lora_capture_cases
    GPUModelRunner.model_state
    GPUModelRunner.prepare_inputs(...)
    GPUModelRunner.use_aux_hidden_state_outputs
    GPUModelRunner.execute_model(scheduler_output)
    GPUModelRunner._dummy_run(num_tokens)
v1/worker/gpu_model_runner.py
    GPUModelRunner.cudagraph_dispatcher
    GPUModelRunner.execute_model(scheduler_output)
    GPUModelRunner._dummy_run(num_tokens, cudagraph_runtime_mode, force_attention)
v1/worker/gpu_worker.py
    Worker.compile_or_warm_up_model()
    Worker.determine_available_memory()
    Worker.get_kv_cache_spec()
    Worker.load_model()
v1/worker/workspace.py
    WorkspaceManager._current_workspaces
    current_workspace_manager()
    lock_workspace()
    unlock_workspace()
"""

PARK = """
device_allocator/__init__.py
    AllocationData.handle
    AllocationData.is_asleep
    AllocationData.tag
    get_mem_allocator_instance()
device_allocator/cumem.py
    CuMemAllocator.pointer_to_data
    create_and_map(allocation_handle)
    unmap_and_release(allocation_handle)
v1/core/sched/interface.py
    PauseState.UNPAUSED
v1/core/sched/scheduler.py
    Scheduler.has_requests()
    Scheduler.set_pause_state(pause_state)
v1/engine/core.py
    EngineCore.batch_queue
    EngineCore.post_step(model_executed)
    EngineCore.reset_prefix_cache(reset_running_requests, reset_connector)
    EngineCore.resume_scheduler()
    EngineCore.step()
    EngineCore.step_fn
    EngineCore.step_with_batch_queue()
    EngineCoreProc.engines_running
    EngineCoreProc._process_engine_step()
v1/kv_cache_interface.py
    KVCacheTensor.size
v1/worker/gpu_worker.py
    Worker.sleep()
    Worker.model_runner
"""

ELASTIC = """
v1/core/sched/scheduler.py
    Scheduler.update_from_output(...)
v1/engine/__init__.py
    EngineCoreRequestType.WAKEUP
v1/engine/core.py
    EngineCoreProc.input_queue
    EngineCoreProc.is_running()
    EngineCoreProc.run_busy_loop()
    EngineCoreProc._handle_client_request(request_type, request)
"""

Scope = dict[str, ast.FunctionDef | None]  # functions by name; None for attributes and classes

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A function, method, class or attribute of vLLM that Overspill uses."""

    file: str
    owner: str  # class name; empty at module level
    name: str
    parameters: tuple[str, ...] | None  # None for an attribute or a class

    def __str__(self) -> str:
        module = self.file.removesuffix(".py").replace("/", ".")
        called = f"({', '.join(self.parameters)})" if self.parameters is not None else ""
        return f"vllm.{module}: {self.owner}{'.' if self.owner else ''}{self.name}{called}"


def parts(text: str) -> Iterator[Part]:
    file = ""
    for line in text.replace("\\\n", "").split("\n"):
        if not line.startswith(" "):
            file = line or file
            continue
        found = re.fullmatch(r"    (?:(\w+)\.)?(\w+)(?:\((.*)\))?", line)
        assert found is not None, line
        owner, name, parameters = found.groups()
        listed = None if parameters is None else tuple(part for part in parameters.split(", ") if part)
        yield Part(file, owner or "", name, listed)


def check_contract(*, spill: bool, park: bool = False, elastic: bool = False, root: Path | None = None) -> None:
    """Raise if vLLM lacks internals that the enabled features use; `root` defaults to the installed package's folder.
    Park and elastic KV need spill's list, too: they map the KV buffer, replace the worker and preempt requests. Elastic
    KV also needs park's, since it recognises parked engines."""
    root = root or _installed()
    options = {"spill_bytes": spill, "park": park, "ledger": elastic}
    missing = (
        differences(root, OFFLOAD)
        + (differences(root, SPILL) if spill or park or elastic else ())
        + (differences(root, PARK) if park or elastic else ())
        + (differences(root, ELASTIC) if elastic else ())
    )
    if not missing:
        return
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    removable = " and ".join(option for option, is_given in options.items() if is_given)
    instead = f"remove {removable}, or install" if removable and not differences(root, OFFLOAD) else "install"
    raise OverspillError(
        f"this vLLM lacks internals that Overspill uses: {missing[0]}{more}. To fix this, {instead} a tested release: "
        "vllm==0.32.0"
    )


@cache
def differences(root: Path, text: str) -> tuple[str, ...]:
    """Parts listed in `text` that are missing or take other parameters, as messages."""
    return tuple(reason for part in parts(text) if (reason := _difference(root, part)))


def _difference(root: Path, part: Part) -> str:
    scope = _scopes((root / part.file).resolve()).get(part.owner)
    if scope is None or part.name not in scope:
        return f"{part} is not there"
    function = scope[part.name]
    if part.parameters is None or function is None:
        return "" if part.parameters is None else f"{part} is no method"
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    required = {parameter.arg for parameter in positional[:first_default]} | {
        parameter.arg
        for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if not default
    }
    names = [
        parameter.arg for parameter in (*positional, *arguments.kwonlyargs) if parameter.arg not in ("self", "cls")
    ]
    listed = [name for name in part.parameters if name != "..."]
    unknown = required - {"self", "cls", *listed} if "..." not in part.parameters else set()
    if unknown or [name for name in names if name in listed] != listed:
        return f"{part} takes ({', '.join(names)})"
    return ""


@cache
def _scopes(path: Path) -> dict[str, Scope]:
    """Names that a source file defines, by class; module-level names are under ""."""
    try:
        module = ast.parse(path.read_text())
    except FileNotFoundError:
        return {}
    found = {"": _defined(module.body)}
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = _defined(node.body)
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[node.name] = _assigned_to_self(method) | found[node.name]
    return found


def _defined(body: list[ast.stmt]) -> Scope:
    scope: Scope = {}
    for node in body:
        match node:
            case ast.FunctionDef():
                scope[node.name] = node
            case ast.ClassDef():
                scope[node.name] = None
            case ast.AnnAssign(target=ast.Name(id=name)):
                scope[name] = None
            case ast.Assign(targets=[ast.Name(id=name)]):
                scope[name] = None
    return scope


def _assigned_to_self(method: ast.FunctionDef) -> Scope:
    return {
        node.attr: None
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _installed() -> Path:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def wrap_once(owner: type, name: str, make: Callable[[Method], Method]) -> None:
    """Replace a method with `make(method)`, unless it was replaced before: vLLM loads plugins more than once per
    process."""
    method = getattr(owner, name)
    if hasattr(method, "overspill"):
        return
    replacement = functools.wraps(method)(make(method))
    replacement.overspill = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
