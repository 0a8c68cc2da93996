"""Settings as forms show them: in groups, with labels that need no manual."""

import shlex
from collections.abc import Mapping

from overspill.kv.sizes import exact_size
from overspill.registry import Model
from overspill.settings import MODEL_SETTINGS, Setting

_GROUPS: dict[str, dict[str, str]] = {
    "Model": {
        "source": "Source", "max_model_len": "Context, tokens", "min_speed": "Least speed of an automatic context",
        "dtype": "Number format", "aliases": "Other names", "variants": "Variants of requests", "notes": "Notes",
    },
    "Memory": {
        "gpu_memory": "GPU memory, at most", "gpu_memory_utilization": "Share of the GPU", "ram": "RAM, at most",
        "ram_reserve": "RAM left to others", "offload_ram": "RAM for idle conversations",
        "weights_ram": "Weights in RAM", "kv_cache_dtype": "KV number format",
    },
    "When it runs": {
        "ttl": "Stop when unused for", "keep": "Never stop it for another model", "preload": "Start with the manager",
        "park": "Park instead of stopping", "elastic": "Share GPU memory with other models",
        "elastic_weight": "Weight of its share",
    },
    "Load": {
        "at_once": "Full-length requests at once", "max_num_seqs": "Requests at once, at most",
        "max_num_batched_tokens": "Tokens per step", "drafts": "Drafted tokens", "enforce_eager": "Without CUDA graphs",
    },
    "Several GPUs": {
        "gpus": "Which GPUs", "tensor_parallel_size": "GPUs that share each layer",
        "pipeline_parallel_size": "Stages of layers",
    },
    "KV beyond RAM, and expert settings": {
        "disk": "Disk for KV", "disk_path": "Folder for KV on disk", "remote": "Store between machines",
        "spill_compute": "Attention to spilled KV", "spill_threads": "CPU threads for it", "kv_options": "KV options",
        "vllm_args": "vLLM's own flags",
    },
}  # fmt: skip
_SETTINGS = {setting.name: setting for setting in MODEL_SETTINGS}
LABELS = {name: label for group in _GROUPS.values() for name, label in group.items()}
GROUPS: tuple[tuple[str, tuple[tuple[Setting, str], ...]], ...] = tuple(
    (title, tuple((_SETTINGS[name], label) for name, label in group.items())) for title, group in _GROUPS.items()
)


def form_values(model: Model | None) -> dict[str, str]:
    """Form fields for a model's settings: sizes as people write them, empty text for unset ones."""
    values = model.settings.as_json() if model is not None else {}
    shown = {}
    for setting in MODEL_SETTINGS:
        value = values.get(setting.name)
        if setting.name == "vllm_args":
            shown[setting.name] = shlex.join(value or ())
        elif value is None:
            shown[setting.name] = ""
        elif setting.is_size:
            shown[setting.name] = exact_size(int(value))
        else:
            shown[setting.name] = str(value).lower() if isinstance(value, bool) else str(value)
    return shown


def changes_of(form: Mapping[str, str]) -> dict[str, object]:
    """Settings of a submitted form; an empty field resets its setting."""
    return {name: value.strip() or None for name, value in form.items() if name in _SETTINGS}
