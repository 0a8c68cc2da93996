"""Which device a plan is for, and the RAM beside it."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from overspill.cli import app, main
from overspill.figures import Known, Origin, assumed, measured
from overspill.hardware import Gpu, detect, parse_gpu
from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.launch import machine
from overspill.launch.machine import find_device, plan_for, require_available, wishes_of
from overspill.launch.profiles import remember
from overspill.launch.vllm import Vllm, installed_vllm
from overspill.planning.arguments import vllm_args
from overspill.planning.drafts import parse_drafts, speculative_config
from overspill.planning.memory import Profile, fingerprint
from overspill.planning.refusal import refusal
from overspill.planning.report import plan_as_json, plan_as_text
from overspill.settings import plain, resolve
from tests.model_configs import llama_3_1_8b

GIB = 2**30
HERE = Vllm("0.32.0", is_cpu=False)
Has = Callable[..., None]


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Has:
    """Gives this machine GPUs, RAM and a vLLM."""

    def change(*gpus: Gpu, vllm: Vllm | None = HERE, ram: int = 40 * GIB) -> None:
        found = detect()
        there = replace(
            found.machine, ram_total_bytes=measured(ram), cgroup_limit_bytes=None, ram_available_bytes=measured(ram)
        )
        monkeypatch.setattr(machine, "detect", lambda: replace(found, machine=there, gpus=gpus))
        monkeypatch.setattr(machine, "installed_vllm", lambda: vllm)

    return change


def test_the_gpu_that_is_there_is_taken(has: Has) -> None:
    has(parse_gpu("h200"))
    found = find_device({})
    assert (found.platform.name, found.gpus[0].name) == ("cuda", "NVIDIA H200")
    assert found.ram_bytes.value == 36 * GIB and "less 4 GiB" in found.ram_bytes.note


@pytest.mark.parametrize("vllm", [None, HERE, Vllm("0.32.0", is_cpu=True)])
def test_cards_need_no_gpu(has: Has, llama_8b: Path, vllm: Vllm | None, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine without one was planned for first, and refused."""
    has(vllm=vllm)
    assert overspill_here("plan", str(llama_8b), "--max-model-len", "32k", "--cards") == 0
    told = capsys.readouterr().out
    assert told.startswith("model, 32,768 tokens, with 36 GiB of RAM") and "does not fit" not in told
    assert re.search(r"rtx4090 +23.5 GiB   on the GPU alone +41.0 t/s +7.4 s", told)
    assert overspill_here("plan", str(llama_8b), "--max-model-len", "32k", "--cards", "--json") == 0
    cards = {one["card"]: one for one in json.loads(capsys.readouterr().out)["cards"]}
    alone = plan_for(str(llama_8b), {"gpu": "l4", "max_model_len": 32768}).chosen
    assert alone is not None and cards["l4"]["decode_tokens_per_s"] == alone.decode_tokens_per_s.value
    assert overspill_here("plan", str(llama_8b), "--max-model-len", "auto", "--cards") == 2


def overspill_here(*words: str) -> int:
    with patch.object(sys, "argv", ["overspill", *words]), pytest.raises(SystemExit) as ended:
        main(lambda: app(list(words)))
    return int(ended.value.code or 0)


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_3_1_8b()))
    return folder


def test_a_gpu_that_is_stated_is_taken_whatever_is_installed(has: Has) -> None:
    has(vllm=Vllm("0.32.0", is_cpu=True))
    assert find_device({"gpu": "rtx4090", "ram": 8 * GIB}).platform.name == "cuda"


def test_without_a_gpu_vllms_cpu_build_is_planned_for(has: Has) -> None:
    has(vllm=Vllm("0.32.0", is_cpu=True))
    found = find_device({"device": "auto"})
    assert found.platform.name == "cpu" and found.gpus[0].total_bytes.value == 10 * GIB, "a quarter"
    assert found.ram_bytes.value == 26 * GIB, "what is left of 40, less 4 for the rest of the machine"
    assert find_device({"gpu_memory": 2 * GIB}).gpus[0].total_bytes.value == 2 * GIB
    assert find_device({"ram": 5 * GIB}).ram_bytes.value == 5 * GIB


def test_ram_left_to_the_machine_can_be_set(has: Has) -> None:
    has(parse_gpu("h200"))
    assert find_device({"ram_reserve": 10 * GIB}).ram_bytes.value == 30 * GIB
    assert "less 10 GiB" in (find_device({"ram_reserve": 10 * GIB}).ram_bytes.note or "")
    assert find_device({"ram_reserve": 10 * GIB, "ram": 35 * GIB}).ram_bytes.value == 35 * GIB, "given is given"
    has(vllm=Vllm("0.32.0", is_cpu=True))
    assert find_device({"ram_reserve": 10 * GIB}).ram_bytes.value == 20 * GIB, "a quarter plays the GPU's memory"


@pytest.mark.parametrize("setting", [{"gpus": "0,1"}, {"link": "25GB/s"}])
def test_what_is_about_gpus_is_refused_on_the_cpu(has: Has, setting: dict[str, str]) -> None:
    """It changed nothing, and nobody said so."""
    has(parse_gpu("rtx4090"))
    with pytest.raises(OverspillError, match="is about GPUs, and vLLM will run on the CPU"):
        find_device({"device": "cpu", **setting})


@pytest.mark.parametrize("vllm", [HERE, None])
def test_without_a_gpu_other_builds_are_not(has: Has, vllm: Vllm | None) -> None:
    has(vllm=vllm)
    with pytest.raises(OverspillError, match="State one with --gpu"):
        find_device({"device": "auto"})


def test_a_device_that_is_asked_for_is_taken(has: Has) -> None:
    has(parse_gpu("h200"))
    assert find_device({"device": "cpu"}).platform.name == "cpu"
    has(vllm=Vllm("0.32.0", is_cpu=True))
    with pytest.raises(OverspillError, match="no GPU to plan for"):
        find_device({"device": "cuda"})
    with pytest.raises(OverspillError, match="leave one of them out"):
        find_device({"device": "cpu", "gpu": "rtx4090"})


def test_a_stand_in_larger_than_ram_is_refused(has: Has) -> None:
    has()
    with pytest.raises(OverspillError, match="--gpu-memory is 64 GiB, and 40 GiB of RAM is available"):
        find_device({"device": "cpu", "gpu_memory": 64 * GIB})


def test_more_ram_than_the_machine_has_is_refused(has: Has) -> None:
    """It was planned with, and the engine failed after it had started."""
    has(parse_gpu("h200"))
    said = "--ram 200 GiB needs 200 GiB of RAM, and this machine has 40 GiB. Use --ram 36GiB"
    with pytest.raises(OverspillError, match=re.escape(said)):
        find_device({"ram": 200 * GIB})
    assert find_device({"ram": 40 * GIB}).ram_bytes.value == 40 * GIB
    assert find_device({"gpu": "h200", "ram": 200 * GIB}).ram_bytes.value == 200 * GIB, "another machine's"


def test_ram_in_place_of_a_gpus_memory_counts_too(has: Has) -> None:
    has(vllm=Vllm("0.32.0", is_cpu=True))
    with pytest.raises(OverspillError, match=r"beside 10 GiB in place .*needs 45 GiB.* --ram 26GiB"):
        find_device({"ram": 35 * GIB})
    with pytest.raises(OverspillError, match="needs 41 GiB of RAM, and this machine has 40 GiB"):
        find_device({"device": "cpu", "ram": 40 * GIB, "gpu_memory": GIB})
    assert find_device({"ram": 30 * GIB}).ram_bytes.value == 30 * GIB


def test_a_cgroup_that_allows_less_bounds_ram(has: Has, tmp_path: Path) -> None:
    has(parse_gpu("h200"))
    found = machine.detect()
    limited = replace(found.machine, cgroup_limit_bytes=measured(16 * GIB, "the cgroup limit /x/memory.max"))
    with pytest.raises(OverspillError, match=r"the cgroup limit /x/memory\.max allows 16 GiB"):
        find_device({"ram": 20 * GIB}, replace(found, machine=limited))


def test_a_start_needs_the_ram_of_its_plan_now(has: Has, llama: Path) -> None:
    has(vllm=Vllm("0.32.0", is_cpu=True))
    here = machine.detect().machine
    made = plan_for(str(llama), {"gpu_memory": GIB, "ram": 20 * GIB, "offload_ram": 8 * GIB, "max_model_len": 4096})
    require_available(here, made)
    busy = replace(here, ram_available_bytes=measured(10 * GIB))
    with pytest.raises(OverspillError, match=r"takes 12 GiB of RAM.*10 GiB is available now.*--ram 5GiB.*--force"):
        require_available(busy, made)
    some = replace(here, ram_available_bytes=measured(13 * GIB))
    require_available(some, made)
    # The engine refuses to take what it is told to leave free.
    careful = replace(made, wishes=replace(made.wishes, kv_options="reserve_bytes=6GiB"))
    with pytest.raises(OverspillError, match=r"of which 8 GiB must leave 6 GiB free; 13 GiB is available now"):
        require_available(some, careful)


def test_settings_of_spill_reach_the_connector(has: Has, llama: Path, tmp_path: Path) -> None:
    has(vllm=Vllm("0.32.0", is_cpu=True))
    small = {
        "gpu_memory": 8 << 20, "ram": 20 * GIB, "offload_ram": 0, "max_model_len": 8192, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.toml").write_text('spill_compute = "auto"\n')
    values = resolve(
        {"spill_compute": "gpu"}, {"OVERSPILL_SPILL_THREADS": "6"}, tmp_path / "config.toml", defaults=small
    )
    made = plan_for(str(llama), plain(values) | {"kv_options": "spill_compute=auto,spill_share=1"})
    assert made.chosen is not None and made.chosen.kv.spilled_bytes
    arguments = vllm_args(made, made.chosen)
    given = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    options = Options.parse(given)
    assert (options.spill_compute, options.spill_threads, options.spill_share) == ("gpu", 6, 1.0)
    assert wishes_of({}).kv_options == "", "nothing is passed on that was not given"


def test_the_cpu_is_stated_or_assumed(has: Has, monkeypatch: pytest.MonkeyPatch) -> None:
    has(parse_gpu("h200"))
    monkeypatch.setattr(machine, "cpu_attention", lambda threads: measured(threads or 5))
    assert find_device({}).cpu_attention.value == 5
    assert find_device({"spill_threads": 3}).cpu_attention.value == 3
    assert find_device({"kv_options": "spill_threads=2"}).cpu_attention.value == 2
    assert find_device({"cpu_attention": "80GB/s", "gpu": "rtx4090"}).cpu_attention.value == 80 * 10**9
    assert find_device({"gpu": "rtx4090"}).cpu_attention.origin is Origin.ASSUMED, "another machine's"
    has(vllm=Vllm("0.32.0", is_cpu=True))
    assert not find_device({}).cpu_attention.value, "there is no second reader beside the CPU"


def test_a_plan_that_spills_has_the_cpu_measured(
    has: Has, llama_8b: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    has(replace(parse_gpu("rtx4090"), uuid="GPU-1"), ram=64 * GIB)
    kept, threads = [10**9], []

    def measure(number: int | None) -> bool:
        threads.append(number)
        kept[0] = 80 * 10**9
        return True

    def known(number: int | None) -> Known[int]:
        return measured(kept[0]) if threads else assumed(kept[0])

    monkeypatch.setattr(machine, "measure_attention", measure)
    monkeypatch.setattr(machine, "cpu_attention", known)
    assert not plan_for(str(llama_8b), {"max_model_len": 8192}).chosen.kv.spilled_bytes and not threads
    long = {"max_model_len": 131072, "spill_threads": 3}
    stated = plan_for(str(llama_8b), {**long, "cpu_attention": "20GB/s"})
    assert stated.chosen is not None and stated.chosen.kv.spilled_bytes and not threads, "what is stated is known"
    made = plan_for(str(llama_8b), long)
    assert threads == [3] and made.cpu_attention == measured(80 * 10**9)
    assert plan_for(str(llama_8b), long).chosen is not None and threads == [3], "once"
    there = {**long, "gpu": "rtx4090", "ram": 64 * GIB}
    assert plan_for(str(llama_8b), there).cpu_attention is not None and threads == [3], "another machine's"


def test_the_vllm_here_is_found_without_loading_it() -> None:
    found = installed_vllm()
    assert found is not None and found.version.startswith("0.32")


def test_without_a_gpu_a_refusal_does_not_speak_of_one(has: Has, llama: Path) -> None:
    """It told of "GPU memory", of "this GPU" and of cards to buy, on a machine that was planned for without one."""
    has(vllm=Vllm("0.32.0", is_cpu=True))
    for gpu_memory in (4 << 20, 1 << 20):
        made = plan_for(str(llama), {"gpu_memory": gpu_memory, "max_model_len": 32768, "ram": 8 * GIB})
        assert made.recommended is None
        for said in (refusal(made), plan_as_text(made)):
            assert not re.search(r"GPU memory|this GPU|the GPU|[Cc]ard that|No card", said), said
            assert "Planned for vLLM's CPU build" in said and "--gpu rtx4090" in said
            assert "of RAM in place of a GPU's memory (--gpu-memory)" in said
        assert "cards" not in plan_as_json(made)


def test_without_a_gpu_nothing_is_said_to_be_on_one(has: Has, llama: Path) -> None:
    has(vllm=Vllm("0.32.0", is_cpu=True))
    for gpu_memory, way in ((40 << 20, "everything in memory"), (8 << 20, "KV spilled to RAM")):
        asked = {"gpu_memory": gpu_memory, "max_model_len": 8192, "ram": 8 * GIB, "dtype": "bfloat16"}
        made = plan_for(str(llama), asked)
        text = plan_as_text(made)
        assert f"* {way}" in text and "on the GPU" not in text and "Planned for vLLM's CPU build" in text
        assert "link" not in text and "link_bytes_per_s" not in plan_as_json(made)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_cpu_without_bf16_computes_in_float32(
    has: Has, llama: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    has(vllm=Vllm("0.32.0", is_cpu=True))
    monkeypatch.setattr(machine, "computes_bf16", lambda: has_bf16)
    made = plan_for(str(llama), {"max_model_len": 4096})
    assert made.chosen is not None
    arguments = vllm_args(made, made.chosen)
    given = arguments[arguments.index("--dtype") + 1] if "--dtype" in arguments else None
    assert given == (None if has_bf16 else "float32")
    assert any("cannot compute in bfloat16" in line for line in made.warnings) is not has_bf16
    asked = plan_for(str(llama), {"max_model_len": 4096, "dtype": "bfloat16"})
    assert asked.facts.dtype == "bfloat16", "the user's own choice wins"


def test_a_plan_takes_what_an_earlier_run_measured(
    has: Has, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = replace(parse_gpu("24GiB"), uuid="GPU-1", driver_version="580.1")
    has(gpu)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    settings: dict[str, Any] = {"max_num_batched_tokens": 4096, "max_model_len": 4096}
    before = plan_for(str(llama), settings)
    assert before.recommended is not None and before.recommended.overheads.total.origin is Origin.ASSUMED
    key = fingerprint(
        before.facts, gpu, vllm_version=HERE.version, max_num_batched_tokens=4096, max_num_seqs=64,
        enforce_eager=False, kv_cache_dtype="auto",
    )  # fmt: skip
    seen = Profile(non_torch_bytes=GIB, activation_bytes=GIB, graph_bytes=GIB, context_bytes=GIB)
    remember(key, seen)
    after = plan_for(str(llama), settings)
    assert after.recommended is not None and after.recommended.overheads.total.value == 3 * GIB
    assert after.recommended.overheads.graph_bytes.origin is Origin.MEASURED
    assert plan_for(str(llama), {**settings, "max_num_seqs": 8}).budget.context_bytes.value < GIB


@pytest.mark.parametrize(
    ("drafts", "config"),
    [
        ("off", None),
        ("ngram", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ("ngram_gpu:8", {"method": "ngram_gpu", "num_speculative_tokens": 8, "prompt_lookup_min": 2,
                         "prompt_lookup_max": 4}),
        ("suffix:1", {"method": "suffix", "num_speculative_tokens": 1}),
    ],
)  # fmt: skip
def test_drafts_reach_vllm(drafts: str, config: dict[str, object] | None) -> None:
    written = speculative_config(parse_drafts(drafts))
    assert (json.loads(written) if written is not None else None) == config


@pytest.mark.parametrize("drafts", ["", "eagle", "ngram:", "ngram:0", "ngram:17", "ngram:x", "off:4"])
def test_other_drafts_are_refused(drafts: str) -> None:
    with pytest.raises(OverspillError, match="none of off, ngram, ngram_gpu, suffix"):
        parse_drafts(drafts)
