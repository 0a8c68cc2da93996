"""`overspill.plan`, `engine_args` and `LLM`: the plan of the command line, on the real engine, in Python's words."""

import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm

import overspill
from overspill.kv.plugin import check_engine
from overspill.kv.sizes import GiB, MiB
from overspill.planning.report import plan_as_json
from overspill.settings import SETTINGS, SettingsError
from tests.engine import random_prompt, sampling, stop_engines
from tests.zygote import cold

# As much as plays a GPU's memory here that a context of 4,096 tokens spills.
SMALL: dict[str, Any] = {
    "device": "cpu", "gpu_memory": "8MiB", "ram": "4GiB", "dtype": "float32", "max_model_len": "4k", "offload_ram": 0,
    "enforce_eager": True,
}  # fmt: skip
PROMPTS = [random_prompt(seed, length) for seed, length in ((1, 3900), (2, 2500), (3, 300))]


@pytest.fixture(autouse=True)
def _no_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    for name in [name for name in os.environ if name.startswith("OVERSPILL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def engines() -> Iterator[None]:
    yield
    stop_engines()


def tokens(llm: vllm.LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[Any]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling(16), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], outputs


def with_room(llama: Path) -> list[list[int]]:
    """vLLM alone, with a cache that holds every prompt."""
    llm = vllm.LLM(
        str(llama), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=4096,
        max_num_batched_tokens=2048, kv_cache_memory_bytes=64 * MiB,
    )  # fmt: skip
    found, _ = tokens(llm, PROMPTS)
    del llm
    stop_engines()
    return found


# A plan.


def test_importing_overspill_loads_no_engine() -> None:
    code = "import sys, overspill; overspill.plan; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_plan_is_the_one_of_the_command_line(llama: Path) -> None:
    flags = ["--max-model-len", "4k", "--gpu", "24GiB", "--ram", "64GiB", "--max-num-seqs", "8", "--json"]
    command = [sys.executable, "-m", "overspill", "plan", str(llama), *flags]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    made = overspill.plan(str(llama), max_model_len="4k", gpu="24GiB", ram="64GiB", max_num_seqs=8)
    told = json.loads(answer.stdout)
    assert told.pop("settings")["ram"] == {"value": 64 * GiB, "origin": "flag"}
    assert told.pop("too_long") is None
    assert plan_as_json(made) == told


def test_sizes_may_be_numbers_or_strings(llama: Path) -> None:
    written = overspill.plan(str(llama), max_model_len="4k", gpu="24GiB", gpu_memory="16GiB", ram="64GiB")
    numbers = overspill.plan(str(llama), max_model_len=4096, gpu="24GiB", gpu_memory=16 * GiB, ram=64 * GiB)
    assert plan_as_json(written) == plan_as_json(numbers) and written.max_model_len == 4096


def test_every_setting_of_the_command_is_one_of_the_function() -> None:
    from overspill.cli.launching import plan as command

    names = {setting.name for setting in SETTINGS} & set(inspect.signature(command).parameters)
    for name in names:
        with pytest.raises(overspill.OverspillError) as raised:
            overspill.plan("/nonexistent/model", **{name: object()})  # type: ignore[arg-type]
        assert str(raised.value).startswith(f"{name}: "), name


def test_the_environment_is_asked_as_by_the_command(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_MAX_MODEL_LEN", "2k")
    assert overspill.plan(str(llama), gpu="24GiB", ram="64GiB").max_model_len == 2048
    assert overspill.plan(str(llama), gpu="24GiB", ram="64GiB", max_model_len=1024).max_model_len == 1024


def test_importing_the_planner_leaves_the_function_alone() -> None:
    import overspill.launch.machine

    assert overspill.plan is overspill.api.plan
    assert next(iter(inspect.signature(overspill.plan).parameters)) == "model"


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"max_model_length": 4096}, "no setting 'max_model_length'; did you mean max_model_len?"),
    "a server's": ({"port": 8000}, "no setting 'port'"),
    "not a size": ({"ram": "lots"}, "ram: 'lots' is not a size"),
    "a negative size": ({"ram": -1}, "ram: a size cannot be negative"),
    "half a token": ({"max_model_len": 0.5}, "max_model_len: 0.5 is not a number of tokens"),
    "no card": ({"gpu": "rtx9999"}, "rtx9999"),
    "no device": ({"device": "tpu"}, "device: 'tpu' is none of"),
    "a KV dtype that is none": ({"kv_cache_dtype": "fp7", "gpu": "24GiB"}, "fp7"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_names_the_argument(llama: Path, name: str) -> None:
    given, said = MISTAKES[name]
    with pytest.raises(overspill.OverspillError) as raised:
        overspill.plan(str(llama), **given)
    assert said in str(raised.value)


# Arguments for vLLM.


def test_arguments_are_the_plans_flags_as_vllm_reads_them(llama: Path) -> None:
    arguments = overspill.engine_args(str(llama), max_model_len="4k", gpu="24GiB", ram="64GiB", kv_cache_dtype="fp8")
    assert arguments["model"] == str(llama) and arguments["max_model_len"] == 4096
    assert arguments["kv_cache_dtype"] == "fp8" and 0.5 < arguments["gpu_memory_utilization"] < 1
    spills = overspill.engine_args(str(llama), **SMALL)
    transfer = spills["kv_transfer_config"]
    made = overspill.plan(str(llama), **SMALL)
    assert made.chosen is not None and made.chosen.kv.spilled_bytes > 0
    assert transfer.kv_connector_extra_config == {"spill_bytes": made.chosen.kv.spilled_bytes}
    assert spills["kv_cache_memory_bytes"] == made.chosen.kv.device_bytes
    assert vllm.EngineArgs(**spills).max_num_seqs == made.max_num_seqs


def test_connector_options_are_merged_with_planned_sizes(llama: Path) -> None:
    options = "store=lazy,verify=all,spill_share=1"
    both = {**SMALL, "offload_ram": "64MiB", "kv_options": options, "skip_tokenizer_init": True}
    arguments = overspill.engine_args(str(llama), **both)
    transfer = arguments["kv_transfer_config"]
    made = overspill.plan(str(llama), **{name: value for name, value in both.items() if name != "skip_tokenizer_init"})
    assert made.chosen is not None and made.chosen.connector_sizes.keys() == {"host_bytes", "spill_bytes"}
    assert transfer.kv_connector_extra_config == made.chosen.connector_sizes | {
        "store": "lazy", "verify": "all", "spill_share": 1.0,
    }  # fmt: skip
    config = vllm.EngineArgs(**arguments).create_engine_config()
    found = check_engine(config)
    assert found is not None and (found.store, found.verify, found.spill_share) == ("lazy", "all", 1.0)


def test_an_option_useless_to_the_plan_is_dropped_with_a_warning(llama: Path) -> None:
    with pytest.warns(overspill.PlanContradicted, match=r"--kv-options store=lazy would do nothing here"):
        arguments = overspill.engine_args(str(llama), **SMALL, kv_options="store=lazy,spill_share=1")
    assert set(arguments["kv_transfer_config"].kv_connector_extra_config) == {"spill_bytes", "spill_share"}
    with pytest.warns(overspill.PlanContradicted, match=r"--kv-options spill_share=1 would do nothing here"):
        arguments = overspill.engine_args(
            str(llama), max_model_len="4k", gpu="24GiB", ram="64GiB", kv_options="spill_share=1,verify=all"
        )
    assert set(arguments["kv_transfer_config"].kv_connector_extra_config) == {"host_bytes", "verify"}


def test_weights_in_ram_become_prefetch_offloader_arguments(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = overspill.engine_args(str(tmp_path), max_model_len="32k", gpu="12GiB", ram="64GiB")
    read = vllm.EngineArgs(**arguments)
    assert read.offload_backend == "prefetch" and 0 < read.offload_num_in_group <= read.offload_group_size


def test_user_arguments_override_the_plan_with_a_warning(llama: Path) -> None:
    with pytest.warns(overspill.PlanContradicted, match=r"replaces the plan's --kv-cache-memory-bytes") as told:
        arguments = overspill.engine_args(str(llama), gpu="24GiB", ram="64GiB", kv_cache_memory_bytes=2**30)
    assert arguments["kv_cache_memory_bytes"] == 2**30 and 0.5 < arguments["gpu_memory_utilization"] < 1
    assert told[0].filename == __file__
    with pytest.warns(overspill.PlanContradicted, match="data-parallel-size"):
        arguments = overspill.engine_args(str(llama), gpu="24GiB", ram="64GiB", data_parallel_size=2)
    assert arguments["data_parallel_size"] == 2 and "kv_cache_memory_bytes" not in arguments


def test_arguments_shared_by_vllm_and_the_plan_are_planned_with(llama: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", overspill.PlanContradicted)
        arguments = overspill.engine_args(str(llama), gpu="24GiB", ram="64GiB", gpu_memory_utilization=0.5)
    assert arguments["gpu_memory_utilization"] == 0.5
    with pytest.warns(overspill.PlanContradicted, match="weights go to RAM as requested"):
        by_vllm = overspill.engine_args(str(llama), gpu="24GiB", ram="64GiB", offload_ram=0, cpu_offload_gb=0.0001)
    with pytest.warns(overspill.PlanContradicted, match="weights go to RAM as requested"):
        by_setting = overspill.engine_args(str(llama), gpu="24GiB", ram="64GiB", offload_ram=0, weights_ram=107374)
    assert by_vllm == by_setting and vllm.EngineArgs(**by_vllm).offload_backend in ("uva", "prefetch")
    made = overspill.plan(str(llama), gpu="24GiB", ram="64GiB", weights_ram="1KiB", at_once=3)
    assert made.chosen is not None and made.chosen.weights.ram_bytes and made.wishes.at_once == 3


def test_a_users_own_connector_replaces_the_planned_one(llama: Path) -> None:
    own = {"kv_connector": "OverspillConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"host_bytes": 1}}
    with pytest.warns(overspill.PlanContradicted, match="--kv-transfer-config"):
        arguments = overspill.engine_args(str(llama), **SMALL, kv_transfer_config=own)
    assert arguments["kv_transfer_config"] is own


def test_arguments_outside_the_plan_are_passed_on_unwarned(llama: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", overspill.PlanContradicted)
        arguments = overspill.engine_args(
            str(llama), **SMALL, seed=7, skip_tokenizer_init=True, enable_prefix_caching=False, hf_overrides=None
        )
    assert arguments["seed"] == 7 and arguments["enable_prefix_caching"] is False


def test_a_variable_overriding_the_arguments_is_warned_of(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with pytest.warns(overspill.PlanContradicted, match="VLLM_CPU_KVCACHE_SPACE is set"):
        overspill.engine_args(str(llama), **SMALL)


def test_an_unknown_argument_is_refused_before_reading_the_model() -> None:
    with pytest.raises(SettingsError, match=r"'max_num_sequences'; did you mean max_num_seqs\?"):
        overspill.engine_args("/nonexistent/model", max_num_sequences=3)
    with pytest.raises(SettingsError, match=r"'trust_remote'; did you mean trust_remote_code\?"):
        overspill.LLM("/nonexistent/model", trust_remote=True)


def test_a_model_that_does_not_fit_gets_need_have_and_advice(llama: Path) -> None:
    too_much = {**SMALL, "max_model_len": "32k", "gpu_memory": "4MiB"}
    for function in (overspill.engine_args, overspill.LLM):
        with pytest.raises(overspill.DoesNotFit, match=r"it needs .*; there is 4 MiB of that.*Longest") as raised:
            function(str(llama), **too_much)
        assert isinstance(raised.value, overspill.OverspillError)
        assert 0 < raised.value.plan.longest_context < 32768
        assert str(raised.value.plan.longest_context) in str(raised.value)


def test_an_llm_runs_on_the_machine_that_is_here(llama: Path) -> None:
    with pytest.raises(overspill.OverspillError, match=r"gpu names a card.*use gpu_memory"):
        overspill.LLM(str(llama), gpu="24GiB", ram="64GiB")


# The engine.


@pytest.mark.usefixtures("engines")
def test_an_llm_with_spill_gives_the_tokens_of_vllm_with_room(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = with_room(llama)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with pytest.warns(overspill.PlanContradicted, match="VLLM_CPU_KVCACHE_SPACE is left out"):
        llm = overspill.LLM(str(llama), **SMALL, skip_tokenizer_init=True)
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert isinstance(llm, vllm.LLM)
    assert llm.plan.chosen is not None and llm.plan.chosen.name == "KV spilled to RAM"
    found, outputs = tokens(llm, PROMPTS)
    assert found == expected
    assert outputs[0].kv_transfer_params["overspill"]["spilled_bytes"] > MiB


@pytest.mark.usefixtures("engines")
def test_vllms_own_llm_takes_the_arguments(llama: Path) -> None:
    arguments = overspill.engine_args(str(llama), **SMALL, skip_tokenizer_init=True)
    llm = vllm.LLM(**arguments)
    found, outputs = tokens(llm, PROMPTS[:1])
    assert len(found[0]) == 16
    assert outputs[0].kv_transfer_params["overspill"]["spilled_bytes"] > MiB


def test_it_spills_where_vllm_loads_no_plugin_of_overspill(llama: Path) -> None:
    """As from a checkout on PYTHONPATH; and the engine's process is a new one, which inherits nothing."""
    code = f"""
import overspill
from vllm import SamplingParams
if __name__ == "__main__":
    llm = overspill.LLM({str(llama)!r}, skip_tokenizer_init=True, **{SMALL!r})
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{{"prompt_token_ids": [7] * 3900}}], sampling, use_tqdm=False)
    print(output.kv_transfer_params["overspill"]["spilled_bytes"] > 0)
"""
    script = llama.parent / "without_plugin.py"
    script.write_text(code)
    engine = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with cold():
        answer = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False,
            env={**os.environ, **engine, "VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "ERROR"},
        )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.splitlines()[-1] == "True"
