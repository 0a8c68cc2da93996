"""Input that vLLM would refuse minutes later or silently treat otherwise: refused before the start, or corrected."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overspill.address import is_loopback
from overspill.errors import CannotServe
from overspill.flags import Flag, find, matches, refuse_unknown
from overspill.kv.errors import OverspillError
from overspill.launch.arguments import Combined
from overspill.launch.vllm import PLUGINS
from overspill.model.config import Config
from overspill.model.facts import ModelFacts
from overspill.model.source import CONFIG, Folder
from overspill.planning.arguments import CONTRADICTING_VARIABLES
from overspill.planning.planner import Plan
from overspill.settings import SETTINGS

_SETTINGS = [setting.flag for setting in SETTINGS]
_NOT_HERE = {
    "--model": "the model is the first argument: overspill serve MODEL",
    "--config": "its flags cannot be compared with the plan's; write them after the model instead",
    "--uds": "serve asks a port whether the server is ready; use --host and --port, or start vLLM yourself with the "
    "command that --dry-run prints",
    "--grpc": "serve asks over HTTP whether the server is ready; start vLLM yourself with the command that --dry-run "
    "prints",
    "--headless": "there would be no server to ask; start vLLM yourself with the command that --dry-run prints",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """Warnings, and variables to change for vLLM (None removes one)."""

    warnings: list[str] = field(default_factory=list)
    environment: dict[str, str | None] = field(default_factory=dict)


def check(combined: Combined, environment: Mapping[str, str], *, on_cpu: bool) -> Checked:
    """Raise for what must be refused; correct the rest or warn about it."""
    refuse_flags(combined.given)
    checked = Checked()
    _check_weight_offload(combined)
    _check_allocator(combined, environment, checked)
    _check_plugins(environment, checked)
    _check_kv_space(combined, environment, checked, on_cpu=on_cpu)
    _check_exposure(combined, environment, checked)
    _check_drafts(combined)
    return checked


def refuse_flags(flags: Sequence[Flag], own: Sequence[str] = ()) -> None:
    """Raise for flags that `overspill serve` or vLLM does not take; `own` are the command's flags."""
    for flag in flags:
        if (why := _NOT_HERE.get(flag.name)) is not None:
            raise OverspillError(f"{flag.name} cannot be used with overspill serve: {why}")
    refuse_unknown(flags, [*own, *_SETTINGS])


def _check_weight_offload(combined: Combined) -> None:
    """Refuse contradictions among offload flags that did not become part of the plan (overspill.launch.arguments)."""
    has_uva = float(combined.value("--cpu-offload-gb") or 0) > 0
    backend = combined.value("--offload-backend") or "auto"
    groups = combined.value("--offload-group-size") or "0"
    prefetches = groups.strip() not in ("", "0")
    if has_uva and (prefetches or backend == "prefetch"):
        raise OverspillError(
            "--cpu-offload-gb does nothing with the prefetch backend: vLLM uses one offloader. Remove "
            "--cpu-offload-gb, or use it without --offload-backend and --offload-group-size"
        )
    if backend == "uva" and not has_uva:
        also = "; --offload-group-size does nothing with it" if prefetches else ""
        raise OverspillError(
            f"--offload-backend uva moves nothing to RAM without --cpu-offload-gb{also}. Give --cpu-offload-gb, or use "
            "--offload-backend prefetch with --offload-group-size"
        )
    if backend == "prefetch" and not prefetches:
        raise OverspillError(
            "--offload-backend prefetch moves nothing to RAM without --offload-group-size; give it, for example "
            "--offload-group-size 4, or leave weights to the plan"
        )


def _check_allocator(combined: Combined, environment: Mapping[str, str], checked: Checked) -> None:
    """Remove expandable segments: vLLM refuses a connector with them, but late and in one of torch's variables only."""
    if find(combined.flags, "--kv-transfer-config") is None:
        return
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        parts = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        left = [part for part in parts if not re.fullmatch(r"expandable_segments\s*:\s*True", part)]
        if left != parts:
            checked.environment[name] = ",".join(left) or None
            checked.warnings.append(
                f"{name}=expandable_segments:True is removed for vLLM: with it, KV could move to other memory while "
                "it is being copied to RAM"
            )


def _check_plugins(environment: Mapping[str, str], checked: Checked) -> None:
    """Add Overspill's plugins to VLLM_PLUGINS, which would otherwise exclude them."""
    if (given := environment.get("VLLM_PLUGINS")) is None:
        return
    names = [name for name in given.split(",") if name]
    missing = [name for name in PLUGINS if name not in names]
    if missing:
        checked.environment["VLLM_PLUGINS"] = ",".join([*names, *missing])
        left_out = " and ".join(missing)
        checked.warnings.append(f"VLLM_PLUGINS leaves out {left_out}, without which nothing goes to RAM; added")


def _check_kv_space(combined: Combined, environment: Mapping[str, str], checked: Checked, *, on_cpu: bool) -> None:
    """Remove variables that, on vLLM's CPU platform, win over --kv-cache-memory-bytes."""
    has_flag = any(matches(flag.name, "--kv-cache-memory-bytes") for flag in combined.flags)
    for name in CONTRADICTING_VARIABLES:
        if on_cpu and has_flag and environment.get(name):
            checked.environment[name] = None
            checked.warnings.append(f"{name} is removed for vLLM: it would override --kv-cache-memory-bytes")


def _check_exposure(combined: Combined, environment: Mapping[str, str], checked: Checked) -> None:
    host = combined.value("--host") or ""
    if not is_loopback(host) and find(combined.flags, "--api-key") is None and not environment.get("VLLM_API_KEY"):
        checked.warnings.append(
            f"--host {host} lets other machines in, and no --api-key is given: whoever reaches the port can use the "
            "model"
        )


def _check_drafts(combined: Combined) -> None:
    if '"suffix"' in (combined.value("--speculative-config") or "") and find_spec("arctic_inference") is None:
        raise CannotServe(
            "drafts by suffix need the package arctic-inference, which is not installed; install it with: "
            "pip install arctic-inference; or use --drafts ngram"
        )


ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# With these, vLLM does not derive the length from config.json as it stands.
_OTHER_CONFIG = ("--hf-overrides", "--hf-config-path", "--config-format")
_MISTRAL_CONFIG = "params.json"  # preferred by vLLM where both exist
# Rope types whose number of positions already includes the scaling (vllm/config/model.py, _get_and_verify_max_len).
_COUNTED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def require_positions(plan: Plan, combined: Combined, environment: Mapping[str, str], instead: str) -> None:
    """Raise if vLLM would refuse the length, unless the user insists on trying; `instead` is appended about --force,
    where that exists."""
    asked = combined.value("--max-model-len") or ""
    if asked.isdecimal() and (why := too_long(plan, int(asked), combined.given, environment)) is not None:
        raise CannotServe(f"{why}{instead}.")


def too_long(plan: Plan, length: int, given: Sequence[Flag], environment: Mapping[str, str]) -> str | None:
    """Why vLLM would refuse the length, or None; `given` are the user's vLLM flags."""
    is_allowed = environment.get(ALLOWED, "").strip().lower() in ("1", "true")  # as vllm/envs.py reads it
    is_other = any(matches(flag.name, name) for flag in given for name in _OTHER_CONFIG)
    limit = None if plan.wishes.force or is_allowed or is_other else longest_context(plan.facts)
    if limit is None or length <= limit:
        return None
    return (
        f"{length:,} tokens are more than the {limit:,} that {plan.facts.name} was made for, and vLLM refuses "
        f"that. Use --max-model-len {limit}. If its positions may be stretched, give vLLM its rope scaling with "
        f"--hf-overrides, or set {ALLOWED}=1"
    )


def longest_context(facts: ModelFacts) -> int | None:
    """Longest context vLLM accepts; None if unknown. A model not on this machine counts without rope scaling."""
    if facts.folder is None:
        return facts.max_position_embeddings
    folder = Folder(facts.folder)
    content = folder.content(CONFIG)
    if content is None or folder.content(_MISTRAL_CONFIG) is not None:
        return None
    config = Config.parse(content, where=f"{CONFIG} in {folder.where}")
    return int(facts.max_position_embeddings * _scaling(config))


def _scaling(config: Config) -> float:
    if "gemma3" in config.model_type:
        return 1.0
    scaling = 1.0
    for rope in _ropes(config.text):
        factor = rope.get("factor")
        if rope.get("rope_type", rope.get("type", "default")) not in _COUNTED and isinstance(factor, int | float):
            scaling = float(factor)
    return scaling


def _ropes(text: Mapping[str, object]) -> list[dict[str, Any]]:
    """Rope parameters: one set for the model, or one for each type of layer."""
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(found, dict):
        return []
    nested = [one for one in found.values() if isinstance(one, dict)]
    return nested or [found]


# Tokenizers come in too many kinds of files to list; these are certainly not tokenizers, any other file may be one.
_NO_TOKENIZER = (
    CONFIG, "generation_config.json", "hf_quant_config.json", "quantize_config.json", "preprocessor_config.json",
    "chat_template.jinja", "*.safetensors", "*.safetensors.index.json", "*.bin.index.json", "pytorch_model*.bin",
    "*.md", "LICENSE*", "NOTICE*", ".*",
)  # fmt: skip
# The config names tokenizer classes that need no files, and code that comes from elsewhere.
_NAMED = (b'"tokenizer_class"', b'"auto_map"')
# With these, vLLM looks for a tokenizer elsewhere, in another way, or not at all.
_OTHER_TOKENIZER = ("--skip-tokenizer-init", "--tokenizer", "--tokenizer-mode", "--hf-overrides", "--hf-config-path")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer or may have one."""
    if any(not any(fnmatch(entry.name, known) for known in _NO_TOKENIZER) for entry in folder.iterdir()):
        return True
    config = Folder(folder).content(CONFIG) or b""
    return any(named in config for named in _NAMED)


def require_tokenizer(model: str, plan: Plan, combined: Combined) -> None:
    """Refuse a model without a tokenizer, for which vLLM fails only after it has loaded half of itself."""
    folder = Path(os.path.expanduser(model))
    if plan.wishes.force or not folder.is_dir() or has_tokenizer(folder):
        return
    if any(matches(flag.name, name) for flag in combined.given for name in _OTHER_TOKENIZER):
        return
    raise CannotServe(
        f"there is no tokenizer in {folder}; copy its files there, name a model that has the same one with "
        "--tokenizer, or add --skip-tokenizer-init, and send and get token ids"
    )
