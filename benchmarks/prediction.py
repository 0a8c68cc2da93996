"""What plans predict beside what happens: GPU memory, the longest context, and speed, of engines started as planned.

    python benchmarks/prediction.py --models DIR            all cases below, 30 to 80 s each on an H200
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
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import model_shape
import process
import record
import spill_memory
from cells import markdown, number
from engine_life import Report
from record import Json, say
from spill_engine import Engine

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
)
TINY_CASES = (
    Case(model="tiny", gpu_memory="8MiB", max_model_len=1000, ram="4GiB", device="cpu", dtype="float32"),
    Case(model="tiny", gpu_memory="8MiB", max_model_len=4000, ram="4GiB", device="cpu", dtype="float32"),
)


def run(case: Case, folder: Path, report_path: Path) -> None:
    """One engine, from its plan to its last token; each fact is reported when it is known."""
    import overspill

    report = Report(str(report_path))
    before = spill_memory.gpu_used_bytes()
    shapes_only = not any(folder.glob("*.safetensors"))
    llm = overspill.LLM(
        str(folder), gpu_memory=case.gpu_memory, max_model_len=case.max_model_len, ram=case.ram, device=case.device,
        dtype=case.dtype, enforce_eager=case.enforce_eager, offload_ram=0,
        load_format="dummy" if shapes_only else "auto", skip_tokenizer_init=True, disable_log_stats=False,
    )  # fmt: skip
    report.add({"event": "predicted", **predicted(llm.plan)})
    engine = Engine(llm, vocabulary=model_shape.vocabulary_size(folder), seed=0)
    facts = engine.facts() | engine.wait_for_arena()
    length = case.max_model_len - OUTPUT_TOKENS
    warm = engine.add(engine.prompt("warm", 0, min(length, 4096)), 4)
    engine.run(lambda: warm.is_done)
    engine.forget()
    request = engine.add(engine.prompt("long", 0, length), OUTPUT_TOKENS)
    engine.run(lambda: request.is_done)
    gaps = request.gaps[SKIPPED_GAPS:]
    report.add(
        {
            "event": "measured",
            "capacity_tokens": facts["capacity_tokens"],
            "ttft_s": request.ttft,
            "decode_tokens_per_s": 1 / statistics.median(gaps),
            "gaps": request.gaps,
            **spill_memory.usage(before),
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
        "link_bytes_per_s": plan.gpu.link.h2d_bytes_per_second.value,
        "vllm_args": vllm_args(plan, way),
        "ttft_s": way.ttft_s.value,
        "decode_tokens_per_s": way.decode_tokens_per_s.value,
    }


def run_case(case: Case, folder: Path, logs: Path, seconds: float) -> Json:
    stem = f"{case.model}-{case.gpu_memory}-{case.max_model_len}-{int(time.time())}"
    report = logs / f"{stem}.jsonl"
    ended = process.run_to_end(stem, partial(run, case, folder, report), logs / f"{stem}.log", seconds)
    said = {event: facts for event, facts in record.events(report)}
    return {**asdict(case), "predicted": said.get("predicted"), "measured": said.get("measured"), **ended}


# Figures that are compared, as the table names them, and how near they must be.
COMPARED = (("gpu_bytes", "GPU memory, GB", 1e-9), ("capacity_tokens", "longest context, tokens", 1.0),
            ("decode_tokens_per_s", "decode, tokens/s", 1.0), ("ttft_s", "TTFT, s", 1.0))  # fmt: skip


def table(result: Json) -> str:
    rows = []
    for case in result["cases"]:
        told, seen = case["predicted"], case["measured"]
        without = ", no graphs" if case["enforce_eager"] else ""
        name = f"{case['model']}, {case['gpu_memory']}, {case['max_model_len']:,}{without}"
        row = [name, told["way"] if told else "–"]
        for key, _, scale in COMPARED:
            row.append(_compared(told, seen, key, scale))
        rows.append(row)
    return markdown(["model, budget, context", "plan", *(name for _, name, _ in COMPARED)], rows)


def _compared(told: Json | None, seen: Json | None, key: str, scale: float) -> str:
    """`predicted → measured (difference)`."""
    if not told or not seen or not seen.get(key):
        return "–"
    change = told[key] / seen[key] - 1
    digits = 6 if key == "capacity_tokens" else 3
    return f"{number(told[key] * scale, digits)} → {number(seen[key] * scale, digits)} ({100 * change:+.1f} %)"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--models", type=Path, default=None, help="folder with a folder for each model")
    parser.add_argument("--cases", type=numbers, default=None, help="which, by number; default: all")
    parser.add_argument("--tiny", action="store_true", help="cases for a machine without a GPU")
    parser.add_argument("--life-seconds", type=float, default=240, help="an engine is killed after this")
    parser.add_argument("--budget-seconds", type=float, default=3600, help="what does not fit is skipped, and said so")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--logs", type=Path, default=None, help="folder for the engines' logs")
    parser.add_argument("--resume", action="store_true", help="add to the result file instead of replacing it")
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


def folder_of(case: Case, models: Path | None) -> Path:
    if models is None:
        return model_shape.tiny()
    folder = (models / case.model).resolve()
    if not (folder / "config.json").is_file():
        raise SystemExit(f"--models {models}: there is no {case.model}/config.json")
    return folder


def load_result(arguments: argparse.Namespace, out: Path) -> Json:
    settings = record.settings(arguments)
    kept = {name: value for name, value in settings.items() if name not in ("out", "logs", "table", "models")}
    header = record.header("prediction", kept)
    if arguments.resume and out.exists():
        return record.resumed(out, header)
    return header | {"cases": [], "skipped": [], "resumed": []}


def main() -> None:
    process.exit_on_sigterm()
    arguments = parse_arguments()
    if arguments.table:
        print(table(record.read(arguments.table)), end="")
        return
    cases = chosen(arguments)
    folders = {case.model: folder_of(case, None if arguments.tiny else arguments.models) for case in cases}
    out = arguments.out or record.default_path("prediction")
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="prediction-"))
    logs.mkdir(parents=True, exist_ok=True)
    result = load_result(arguments, out)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    say("importing vLLM")
    import vllm.entrypoints.llm  # noqa: F401  # once, before the engines fork off

    deadline, slowest = time.monotonic() + arguments.budget_seconds, 0.0
    for case in cases:
        left = deadline - time.monotonic()
        if left < slowest:
            why = f"{left:.0f} s of the budget left, about {slowest:.0f} s needed"
            result["skipped"].append({**asdict(case), "why": why})
            say(f"skipped {case}: {why}")
            continue
        say(f"{case.model}, {case.gpu_memory}, {case.max_model_len} tokens; {left:.0f} s of the budget left")
        done = run_case(case, folders[case.model], logs, min(left, arguments.life_seconds))
        slowest = max(slowest, done["seconds"])
        result["cases"].append(done)
        record.write(out, result)
        if done["error"] == process.STOPPED:
            raise SystemExit(143)
    record.write(out, result)
    print(table(result), end="")
    say(f"written to {out}")


if __name__ == "__main__":
    main()
