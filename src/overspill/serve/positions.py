"""The longest context that vLLM accepts for a model; told before it starts, since vLLM says it much later."""

from collections.abc import Mapping
from typing import Any

from overspill.model.config import Config
from overspill.model.facts import ModelFacts
from overspill.model.folder import CONFIG, Folder
from overspill.planning.planner import Plan
from overspill.serve.command import Combined
from overspill.serve.errors import CannotServe
from overspill.serve.flags import matches

ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# With these, vLLM derives the length from something else than config.json as it stands.
_OTHER_CONFIG = ("--hf-overrides", "--hf-config-path", "--config-format")
_MISTRAL_CONFIG = "params.json"  # which vLLM prefers where there are both
# Rope types whose positions are counted with the scaling in them (vllm/config/model.py, _get_and_verify_max_len).
_COUNTED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def require_positions(plan: Plan, combined: Combined, environment: Mapping[str, str]) -> None:
    """Raises if vLLM would refuse the length, unless the user has said that it is to be tried."""
    asked = combined.value("--max-model-len") or ""
    is_allowed = environment.get(ALLOWED, "").strip().lower() in ("1", "true")  # as vllm/envs.py reads it
    is_other = any(matches(flag.name, name) for flag in combined.given for name in _OTHER_CONFIG)
    if plan.wishes.force or is_allowed or is_other or not asked.isdecimal():
        return
    limit = longest_context(plan.facts)
    if limit is not None and int(asked) > limit:
        raise CannotServe(
            f"{int(asked):,} tokens are more than the {limit:,} that {plan.facts.name} was made for, and vLLM refuses "
            f"that. Use --max-model-len {limit}. If its positions may be stretched, give vLLM its rope scaling with "
            f"--hf-overrides, or set {ALLOWED}=1; --force leaves it to vLLM."
        )


def longest_context(facts: ModelFacts) -> int | None:
    """None if it cannot be told. Of a model that is not on this machine, its positions without a scaling."""
    if facts.folder is None:
        return facts.max_position_embeddings
    folder = Folder(facts.folder)
    content = folder.content(CONFIG)
    if content is None or folder.content(_MISTRAL_CONFIG) is not None:
        return None
    config = Config.parse(content, where=f"{CONFIG} in {folder.where}")
    stated = config.text.get("model_max_length")  # Cohere's; it wins over the positions
    positions = stated if isinstance(stated, int) and stated > 0 else facts.max_position_embeddings
    return int(positions * _scaling(config))


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
    """One for the model, or one for each type of layer."""
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(found, dict):
        return []
    nested = [one for one in found.values() if isinstance(one, dict)]
    return nested or [found]
