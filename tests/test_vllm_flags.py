"""Misspelt flags and values are refused in a moment: no engine is started, and vLLM is not loaded for it."""

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import overspill
from overspill import flags
from overspill.flags import read_flags, refuse_unknown
from overspill.kv.errors import OverspillError
from tests.command import run_overspill

FILE = Path(overspill.__file__).with_name("vllm_flags.txt")
# Which choices there are depends on vLLM's build.
ANY_VALUE = {"--mm-processor-device"}


def vllms_parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def described() -> str:
    """vllm_flags.txt, from vLLM's own parser: `names:kind`, `*` after a kind of which there can be several."""
    words = sorted(_word(action) for action in vllms_parser()._actions if action.option_strings)
    return "\n".join(textwrap.wrap(" ".join(words), 118, break_on_hyphens=False, break_long_words=False)) + "\n"


def _word(action: argparse.Action) -> str:
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    kind = ""
    if isinstance(action, argparse.BooleanOptionalAction):
        kind = "on-off"
    elif action.nargs == 0:
        kind = "on"
    elif action.choices and not ANY_VALUE & set(names):
        kind = "|".join(map(str, action.choices))
        # vLLM's own functions take capitals and dashes too.
        kind = f"~{kind}" if getattr(action.type, "__name__", "") == "<lambda>" else kind
    elif action.type in (int, float):
        kind = action.type.__name__  # type: ignore[union-attr]
    kind += "*" if action.nargs in ("+", "*", "?") else ""
    return ",".join(names) + (f":{kind}" if kind else "")


def test_known_flags_are_those_of_vllms_parser() -> None:
    assert FILE.read_text() == described(), "python -m tests.test_vllm_flags writes them"


@pytest.mark.parametrize(
    "given",
    [
        "--seed 7", "--seed=7", "--max_log_len 4", "--enable-lora", "--no-enable-lora", "--enable-prefix", "-tp 2",
        "-O3", "-O.mode=3", "-cc.mode 3", "--compilation-config.mode=3", "--hf-overrides.a_b.c 4",
        "--load-format dummy", "--served-model-name a b", "--api-key one two", "--hf-token", "--kv-cache-dtype fp8",
        "--moe-backend Deep-Gemm",
        "--lora-modules a=b c=d", "--max-num-batched-tokens 8k", "--seed -1", "--cudagraph-capture-sizes 1 2 4",
        "--max-lora-rank 64", "--collect-detailed-traces all", "--scheduling-policy priority",
        "--mm-processor-device cuda",
    ],
)  # fmt: skip
def test_flags_that_vllm_reads_are_taken(given: str) -> None:
    refuse_unknown(read_flags(given.split()))


# What is given, and what the refusal says.
MISSPELT_FLAGS = {
    "--seeed 3": "did you mean --seed?",
    "--sed=3": "did you mean --seed?",
    "--quiett": "did you mean --quiet?",
    "--dryrun": "did you mean --dry-run?",
    "--logfile x": "did you mean --log-file?",
    "--max-modle-len 4k": "did you mean --max-model-len?",
    "--max_modle_len 4k": "did you mean --max-model-len?",
    "--max-model-length 4k": "did you mean --max-model-len?",
    "--gpu-memry 8GiB": "did you mean --gpu-memory?",
    "--gpu-mem-utilization 0.8": "did you mean --gpu-memory-utilization?",
    "--rma 8GiB": "did you mean --ram?",
    "--ofload-ram 8GiB": "did you mean --offload-ram?",
    "--weight-ram 8GiB": "did you mean --weights-ram?",
    "--kv-option store=lazy": "did you mean --kv-options?",
    "--kv-cache-dtyp fp8": "can be --kv-cache-dtype-skip-layers, --kv-cache-dtype; write it in full",
    "--drafs ngram": "did you mean --drafts?",
    "--at-onse 4": "did you mean --at-once?",
    "--max-num-seq 4": "did you mean --max-num-seqs?",
    "--enforce-eagr": "did you mean --enforce-eager?",
    "--no-enforce-eagr": "did you mean --no-enforce-eager?",
    "--hots 0.0.0.0": "did you mean --host?",
    "--prot 8001": "did you mean --port?",
    "--forse": "did you mean --force?",
    "--tensor-paralel-size 2": "did you mean --tensor-parallel-size?",
    "--trust-remotecode": "did you mean --trust-remote-code?",
    "--serverd-model-name a": "did you mean --served-model-name?",
    "--api-keys a": "did you mean --api-key?",
    "--enable-lorra": "did you mean --enable-lora?",
    "--chat-templte x": "did you mean --chat-template?",
    "--tool-call-praser hermes": "did you mean --tool-call-parser?",
    "--reasoning-prser x": "did you mean --reasoning-parser?",
    "--load-fromat dummy": "did you mean --load-format?",
    "--quantisation awq": "did you mean --quantization?",
    "--cpu-offload-gbs 4": "did you mean --cpu-offload-gb?",
    "--compilation-confg.mode 3": "did you mean --compilation-config?",
    "--max-num 4": "write it in full",
    "-tpp 2": "did you mean -tp?",
    "--swap-space 4": "vLLM 0.32 no longer has --swap-space; use --ram",
}
MISSPELT_VALUES = {
    "--seed seven": "'seven' is not a whole number",
    "--seed 1 2": "takes one value, and 2 are given",
    "--seed": "takes one value, and 0 are given",
    "--watermark much": "'much' is not a number",
    "--enable-lora yes": "takes no value",
    "--enable-lora=true": "takes no value",
    "--runner poolng": "did you mean pooling?",
    "--scheduling-policy piority": "did you mean priority?",
    "--max-lora-rank 65": "did you mean 64?",
    "--uvicorn-log-level warn": "did you mean warning?",
    "--moe-backend deepgem": "did you mean deep_gemm?",
    "--chat-template-content-format=opnai": "did you mean openai?",
    "--dtype flot16": "did you mean float16?",
    "--device cuad": "did you mean cuda?",
    "--kv-cache-dtype fp9": "did you mean fp8?",
    "--kv-options verfy=all": "did you mean 'verify'?",
    "--kv-options verify=al": "must be one of off, sample, all",
    "--drafts ngarm": "none of off, ngram",
    "--spill-compute cpu": "none of auto, gpu",
}
WRONG = {**MISSPELT_FLAGS, **MISSPELT_VALUES}


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "home").mkdir()
    yield {"HOME": str(tmp_path / "home"), "XDG_STATE_HOME": str(tmp_path / "state"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("given", WRONG)
def test_serve_refuses_a_misspelt_flag_before_it_looks_for_the_model(given: str, env: dict[str, str]) -> None:
    """vLLM refused it after a minute, with exit code 1; a hub that could not be reached was reported first."""
    told = run_overspill("serve", "nobody/nothing", *given.split(), env=env)
    assert told.returncode == 2 and WRONG[given] in told.stderr, told.stderr
    assert "nobody/nothing" not in told.stderr


@pytest.mark.parametrize("given", ["--seeed 4", "--runner poolng"])
@pytest.mark.parametrize(
    "command",
    ["service print nobody/nothing --", "service install nobody/nothing --", "models add x --source a/b --"],
)
def test_flags_after_two_dashes_are_checked_too(command: str, given: str, env: dict[str, str]) -> None:
    """A unit with a misspelt flag was installed, and systemd started it again and again."""
    told = run_overspill(*command.split(), *given.split(), env=env)
    assert told.returncode == 2 and WRONG.get(given, "did you mean --seed?") in told.stderr, told.stderr


def test_models_edit_refuses_a_misspelt_flag(env: dict[str, str]) -> None:
    assert run_overspill("models", "add", "x", "--source", "a/b", env=env).returncode == 0
    told = run_overspill("models", "edit", "x", "--", "--seeed", "4", env=env)
    assert told.returncode == 2 and "did you mean --seed?" in told.stderr


@pytest.mark.parametrize(
    ("configuration", "hint"),
    [
        ("overspill-eager:64MiB,verfy=all", "did you mean 'verify'?"),
        ("overspill-eager:64MiB,verify=al", "must be one of off, sample, all"),
        ("overspill-eagr:64MiB", "did you mean overspill-eager?"),
        ("--offlod-ram 4GiB", "did you mean --offload-ram?"),
        ("vllm --seeed 4", "did you mean --seed?"),
        ("none --runner poolng", "did you mean pooling?"),
        ("overspill --kv-options verfy=all", "did you mean 'verify'?"),
    ],
)
def test_ab_refuses_a_misspelt_configuration_before_it_measures(
    configuration: str, hint: str, env: dict[str, str]
) -> None:
    """Configuration A was measured first."""
    told = run_overspill("ab", "nobody/nothing", "--a", "none", "--b", configuration, env=env)
    assert told.returncode == 2 and hint in told.stderr, told.stderr


@pytest.mark.parametrize(
    ("line", "hint"), [("rma = '8GiB'", "did you mean ram?"), ("device = 'cuad'", "config.toml: device: 'cuad'")]
)
def test_config_toml_with_a_mistake_is_refused(line: str, hint: str, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(line + "\n")
    env = {**env, "OVERSPILL_CONFIG": str(tmp_path / "config.toml")}
    told = run_overspill("serve", "nobody/nothing", env=env)
    assert told.returncode == 2 and hint in told.stderr, told.stderr


def test_the_next_flag_after_a_flag_without_value_is_named() -> None:
    with pytest.raises(OverspillError, match="--seed: takes one value, and 0 are given"):
        refuse_unknown(read_flags(["--seed", "--enable-lora"]))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--ctx-size 8192", "it is --max-model-len here"),
        ("--num_ctx=8192", "it is --max-model-len here"),
        ("--mem-fraction-static 0.8", "it is --gpu-memory-utilization here"),
        ("--tp-size 2", "it is --tensor-parallel-size here"),
        ("--max-modle-len 8192", "did you mean --max-model-len?"),
        ("--zzz", "--help lists Overspill's"),
    ],
)
def test_unknown_flags_are_answered_with_those_that_exist(given: str, hint: str) -> None:
    """Not with the nearest of all names: `--convert` was the advice for `--max-context`."""
    with pytest.raises(OverspillError, match=hint.replace("?", r"\?")):
        refuse_unknown(read_flags(given.split()))


def test_what_other_servers_names_mean_exists() -> None:
    known, elsewhere = flags._known_flags(), flags._ELSEWHERE
    assert not elsewhere.keys() & known.keys() and set(elsewhere.values()) <= known.keys()


if __name__ == "__main__":
    FILE.write_text(described())
