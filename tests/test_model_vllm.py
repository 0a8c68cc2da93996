"""What vLLM itself says about configs without weights, to the byte: groups, blocks, requests, weights."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overspill.figures import Origin
from overspill.launch.machine import cpu_platform
from overspill.model.defaults import DEFAULTS
from overspill.model.derived import SHAPES
from overspill.model.kv import CacheSettings, kv_geometry
from overspill.model.source import read_folder
from tests.model_configs import PUBLISHED, SMALL
from tests.model_tensors import describe_config

LENGTHS = (1, 100, 1000, 5000, 100_000)
# A small block and budget; then a float8 cache. Prefix caching is on, as Overspill needs it.
VARIANTS: dict[str, dict[str, Any]] = {
    "as is": {},
    "small": {"block_size": 32, "max_num_batched_tokens": 64},
    "fp8": {"kv_cache_dtype": "fp8"},
}
TINY = ("llama", "gemma3", "chunked-local", "mamba-hybrid", "gdn-hybrid", "mla")
Models = Callable[[str], Path]


def case(config: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    return {"config": config, "engine": {**engine, "enable_prefix_caching": True}, "lengths": LENGTHS}


CONFIGS = {**{name: make() for name, make in PUBLISHED.items()}, **SMALL}
CASES = {
    (name, variant): case(config, VARIANTS[variant])
    for name, config in CONFIGS.items()
    for variant in VARIANTS
    if name in SMALL or variant in ("as is", "small")
}
DERIVABLE = [name for name, config in CONFIGS.items() if config["architectures"][0] in SHAPES]


@pytest.fixture(scope="module")
def answers(models: Models) -> dict[tuple[str, str], dict[str, Any]]:
    """One process for all: importing vLLM takes longer than asking it."""
    tiny = {
        (name, "tiny"): case(json.loads((models(name) / "config.json").read_text()), {"dtype": "float32"})
        for name in TINY
    }
    asked = {**CASES, **tiny}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_specs"],
        input=json.dumps(list(asked.values())),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
        cwd=Path(__file__).parents[1],
    )
    return dict(zip(asked, json.loads(done.stdout), strict=True))


def settings_of(answer: dict[str, Any], engine: dict[str, Any]) -> CacheSettings:
    return CacheSettings(
        block_size=engine.get("block_size", 128),  # the CPU platform's own
        kv_cache_dtype=engine.get("kv_cache_dtype", "auto"),
        max_num_batched_tokens=answer["max_num_batched_tokens"],
        max_concurrent_batches=answer["max_concurrent_batches"],
        kernel_block_multiple=32,
        state_dtype=cpu_platform().state_dtype,
    )


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_vllm_says_the_same(answers: dict[tuple[str, str], dict[str, Any]], name: str, variant: str) -> None:
    answer = answers[name, variant]
    facts = describe_config(CONFIGS[name])
    assert "error" not in answer, answer["error"]
    geometry = kv_geometry(facts, settings_of(answer, VARIANTS[variant]))
    assert geometry.block_size == answer["block_size"]
    assert geometry.bytes_per_block == answer["bytes_per_block"]
    # With what a page holds, too: padding would hide it.
    groups = [
        [str(g.members[0].page.kind), [one.layer for one in g.members], g.members[0].page.content_bytes]
        for g in geometry.groups
    ]
    assert groups == answer["groups"]
    assert {str(n): geometry.request_bytes(n) for n in LENGTHS} == answer["request_bytes"]
    assert facts.dtype == answer["dtype"]


@pytest.mark.parametrize("name", DERIVABLE)
def test_derived_weights_are_the_parameters_that_vllm_makes(
    answers: dict[tuple[str, str], dict[str, Any]], name: str
) -> None:
    facts = describe_config(CONFIGS[name])
    assert facts.weights.source is Origin.DERIVED
    assert facts.weights.total_bytes == answers[name, "as is"]["weight_bytes"]


@pytest.mark.parametrize("name", TINY)
def test_measured_weights_are_the_parameters_that_vllm_makes(
    answers: dict[tuple[str, str], dict[str, Any]], models: Models, name: str
) -> None:
    facts = read_folder(models(name), dtype="float32")
    assert facts.weights.source is Origin.MEASURED
    assert facts.weights.total_bytes == answers[name, "tiny"]["weight_bytes"]


def test_config_defaults_are_those_of_transformers() -> None:
    from dataclasses import MISSING, fields

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type, defaults in DEFAULTS.items():
        known = {field.name: field.default for field in fields(CONFIG_MAPPING[model_type])}
        for key, value in defaults.items():
            assert known[key] is not MISSING, (model_type, key)
            assert known[key] == value, (model_type, key)
