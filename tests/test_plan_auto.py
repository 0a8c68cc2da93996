"""`--max-model-len auto`: the longest context that decodes fast enough, and what bounds it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from overspill.errors import CannotServe
from overspill.hardware import parse_gpu, parse_ram
from overspill.kv.errors import OverspillError
from overspill.launch.launch import Launch
from overspill.planning.arguments import vllm_args
from overspill.planning.auto import Bound
from overspill.planning.planner import Plan, make_plan
from overspill.planning.refusal import refusal
from overspill.planning.report import plan_as_json, plan_as_text
from overspill.planning.setup import Wishes
from tests.test_plan import LLAMA_8B, model

LLAMA_KV = 131072  # bytes a token: 2 (K, V) x 32 layers x 8 heads x 128 x 2 bytes
LINK = 0.85 * 31.5e9  # PCIe 4.0 x16


def written_model(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def auto(config: dict[str, Any], gpu: str, ram: str, min_speed: float = 10, **wishes: Any) -> Plan:
    return make_plan(model(config), parse_gpu(gpu), parse_ram(ram), Wishes(min_speed=min_speed, **wishes))


def named(config: dict[str, Any], gpu: str, ram: str, length: int, **wishes: Any) -> Plan:
    return make_plan(model(config), parse_gpu(gpu), parse_ram(ram), Wishes(max_model_len=length, **wishes))


def test_speed_bounds_the_context() -> None:
    """On an RTX 4090 a step may take 100 ms: 1 for the step itself, and 99 in which 2.65 GB cross the link."""
    made = auto(LLAMA_8B, "rtx4090", "64GiB")
    assert made.auto is not None and made.auto.bound is Bound.SPEED and made.chosen is not None
    on_gpu_tokens = made.chosen.kv.resident_bytes / LLAMA_KV - 16  # but for vLLM's null block
    by_hand = on_gpu_tokens + (0.1 - 0.00101) * LINK / LLAMA_KV
    assert by_hand - 1024 < made.max_model_len <= by_hand
    assert made.max_model_len % 1024 == 0
    assert made.chosen.decode_tokens_per_s.value >= 10
    longer = named(LLAMA_8B, "rtx4090", "64GiB", made.max_model_len + 1024)
    assert longer.chosen is not None and longer.chosen.decode_tokens_per_s.value < 10
    full = named(LLAMA_8B, "rtx4090", "64GiB", 131072)
    assert full.chosen is not None and made.auto.longest_speed == full.chosen.decode_tokens_per_s.value
    assert "longer ones decode at less than 10 (--min-speed); 131,072 tokens fit, at 2.1 tokens/s" in plan_as_text(made)


def test_the_plan_is_that_of_the_length_it_took() -> None:
    made = auto(LLAMA_8B, "rtx4090", "64GiB")
    same = named(LLAMA_8B, "rtx4090", "64GiB", made.max_model_len)
    assert made.chosen is not None and made.chosen == same.chosen
    assert vllm_args(made, made.chosen)[:2] == ["--max-model-len", str(made.max_model_len)]
    written = plan_as_json(made)
    assert written["auto"]["bound"] == "speed" and written["auto"]["max_model_len"] == written["max_model_len"]
    assert written["auto"]["why"] in plan_as_text(made)
    assert plan_as_json(same)["auto"] is None


def test_the_models_limit_bounds_the_context() -> None:
    made = auto(LLAMA_8B, "h200", "64GiB")
    assert made.auto is not None and made.auto.bound is Bound.MODEL and made.max_model_len == 131072
    assert "the model's limit" in plan_as_text(made)
    slower = auto(LLAMA_8B, "rtx4090", "64GiB", min_speed=2)
    assert slower.max_model_len == 131072, "a context of 128k decodes at 2.1 tokens/s"


def test_memory_bounds_the_context() -> None:
    made = auto(LLAMA_8B, "rtx4090", "4GiB")
    assert made.auto is not None and made.auto.bound is Bound.MEMORY
    assert made.longest_context - 1024 < made.max_model_len <= made.longest_context
    assert "no more fit in this memory" in plan_as_text(made)


def test_a_gpu_that_is_too_slow_keeps_what_it_holds() -> None:
    """Shorter contexts would gain nothing: the GPU's own memory is what is slow."""
    made = auto(LLAMA_8B, "rtx4090", "64GiB", min_speed=80)
    assert made.auto is not None and made.auto.bound is Bound.GPU and made.chosen is not None
    assert made.chosen.name == "everything on the GPU" and made.chosen.decode_tokens_per_s.value < 80
    assert named(LLAMA_8B, "rtx4090", "64GiB", made.max_model_len + 1024).chosen.name != "everything on the GPU"  # type: ignore[union-attr]
    assert [one for one in made.warnings if "no length reaches 80 (--min-speed)" in one]
    assert plan_as_text(made).count("--max-model-len auto chooses") == 1


def test_weights_in_ram_that_are_too_slow_are_refused() -> None:
    with pytest.raises(
        CannotServe, match=r"does not reach 10 tokens/s with any context: even 1,024 tokens decode at 2.*RAM"
    ):
        auto(LLAMA_8B, "8GiB", "64GiB")
    assert auto(LLAMA_8B, "8GiB", "64GiB", min_speed=2).max_model_len > 1024, "as the refusal advises"


@pytest.mark.parametrize("gpu", ["6GiB", "8GiB", "10GiB", "12GiB"])
def test_the_speed_that_a_refusal_advises_can_be_had(gpu: str) -> None:
    """It was rounded up to one digit, or written as 1e+02."""
    with pytest.raises(CannotServe) as refused:
        auto(LLAMA_8B, gpu, "64GiB", min_speed=1e6)
    advised = re.search(r"Use --min-speed ([0-9.]+) for", str(refused.value))
    assert advised is not None and "e+" not in str(refused.value).partition("with any context")[2]
    assert auto(LLAMA_8B, gpu, "64GiB", min_speed=float(advised[1])).max_model_len >= 1024


def test_without_room_the_usual_refusal_says_why() -> None:
    made = auto(LLAMA_8B, "8GiB", "3GiB")
    assert made.auto is None and made.chosen is None
    assert "does not fit with 1024 tokens: it needs" in refusal(made)


def test_several_at_once_each_get_that_speed() -> None:
    one, four = auto(LLAMA_8B, "rtx4090", "64GiB"), auto(LLAMA_8B, "rtx4090", "64GiB", at_once=4)
    assert four.chosen is not None and four.chosen.at_once_tokens_per_s.value / 4 >= 10
    assert four.max_model_len < one.max_model_len


def test_a_launch_has_the_length_that_was_found(tmp_path: Path) -> None:
    folder = written_model(tmp_path, LLAMA_8B)
    given = {"max_model_len": "auto", "min_speed": "12", "gpu": "rtx4090", "ram": "64GiB"}
    launch = Launch.of(str(folder), given)
    assert launch.plan.auto is not None and launch.plan.auto.min_speed == 12
    assert launch.settings["max_model_len"] == launch.plan.max_model_len
    again = Launch.of(str(folder), {**launch.settings, "min_speed": None, "ram": "64GiB"})
    assert again.plan.chosen == launch.plan.chosen, "as a unit repeats it"


def test_a_speed_without_auto_is_refused(tmp_path: Path) -> None:
    folder = written_model(tmp_path, LLAMA_8B)
    with pytest.raises(OverspillError, match="--min-speed is for --max-model-len auto"):
        Launch.of(str(folder), {"min_speed": "12", "max_model_len": "8k", "gpu": "rtx4090", "ram": "64GiB"})


@pytest.mark.parametrize(("name", "bad", "why"), [
    ("min_speed", "0", "not a number of tokens/s"), ("min_speed", "fast", "write for example 10"),
    ("min_speed", "inf", "not a number"), ("max_model_len", "atuo", "131072 or 128k, or auto"),
])  # fmt: skip
def test_a_bad_speed_or_length_says_what_is_accepted(tmp_path: Path, name: str, bad: str, why: str) -> None:
    with pytest.raises(OverspillError, match=why):
        Launch.of(str(written_model(tmp_path, LLAMA_8B)), {"gpu": "rtx4090", name: bad})
