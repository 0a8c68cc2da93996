"""vLLM's own KV specs, groups and sums for configs without weights: `python -m tests.vllm_specs < cases > answers`.

The model is built on the meta device, so nothing is allocated whatever its size. A process of its own: the
distributed state that it fakes must not meet an engine's.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRATCH = tempfile.TemporaryDirectory()  # for as long as the process lives
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CACHE_ROOT=SCRATCH.name,
)


class Nothing(type):
    """Whatever is asked of it, it is."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class NothingModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(Nothing("Nothing", (), {}), name)


class WithoutTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The CPU environment leaves torchvision out, which multimodal models import and language models don't use."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = NothingModule(spec.name)
        module.__path__ = []
        module.__version__ = "1.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """`case`: config, engine arguments, and the lengths to ask about."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, iter_layer_specs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case["config"]))
        config = EngineArgs(model=folder, skip_tokenizer_init=True, **case["engine"]).create_engine_config()
        with set_current_vllm_config(config):
            if parallel_state._WORLD is None:
                parallel_state.init_distributed_environment(1, 0, f"file://{SCRATCH.name}/store", 0, "gloo")
            # Only models with experts get a group for them.
            if parallel_state._TP is None or (parallel_state._EP is not None) != config.model_config.is_moe:
                parallel_state.destroy_model_parallel()
                parallel_state.initialize_model_parallel(1, 1)
            default = torch.get_default_dtype()
            torch.set_default_dtype(config.model_config.dtype)
            try:
                with torch.device("meta"):
                    model = initialize_model(config)
            finally:
                torch.set_default_dtype(default)
    current_platform.update_block_size_for_backend(config)
    config.cache_config.kv_cache_layout = "LBNHC"
    groups = kv_cache_utils.get_kv_cache_groups(config, get_kv_cache_spec(config))
    request_bytes = {}
    for length in case["lengths"]:
        config.model_config.max_model_len = length
        request_bytes[length] = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
    return {
        "groups": [
            [
                str(get_kv_cache_spec_kind(group.kv_cache_spec).value),
                _indices(group.layer_names),
                next(iter(iter_layer_specs(group.kv_cache_spec))).real_page_size_bytes,
            ]
            for group in groups
        ],
        "bytes_per_block": kv_cache_utils._pool_bytes_per_block(config, groups),
        "request_bytes": request_bytes,
        "block_size": config.cache_config.block_size,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_concurrent_batches": config.max_concurrent_batches,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": config.model_config.get_and_verify_max_len(None),
    }


def _indices(layer_names: list[str]) -> list[int]:
    from vllm.model_executor.models.utils import extract_layer_index

    return [extract_layer_index(name) for name in layer_names]


def be_a_cpu_with_amx() -> None:
    """Whatever this one is. Without AMX vLLM has other blocks for latent attention, and no experts in MXFP4. To build a
    model on the meta device takes neither."""
    import torch
    from vllm.platforms import CpuArchEnum, current_platform

    torch.cpu._is_amx_tile_supported = lambda: True
    type(current_platform).get_cpu_architecture = classmethod(lambda cls: CpuArchEnum.X86)


def build_only() -> None:
    """No model is ever run, or given weights."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.model_loader import utils

    CustomOp.maybe_compile = lambda self, function, **_: function  # type: ignore[method-assign]
    utils.record_metadata_for_reloading = lambda model: None


def main() -> None:
    cases = json.load(sys.stdin)
    # What vLLM prints on the way does not belong to the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.meta_path.append(WithoutTorchvision())  # behind the real one
    be_a_cpu_with_amx()
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # where torchvision would be missing again
    build_only()
    found = []
    for case in cases:
        try:
            found.append(answer(case))
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(found, answers)


if __name__ == "__main__":
    main()
