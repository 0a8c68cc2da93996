"""What vLLM would refuse only after it has started is refused before."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from overspill.errors import CannotServe
from overspill.launch.launch import Prepared, prepare
from overspill.launch.machine import plan_for
from overspill.launch.traps import has_tokenizer, longest_context, require_tokenizer
from overspill.launch.vllm import Vllm
from overspill.planning.planner import Plan
from tests.command import run_overspill

TINY_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
PLACE = {"host": "127.0.0.1", "port": 8000}


def folder_of(folder: Path, *names: str, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **config}))
    for name in names:
        (folder / name).write_text("")
    return folder


def plan_of(folder: Path, max_model_len: int, **settings: object) -> Plan:
    wished = {"gpu": "24GiB", "ram": 64 * 2**30, "max_model_len": max_model_len}
    return plan_for(str(folder), {**wished, **settings})


def prepared_of(folder: Path, plan: Plan, *given: str, **environment: str) -> Prepared:
    return prepare(str(folder), plan, PLACE, given, vllm=Vllm("0.32.0", is_cpu=False), environment=environment)


def test_a_context_beyond_the_models_own_is_refused_before_start(tmp_path: Path) -> None:
    """The plan only warned, so vLLM was started and failed."""
    folder = folder_of(tmp_path / "m")
    plan = plan_of(folder, 2049)
    with pytest.raises(CannotServe, match=r"2,049 tokens are more than the 2,048 .*Use --max-model-len 2048\."):
        prepared_of(folder, plan)
    with pytest.raises(CannotServe, match="2,049 tokens"):
        prepared_of(folder, plan, VLLM_ALLOW_LONG_MAX_MODEL_LEN="0")
    assert any("2,049 tokens are more" in warning for warning in plan.warnings), "and a plan still warns"
    assert prepared_of(folder, plan_of(folder, 2048))


@pytest.mark.parametrize(
    ("given", "environment", "settings"),
    [
        ([], {}, {"force": True}),
        ([], {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, {}),
        ([], {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": " True"}, {}),
        (["--hf-overrides", '{"max_position_embeddings": 9999}'], {}, {}),
        (["--hf_overrides.max_position_embeddings=9999"], {}, {}),
        (["--hf-config-path", "elsewhere"], {}, {}),
        (["--max-model-len", "-1"], {}, {}),
        (["--max-model-len", "1024"], {}, {}),
    ],
)
def test_an_explicitly_allowed_longer_context_is_accepted(
    tmp_path: Path, given: list[str], environment: dict[str, str], settings: dict[str, object]
) -> None:
    folder = folder_of(tmp_path / "m")
    assert prepared_of(folder, plan_of(folder, 4096, **settings), *given, **environment)


def test_plan_refuses_the_length_that_serve_refuses(tmp_path: Path) -> None:
    """It fitted, with a warning and exit code 0, and serve refused it."""
    folder = folder_of(tmp_path / "m", "tokenizer.json")
    env = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    words = [str(folder), "--gpu", "24GiB", "--ram", "64GiB"]
    for length, fits in (("2048", True), ("2049", False)):
        plan = run_overspill("plan", *words, "--max-model-len", length, "--json", env=env)
        serve = run_overspill("serve", *words, "--max-model-len", length, "--dry-run", env=env)
        assert json.loads(plan.stdout)["fits"] is fits and plan.returncode == serve.returncode == (0 if fits else 1)
        assert [line for line in plan.stderr.splitlines() if line.startswith("error:")] == [
            line for line in serve.stderr.splitlines() if line.startswith("error:")
        ]
    allowed = {**env, "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    assert run_overspill("plan", *words, "--max-model-len", "2049", env=allowed).returncode == 0


LENGTHS: dict[str, tuple[dict[str, object], int]] = {
    "plain": ({}, 2048),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
    "llama3": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 256}}, 2048),
    "new names": ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}, 8192),
    "a length of its own": ({"model_max_length": 6000}, 6000),
}  # fmt: skip


@pytest.mark.parametrize("name", LENGTHS)
def test_the_longest_context_is_vllms(tmp_path: Path, name: str) -> None:
    from pydantic import ValidationError
    from vllm.config import ModelConfig

    config, longest = LENGTHS[name]
    folder = folder_of(tmp_path / "m", **config)
    assert longest_context(plan_of(folder, 1024).facts) == longest
    assert ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=longest).max_model_len == longest
    with pytest.raises(ValidationError, match="User-specified max_model_len"):
        ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=longest + 1)


def test_a_model_in_two_formats_is_not_refused_for_the_other(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "params.json")
    assert longest_context(plan_of(folder, 1024).facts) is None and prepared_of(folder, plan_of(folder, 4096))


def test_suffix_drafts_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "m")
    plan = plan_of(folder, 1024, drafts="suffix:4")
    monkeypatch.setattr("overspill.launch.traps.find_spec", lambda name: None)
    with pytest.raises(CannotServe, match="pip install arctic-inference; or use --drafts ngram"):
        prepared_of(folder, plan)
    assert prepared_of(folder, plan_of(folder, 1024, drafts="ngram"))
    monkeypatch.setattr("overspill.launch.traps.find_spec", lambda name: name == "arctic_inference")
    assert prepared_of(folder, plan)


def tokenizer_of(prepared: Prepared) -> None:
    require_tokenizer(prepared.model, prepared.plan, prepared.combined)


def test_a_folder_without_a_tokenizer_is_refused_before_start(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "README.md", "generation_config.json", ".gitattributes")
    plan = plan_of(folder, 1024)
    with pytest.raises(CannotServe, match=f"no tokenizer in {folder}.*--tokenizer.*--skip-tokenizer-init"):
        tokenizer_of(prepared_of(folder, plan))
    for given in (["--skip-tokenizer-init"], ["--skip_tokenizer_init"], ["--tokenizer", "org/other"],
                  ["--tokenizer=other"], ["--tokenizer-mode", "mistral"]):  # fmt: skip
        tokenizer_of(prepared_of(folder, plan, *given))
    tokenizer_of(prepared_of(folder, plan_of(folder, 1024, force=True)))
    tokenizer_of(dataclasses.replace(prepared_of(folder, plan), model="org/model"))


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt",
     "spiece.model", "qwen.tiktoken", "tokenization_own.py", "vocab.txt", "what-nobody-knows"],
)  # fmt: skip
def test_whatever_may_be_a_tokenizer_is_left_to_vllm(tmp_path: Path, name: str) -> None:
    assert not has_tokenizer(folder_of(tmp_path / "m"))
    assert has_tokenizer(folder_of(tmp_path / "m", name))


def test_a_tokenizer_that_needs_no_files_is_named_in_the_config(tmp_path: Path) -> None:
    for config in ({"tokenizer_class": "ByT5Tokenizer"}, {"auto_map": {"AutoTokenizer": "org/x--tokens.Own"}}):
        assert has_tokenizer(folder_of(tmp_path / "m", **config))


def test_every_tokenizer_file_of_transformers_is_recognised(tmp_path: Path) -> None:
    """None of them is taken for something else."""
    from importlib.util import find_spec

    spec = find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    names: set[str] = set()
    for file in Path(spec.submodule_search_locations[0]).glob("models/*/tokenization*.py"):
        for found in re.findall(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", file.read_text(), re.DOTALL):
            names |= set(re.findall(r':\s*"([^"]+)"', found))
    assert {"tokenizer.json", "vocab.json", "spiece.model"} <= names
    for number, name in enumerate(sorted(names)):
        assert has_tokenizer(folder_of(tmp_path / str(number), name)), name
