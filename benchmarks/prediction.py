"""What plans predict beside what happens: GPU memory, the longest context, and speed, of engines started as planned.

    python benchmarks/prediction.py --models DIR            all cases below, 30 to 180 s each on an H200
    python benchmarks/prediction.py --models DIR --cases 0,2 --out mine.json
    python benchmarks/prediction.py --models DIR --cases 3 --resume --out mine.json       adds to the file
    python benchmarks/prediction.py --table mine.json       only prints the table
    python benchmarks/prediction.py --tiny                  on a CPU, to see that it works

DIR holds folders named as the models of the cases, each with a config.json; weights are made up. Every case is an
engine of its own, in a process of its own, started by `overspill.LLM` with nothing but a budget and a context. A prompt
as long as that context is computed, and some tokens after it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import lives
import markdown_tables as tables
import record
import shapes
from record import Json, say

OUTPUT_TOKENS = 24
# The first tokens after a prefill also pay for what the prefill left behind.
SKIPPED_GAPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a budget of GPU memory, and a context."""

    model: str
    gpu_memory: str
    max_model_len: int
    ram: str = "100GB"
    device: str = "auto"
    dtype: str = "auto"
    enforce_eager: bool = False
    in_four_bits: bool = False


# Steps that surely wait for the link longer than for the CPU run without graphs, which take a minute to capture. Others
# do not: without graphs Qwen's steps took 47 to 85 ms in the same run, by how fast the CPU was.
CASES = (
    Case(model="llama-3.1-8b", gpu_memory="24GB", max_model_len=32_768),
    Case(model="llama-3.1-8b", gpu_memory="24GB", max_model_len=131_072, enforce_eager=True),
    Case(model="llama-3.1-8b", gpu_memory="16GB", max_model_len=16_384, enforce_eager=True),
    Case(model="olmo-2-7b", gpu_memory="16GB", max_model_len=4096),
    Case(model="olmo-2-7b", gpu_memory="24GB", max_model_len=4096),
    Case(model="qwen3-coder-30b-a3b", gpu_memory="48GB", max_model_len=32_768),
    Case(model="llama-3.1-8b", gpu_memory="48GB", max_model_len=131_072),
    Case(model="qwen3-coder-30b-a3b", gpu_memory="72GB", max_model_len=131_072),
    Case(model="qwen3-coder-30b-a3b", gpu_memory="24GB", max_model_len=52_000 + OUTPUT_TOKENS, in_four_bits=True),
)
TINY_CASES = (
    Case(model="tiny", gpu_memory="8MiB", max_model_len=1000, ram="4GiB", device="cpu", dtype="float32"),
    Case(model="tiny", gpu_memory="8MiB", max_model_len=4000, ram="4GiB", device="cpu", dtype="float32"),
)


def live(case: Case, folder: Path, report: Callable[[Json], None]) -> None:
    """One engine, from its plan to its last token; runs in a child, which alone loads vLLM."""
    import overspill
    from spill_engine import SpillEngine

    before = gpu.used_bytes()
    if case.in_four_bits:
        folder = shapes.in_four_bits(folder)
    llm = overspill.LLM(
        str(folder), gpu_memory=case.gpu_memory, max_model_len=case.max_model_len, ram=case.ram, device=case.device,
        dtype=case.dtype, enforce_eager=case.enforce_eager, offload_ram=0,
        load_format="dummy", skip_tokenizer_init=True, disable_log_stats=False,
    )  # fmt: skip
    report({"event": "predicted", **predicted(llm.plan)})
    engine = SpillEngine(llm)
    facts = engine.facts() | engine.wait_for_arena()
    length = case.max_model_len - OUTPUT_TOKENS
    engine.generate(engine.prompts("warm", 0, min(length, 4096)), 4)
    engine.forget()
    request = engine.generate(engine.prompts("long", 0, length), OUTPUT_TOKENS)
    report(
        {
            "event": "measured",
            "capacity_tokens": facts["capacity_tokens"],
            "ttft_s": request.ttft,
            "decode_tokens_per_s": 1 / statistics.median(request.gaps[SKIPPED_GAPS:]),
            "gaps": request.gaps,
            **gpu.usage(before),
        }
    )


def predicted(plan: Any) -> Json:
    from overspill.planning.arguments import vllm_args

    way = plan.chosen
    blocks = (way.kv.resident_bytes + way.kv.spilled_bytes) // way.geometry.bytes_per_block - 1
    return {
        "way": way.name,
        "weights_in_ram_bytes": way.weights.ram_bytes,
        "spilled_kv_bytes": way.kv.spilled_bytes,
        "resident_kv_bytes": way.kv.resident_bytes,
        "window_bytes": way.kv.window_bytes,
        "gpu_bytes": plan.budget.used_bytes.value,
        "capacity_tokens": blocks * way.geometry.block_size,
        "link_bytes_per_s": plan.gpu.link.value,
        "vllm_args": vllm_args(plan, way),
        "ttft_s": way.ttft_s.value,
        "decode_tokens_per_s": way.decode_tokens_per_s.value,
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--models", type=Path, default=None, help="folder with a folder for each model")
    parser.add_argument("--cases", type=numbers, default=None, help="which, by number; default: all")
    parser.add_argument("--tiny", action="store_true", help="cases for a machine without a GPU")
    lives.add_options(parser, life_seconds=240)
    parser.add_argument("--table", type=Path, default=None, metavar="FILE", help="print a result's table, run nothing")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> Sequence[Case]:
    cases = TINY_CASES if arguments.tiny else CASES
    wanted = range(len(cases)) if arguments.cases is None else arguments.cases
    unknown = [i for i in wanted if not 0 <= i < len(cases)]
    if unknown:
        raise SystemExit(f"--cases: there is no case {unknown[0]}; they are 0 to {len(cases) - 1}")
    if not arguments.tiny and arguments.models is None:
        raise SystemExit("--models is missing: a folder with a folder for each model, each with a config.json")
    return [cases[i] for i in wanted]


def main() -> None:
    arguments = parse_arguments()
    if arguments.table:
        print(tables.prediction(record.read(arguments.table)), end="")
        return
    cases = chosen(arguments)
    names = dict.fromkeys(case.model for case in cases)
    folders = {name: shapes.folder_of("tiny" if arguments.tiny else str(arguments.models / name)) for name in names}
    settings = record.settings(arguments)
    settings.pop("table")
    out, result = lives.load_result("prediction", settings, arguments, {"cases": []})

    def keep(life: lives.Life, events: list[tuple[str, Json]], ended: Json) -> None:
        facts = dict(events)
        found = {key: facts.get(key) for key in ("predicted", "measured")}
        result["cases"].append({**life.about, **found, **ended})

    planned = [
        lives.Life(
            name=f"{case.model}-{case.gpu_memory}-{case.max_model_len}", kind="case", work="live",
            arguments=partial(lambda case, seconds: (case, folders[case.model]), case), about=asdict(case),
        )
        for case in cases
    ]  # fmt: skip
    lives.run_all("prediction", planned, keep, result=result, out=out, options=arguments, least_seconds=0.0)
    print(tables.prediction(result), end="")
    say(f"written to {out}")


if __name__ == "__main__":
    main()
