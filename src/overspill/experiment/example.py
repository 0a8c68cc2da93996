"""The demo's experiment: a tiny model on vLLM's CPU engine, conversations that return, offload off and on."""

from pathlib import Path

from overspill.experiment.definition import Definition
from overspill.experiment.progress import Tell
from overspill.experiment.report import Report
from overspill.experiment.run import run
from overspill.registry import open_registry

_BLOCK_TOKENS = 32
_CONVERSATIONS, _TURNS = 4, 3
# So long that computing a prompt again takes many times as long as copying its KV, even for a model this small.
_FIRST_TURN, _NEXT_TURN, _ANSWER = 6000, 100, 8  # tokens
_LENGTH = _FIRST_TURN + (_TURNS - 1) * (_NEXT_TURN + _ANSWER) + _ANSWER
# Room for one conversation.
_CACHE_BLOCKS = _LENGTH // _BLOCK_TOKENS + 3
MEASURES = ("cold_mean_ttft_ms", "returning_mean_ttft_ms", "peak_ram_bytes", "prompt_tokens", "tokens_from_ram")


def example(model: Path) -> Definition:
    return Definition(
        model=str(model),
        configurations=(("a", "stock vLLM = none"), ("b", "Overspill = overspill-eager:256MiB,reserve_bytes=0")),
        common=f"--skip-tokenizer-init --dtype float32 --enforce-eager --block-size {_BLOCK_TOKENS} --max-num-seqs 2 "
        f"--max-model-len {_LENGTH} --num-gpu-blocks-override {_CACHE_BLOCKS}",
        workload=f"multi-turn:conversations={_CONVERSATIONS},turns={_TURNS},first={_FIRST_TURN},input={_NEXT_TURN},"
        f"output={_ANSWER},think_time=0,concurrency=1",
        repeats=1,
        expects="offload",
    )


def run_example(model: Path, folder: Path, tell: Tell) -> Report:
    """In a registry of its own, in `folder`. `report.as_table(*MEASURES)` is what the demo shows."""
    with open_registry(f"sqlite:///{folder.absolute()}/registry.db") as registry:
        return run(example(model), registry, tell, logs=folder / "logs")
