"""Tables of recipes.md: known models on known cards, as the planner sees them. Arithmetic only; docs/generate.py writes
them into the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from overspill.hardware import parse_gpu, parse_ram
from overspill.hardware.cards import find_card
from overspill.hardware.cpu import assumed_attention
from overspill.kv.sizes import GiB, format_size
from overspill.model.checkpoint import Tensor
from overspill.model.config import Config
from overspill.model.derived import derive_tensors
from overspill.model.description import describe
from overspill.model.facts import ModelFacts
from overspill.model.kv import kv_geometry
from overspill.planning.attempts import Attempt, attempts, fits, longest_context
from overspill.planning.planner import Plan, make_plan
from overspill.planning.setup import CUDA, Setup, Wishes, nothing_measured
from overspill.planning.ways import Way
from tests import model_configs as shapes

Row = tuple[str, ...]
Table = list[Row]
"""The first row is the head."""

# Left to the rest of the machine, of the RAM that is built in.
_KEPT_GIB = 8


def _qwen3_4b() -> dict[str, Any]:
    return {
        **shapes.qwen3_8b(), "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
    }  # fmt: skip


def _gemma_3_12b() -> dict[str, Any]:
    small = shapes.gemma_3_4b()
    text = {
        "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    }  # fmt: skip
    return {**small, "text_config": {**small["text_config"], **text}}


def _mistral_small_24b() -> dict[str, Any]:
    return {
        **shapes.mistral_7b_v0_1(), "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "sliding_window": None, "vocab_size": 131072,
    }  # fmt: skip


def _llama_3_3_70b() -> dict[str, Any]:
    return {
        **shapes.llama_3_1_8b(), "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_hidden_layers": 80,
    }  # fmt: skip


class Model(NamedTuple):
    name: str
    repository: str
    config: Callable[[], dict[str, Any]]
    bits: int = 16
    """Of the layers' matrices; 4 in groups of 128 as AutoAWQ writes them, 8 as FP8 in blocks of 128 x 128."""


LLAMA_8B = Model("Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", shapes.llama_3_1_8b)
LLAMA_8B_4 = LLAMA_8B._replace(
    name="Llama-3.1-8B, 4 bits", repository="hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", bits=4
)
QWEN_4B = Model("Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507", _qwen3_4b)
QWEN_8B = Model("Qwen3-8B", "Qwen/Qwen3-8B", shapes.qwen3_8b)
OLMO_7B = Model("OLMo-2-7B", "allenai/OLMo-2-1124-7B-Instruct", shapes.olmo_2_7b)
GEMMA_4B = Model("Gemma-3-4B", "google/gemma-3-4b-it", shapes.gemma_3_4b)
GEMMA_12B = Model("Gemma-3-12B", "google/gemma-3-12b-it", _gemma_3_12b)
GPT_OSS = Model("gpt-oss-20b", "openai/gpt-oss-20b", shapes.gpt_oss_20b)
MISTRAL = Model("Mistral-Small-24B", "mistralai/Mistral-Small-24B-Instruct-2501", _mistral_small_24b)
MISTRAL_4 = MISTRAL._replace(
    name="Mistral-Small-24B, 4 bits", repository="stelterlab/Mistral-Small-24B-Instruct-2501-AWQ", bits=4
)
CODER = Model("Qwen3-Coder-30B-A3B", "Qwen/Qwen3-Coder-30B-A3B-Instruct", shapes.qwen3_coder_30b_a3b)
CODER_8 = CODER._replace(name="Qwen3-Coder-30B-A3B, FP8", repository="Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8", bits=8)
CODER_4 = CODER._replace(
    name="Qwen3-Coder-30B-A3B, 4 bits", repository="cpatonn/Qwen3-Coder-30B-A3B-Instruct-AWQ-4bit", bits=4
)
LLAMA_70B = Model("Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct", _llama_3_3_70b)
LLAMA_70B_4 = LLAMA_70B._replace(
    name="Llama-3.3-70B, 4 bits", repository="casperhansen/llama-3.3-70b-instruct-awq", bits=4
)


@cache
def facts_of(model: Model) -> ModelFacts:
    raw = model.config()
    if model.bits == 16:
        return describe(Config(raw, where="config.json"), None, name=model.name)
    written = Config(raw, where="config.json")
    tensors = []
    for tensor in derive_tensors(written, dtype="bfloat16", is_tied=False, quantization=None):
        is_matrix = re.search(r"layers\..*_proj\.weight$", tensor.name)
        tensors += _quantised(tensor, model.bits) if is_matrix else [tensor]
    method = {4: {"quant_method": "awq", "bits": 4, "group_size": 128}, 8: {"quant_method": "fp8"}}[model.bits]
    return describe(Config({**raw, "quantization_config": method}, where="config.json"), tensors, name=model.name)


def _quantised(tensor: Tensor, bits: int) -> list[Tensor]:
    name, (out, inner) = tensor.name.removesuffix(".weight"), tensor.shape
    if bits == 8:
        scales = (-(-out // 128), -(-inner // 128))
        return [
            Tensor(name=f"{name}.weight", dtype="F8_E4M3", shape=(out, inner)),
            Tensor(name=f"{name}.weight_scale_inv", dtype="BF16", shape=scales),
        ]
    return [
        Tensor(name=f"{name}.qweight", dtype="I32", shape=(inner, out // 8)),
        Tensor(name=f"{name}.qzeros", dtype="I32", shape=(inner // 128, out // 8)),
        Tensor(name=f"{name}.scales", dtype="F16", shape=(inner // 128, out)),
    ]


class Machine(NamedTuple):
    card: str
    ram_gib: int
    """Built in."""

    @property
    def usable_ram(self) -> str:
        return f"{self.ram_gib - _KEPT_GIB}GiB"

    @property
    def text(self) -> str:
        card = find_card(self.card)
        assert card is not None
        name = re.sub("NVIDIA |GeForce | Generation", "", card.name)
        return f"{name} ({card.marketed_gb} GB), {self.ram_gib} GB"


SMALL, MEDIUM = Machine("rtx4080", 32), Machine("rtx4090", 64)
LARGE, LARGEST = Machine("rtx6000ada", 128), Machine("h100-pcie", 256)

MACHINES = {
    SMALL: (QWEN_4B, GEMMA_4B, LLAMA_8B_4),
    MEDIUM: (LLAMA_8B, QWEN_8B, GPT_OSS, MISTRAL_4, CODER_4),
    LARGE: (LLAMA_8B, GEMMA_12B, CODER_8, LLAMA_70B_4),
    LARGEST: (LLAMA_8B, MISTRAL, CODER, LLAMA_70B_4),
}
# From what the GPU holds to the model's own limit.
LENGTHS = {
    (LLAMA_8B, MEDIUM): (32, 48, 64, 96, 128),
    (CODER_4, MEDIUM): (32, 52, 64, 128, 256),
    (LLAMA_70B_4, LARGE): (8, 16, 32, 64),
}
# Weights larger than the card, or nearly: a context that people want, and the RAM they have.
TOO_LARGE = (
    (OLMO_7B, SMALL, 4),
    (LLAMA_8B, SMALL, 16),
    (QWEN_8B, SMALL, 16),
    (GPT_OSS, SMALL, 32),
    (MISTRAL_4, SMALL, 16),
    (CODER_4, SMALL, 32),
    (GEMMA_12B, MEDIUM, 16),
    (MISTRAL, MEDIUM, 16),
    (CODER_8, MEDIUM, 32),
    (CODER, MEDIUM._replace(ram_gib=128), 32),
    (LLAMA_70B_4, MEDIUM, 16),
    (MISTRAL, LARGE, 32),
    (LLAMA_70B, LARGE, 16),
    (LLAMA_70B, LARGEST, 16),
)
# The same model in fewer bits, on the same card.
SMALLER = (
    (MEDIUM, 16, (MISTRAL, MISTRAL_4)),
    (MEDIUM._replace(ram_gib=128), 32, (CODER, CODER_8, CODER_4)),
    (LARGEST, 16, (LLAMA_70B, LLAMA_70B_4)),
)
CONVERSATION = 32
POOLS_GIB = (16, 32, 64, 128, 256)


def contexts() -> dict[Machine, Table]:
    """How far a model goes on a card, alone and with RAM. Those that do not fit alone are left to `too_large`."""
    head = ("model", "weights", "longest on the GPU alone", "longest with RAM", "KV in RAM for it", "RAM for idle KV",
            "decode", "first token", "command")  # fmt: skip
    return {machine: [head, *(_context(model, machine) for model in models)] for machine, models in MACHINES.items()}


def _context(model: Model, machine: Machine) -> Row:
    alone, longest = longest_alone(model, machine), longest_with_ram(model, machine)
    way = plan_of(model, machine, longest).recommended
    assert alone and way is not None, f"{model.name} belongs to those that are too large for {machine}"
    sizes = (_size(way.kv.spilled_bytes), _size(way.offload_bytes))
    return (model.name, _weights(model), _length(alone), _length(longest), *sizes, *_speeds(way),
            _command(model, longest))  # fmt: skip


def lengths() -> Table:
    """What each further token costs."""
    rows: Table = [("model", "card, RAM", "context", "KV in RAM", "least RAM", "decode", "first token")]
    for (model, machine), asked in LENGTHS.items():
        for length in asked:
            plan = plan_of(model, machine, length * 1024)
            way = plan.recommended
            assert way is not None and plan.least_ram_bytes is not None
            least = _size(plan.least_ram_bytes)
            rows.append((model.name, machine.text, f"{length}k", _size(way.kv.spilled_bytes), least, *_speeds(way)))
    return rows


def too_large() -> Table:
    rows: Table = [
        ("model", "weights", "card, RAM", "context", "recommended", "weights in RAM", "KV in RAM", "decode",
         "first token", "command"),
    ]  # fmt: skip
    for model, machine, length in TOO_LARGE:
        plan = plan_of(model, machine, length * 1024)
        start = (model.name, _weights(model), machine.text, f"{length}k")
        if (way := plan.recommended) is None:
            need = _size(plan.least_ram_bytes) if plan.least_ram_bytes is not None else "more than any amount"
            rows.append((*start, f"nothing: {need} of RAM would do", *("–",) * 5))
            continue
        sizes = (_size(way.weights.ram_bytes), _size(way.kv.spilled_bytes))
        rows.append((*start, way.name, *sizes, *_speeds(way), _command(model, length * 1024)))
    return rows


def smaller() -> Table:
    rows: Table = [("card, RAM", "context", "model", "weights", "recommended", "decode", "first token")]
    for machine, length, models in SMALLER:
        for model in models:
            way = plan_of(model, machine, length * 1024).recommended
            assert way is not None
            rows.append((machine.text, f"{length}k", model.name, _weights(model), way.name, *_speeds(way)))
    return rows


def idle() -> Table:
    """RAM for conversations that wait, of models whose layers all keep all tokens."""
    rows: Table = [
        ("model", "KV of a token", f"of {CONVERSATION}k tokens", *(f"fit in {size} GiB" for size in POOLS_GIB)),
    ]
    for model in (QWEN_4B, LLAMA_8B, QWEN_8B, MISTRAL, CODER, LLAMA_70B):
        geometry = kv_geometry(facts_of(model))
        assert len(geometry.groups) == 1, "windows are counted otherwise"
        whole = geometry.request_bytes(CONVERSATION * 1024)
        fitting = (f"{size * GiB // whole}" for size in POOLS_GIB)
        rows.append((model.name, f"{geometry.kv_bytes_per_token:,} B", _size(whole), *fitting))
    return rows


def formula() -> str:
    """The sum by hand, with a model's numbers in it: those of a pool that was once given in blocks."""
    facts, blocks = facts_of(CODER), 50_000
    geometry = kv_geometry(facts)
    token, block = geometry.kv_bytes_per_token, geometry.block_size
    assert 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * 2 == token
    pool = f"{blocks:,} blocks x {block} tokens x {token:,} bytes"
    total = blocks * block * token
    lines = (
        "KV of a token = 2 (keys and values) x layers x KV heads x head size x 2 bytes (bfloat16)",
        f"              = 2 x {facts.num_layers} x {facts.num_kv_heads} x {facts.head_dim} x 2 = {token:,} bytes",
        "",
        f"{pool} = {total:,} bytes = {total / 1e9:.1f} GB = {total / GiB:.1f} GiB",
        f"{blocks * block:,} tokens, {blocks * block // 1024 // CONVERSATION} conversations of {CONVERSATION}k",
    )
    return "".join(f"{line}\n" for line in lines)


@cache
def plan_of(model: Model, machine: Machine, length: int) -> Plan:
    # KV in FP8 is left out: it changes tokens, and the tables are of ways that do not.
    wishes = Wishes(max_model_len=length, kv_cache_dtype="auto", ram_given=False)
    ram, cpu = parse_ram(machine.usable_ram), assumed_attention()
    return make_plan(facts_of(model), parse_gpu(machine.card), ram, wishes, cpu_attention=cpu)


def longest_alone(model: Model, machine: Machine) -> int:
    """For certain: where what is only assumed of the card's memory takes more than it should, too."""
    limit = facts_of(model).max_position_embeddings
    rooms = [
        (one.geometry, one.available_bytes - one.overheads.doubt_bytes)
        for one in _attempts(model, machine.card)
        if not one.weights.ram_bytes
    ]
    return max((geometry.longest_context(max(0, room), limit) for geometry, room in rooms), default=0)


def longest_with_ram(model: Model, machine: Machine) -> int:
    setup, tried = _setup(model, machine), _attempts(model, machine.card)
    limit = setup.max_model_len
    if any(fit.ram_bytes <= setup.ram_bytes.value for fit in fits(setup, tried, limit)):
        return limit
    return longest_context(setup, tried)


@cache
def _attempts(model: Model, card: str) -> tuple[Attempt, ...]:
    """All that change no token; what can be tried does not depend on RAM."""
    setup = _setup(model, Machine(card, 64))
    return tuple(one for one in attempts(setup, setup.budget()) if one.is_exact)


def _setup(model: Model, machine: Machine) -> Setup:
    return Setup(
        facts=facts_of(model), gpu=parse_gpu(machine.card), ram_bytes=parse_ram(machine.usable_ram), wishes=Wishes(),
        platform=CUDA, profiles=nothing_measured,
    )  # fmt: skip


def _weights(model: Model) -> str:
    return format_size(facts_of(model).weights.total_bytes)


def _size(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else "–"


def _speeds(way: Way) -> tuple[str, str]:
    speed, wait = way.decode_tokens_per_s.value, way.ttft_s.value
    return f"{speed:.2g} t/s" if speed < 100 else f"{speed:.0f} t/s", f"{wait:.1f} s" if wait < 10 else f"{wait:.0f} s"


def _length(tokens: int) -> str:
    """As the flags take it: in 1,024 tokens, rounded down."""
    return f"{tokens // 1024}k"


def _command(model: Model, length: int) -> str:
    return f"`overspill serve {model.repository} --max-model-len {_length(length)}`"
