"""Offload beside its peers on one GPU: TTFT from RAM, overhead without reuse, multi-turn conversations.

    python benchmarks/offload.py --model llama-3.1-8b

Each system gets an engine life of its own, in a process group of its own. Workloads:

    ttft-8k, ttft-64k   (group ttft)      one prompt at a time, served from RAM
    short, arrivals     (group overhead)  nothing is reused: 64 at once; 8k in, 1k out at 2 per second
    multiturn                             conversations whose KV exceeds the GPU's cache

The GPU's KV cache is held to 72,000 tokens so that it overflows; `arrivals` needs room for all its requests
and so runs in a second life with a larger cache. With --gpu-blocks everything runs in one life.
The result file is written after every life; --resume adds lives to an existing one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import engine_life
import model_shape
import process
import record
import summary
from engine_life import Life
from record import GIB, Json, say
from systems import DEFAULT_SYSTEMS, System, system
from workloads import GROUPS, WORKLOADS, Load

HERE = Path(__file__).parent
SMALL_CACHE_BLOCKS = 4500
# 24 requests of 8k + 1k tokens at once, in blocks of 16.
LARGE_CACHE_BLOCKS = 14_000
FIRST_LIFE_SECONDS = 150.0


def chosen_workloads(names: list[str]) -> list[str]:
    wanted = [part for name in names for part in GROUPS.get(name, (name,))]
    for name in wanted:
        if name not in WORKLOADS:
            raise SystemExit(f"unknown workload '{name}'; known: {', '.join([*WORKLOADS, *GROUPS])}")
    return [name for name in WORKLOADS if name in wanted]


def lives_of(workloads: list[str], gpu_blocks: int | None) -> list[tuple[int, list[str]]]:
    """Which workloads share an engine: those with the same size of GPU cache."""
    if gpu_blocks is not None:
        return [(gpu_blocks, workloads)]
    small = [name for name in workloads if name != "arrivals"]
    large = [name for name in workloads if name == "arrivals"]
    return [(blocks, group) for blocks, group in ((SMALL_CACHE_BLOCKS, small), (LARGE_CACHE_BLOCKS, large)) if group]


def load_result(arguments: argparse.Namespace, out: Path) -> Json:
    header = record.header("offload", record.settings(arguments))
    if not (arguments.resume and out.exists()):
        per_token = model_shape.kv_bytes_per_token(arguments.model, 4 if arguments.dtype == "float32" else 2)
        return header | {
            "kv_bytes_per_token": per_token,
            "link": None,
            "systems": {},
            "skipped": [],
            "resumed": [],
        }
    return record.resumed(out, header)


def measure_link() -> Json | None:
    """In a process of its own: a CUDA context kept here would take memory from the engines."""
    command = [sys.executable, str(HERE / "link.py")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if answer.returncode:
        say(f"link not measured: {answer.stderr.strip().splitlines()[-1:]}")
        return None
    link: Json | None = json.loads(answer.stdout.strip().splitlines()[-1])
    return link


def run_life(target: System, blocks: int, workloads: list[str], seconds: float, arguments: argparse.Namespace) -> Json:
    """One engine life from start to end, whatever becomes of it."""
    scratch = Path(tempfile.mkdtemp(prefix="life-"))
    log = (arguments.logs or scratch) / f"{target.name.replace(':', '-')}-{blocks}.log"
    life = Life(
        system=target.name, model=str(arguments.model), workloads=workloads, gpu_blocks=blocks,
        kv_transfer_config=target.kv_transfer_config, report=str(scratch / "report.jsonl"),
        # What is left after the last repeat goes to shutting down.
        seconds=max(0.0, seconds - 20), load=make_load(arguments),
        max_model_len=arguments.max_model_len, load_format=arguments.load_format, dtype=arguments.dtype,
        enforce_eager=arguments.enforce_eager,
    )  # fmt: skip
    ended = process.run_to_end(target.name, partial(engine_life.run, life), log, seconds)
    return read_report(Path(life.report)) | {"gpu_blocks": blocks} | ended


def read_report(path: Path) -> Json:
    life: Json = {"at": record.now(), "workloads": {}, "notes": []}
    for event, said in record.events(path):
        match event:
            case "started":
                life |= said
            case "repeat":
                life["workloads"].setdefault(said.pop("workload"), []).append(said)
            case _:
                life["notes"].append(said)
    return life


def run_all(arguments: argparse.Namespace, out: Path, result: Json) -> None:
    """Every system's lives in turns, as far as the budget goes."""
    deadline = time.monotonic() + arguments.budget_seconds
    slowest: dict[int, float] = {}
    for _ in range(arguments.lives):
        for blocks, group in lives_of(chosen_workloads(arguments.workloads), arguments.gpu_blocks):
            for name in arguments.systems:
                left = deadline - time.monotonic()
                needed = slowest.get(blocks, min(FIRST_LIFE_SECONDS, arguments.life_seconds))
                if left < needed:
                    why = f"{left:.0f} s of the budget left, about {needed:.0f} s needed"
                    result["skipped"].append({"system": name, "workloads": group, "why": why})
                    say(f"skipped {name} {group}: {why}")
                    record.write(out, result)
                    continue
                target = system(name, int(arguments.host_gib * GIB), arguments.overspill_extra)
                entry = result["systems"].setdefault(
                    name, {"kv_transfer_config": target.kv_transfer_config, "lives": []}
                )
                say(f"{name}: {', '.join(group)} on {blocks} GPU blocks; {left:.0f} s of the budget left")
                life = run_life(target, blocks, group, min(left, arguments.life_seconds), arguments)
                entry["lives"].append(life)
                # Of a run that this one resumes.
                result["skipped"] = [
                    one for one in result["skipped"] if (one["system"], one["workloads"]) != (name, group)
                ]
                # The first life also compiles, so it is a safe guess for the next ones.
                slowest[blocks] = max(slowest.get(blocks, 0.0), life["seconds"])
                summary.summarise(result)
                record.write(out, result)
                say_life(name, entry)
                if life["error"] == process.STOPPED:
                    raise SystemExit(143)


def say_life(name: str, entry: Json) -> None:
    for workload in entry["summary"]:
        value = summary.headline(entry, workload)
        label, _ = summary.HEADLINES[workload]
        say(f"{name}: {workload} {label} {value:.4g}" if value is not None else f"{name}: {workload} has no number")
        for missed in entry["summary"][workload].get("recomputed", []):
            cached = missed["cached_tokens"]
            say(f"{name}: {workload} prompt {missed['prompt']} had only {cached} tokens cached")


def print_ratios(result: Json) -> None:
    link = result["link"]
    if link:
        inwards, outwards = (link[f"{way}_bytes_per_second"] / 1e9 for way in ("h2d", "d2h"))
        print(f"link: {inwards:.1f} GB/s in, {outwards:.1f} GB/s out")
    print(f"{'workload':10} {'system':30} {'value':>10} {'x none':>8} {'x best peer':>12}  (above 1 is better)")
    for workload, table in result.get("ratios", {}).items():
        for name, row in table["systems"].items():
            over = [f"{row[key]:.3f}" if row[key] else "-" for key in ("over_none", "over_best_peer")]
            star = "*" if name == table["best_peer"] else ""
            print(f"{workload:10} {name + star:30} {row['value']:>10.4g} {over[0]:>8} {over[1]:>12}")
    for name, entry in result["systems"].items():
        for workload, numbers in entry["summary"].items():
            if "tokens_equal" in numbers and name != "none":
                said = numbers["tokens_equal"]
                floor = numbers.get("ttft_over_floor")
                print(
                    f"{workload:10} {name:30} tokens equal {said['equal']}/{said['compared']}"
                    f" of {said['answers']}, recomputed {len(numbers['recomputed'])}"
                    + (f", {floor:.2f}x the link's floor" if floor else "")
                )
    for skipped in result["skipped"]:
        print(f"skipped: {skipped}")


def make_load(arguments: argparse.Namespace) -> Load:
    return Load(**{field.name: getattr(arguments, field.name) for field in fields(Load)})


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--model", type=Path, default=None, help="default: Llama-3.1-8B's shape")
    parser.add_argument("--systems", nargs="+", default=list(DEFAULT_SYSTEMS), help="name[:key=value,…]")
    parser.add_argument("--workloads", nargs="+", default=["ttft", "overhead", "multiturn"])
    parser.add_argument("--host-gib", type=float, default=24, help="host pool of every system")
    parser.add_argument("--overspill-extra", type=json.loads, default={}, help="JSON added to Overspill's options")
    parser.add_argument("--gpu-blocks", type=int, default=None, help="one cache size for all workloads")
    parser.add_argument("--max-model-len", type=int, default=66_560)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: faster start, slower decode")
    parser.add_argument("--lives", type=int, default=1, help="engine lives per system and cache size")
    parser.add_argument("--life-seconds", type=float, default=300, help="a life is killed after this")
    parser.add_argument("--budget-seconds", type=float, default=3600, help="what does not fit is skipped, and said so")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--logs", type=Path, default=None, help="folder for the engines' logs")
    parser.add_argument("--resume", action="store_true", help="add to the result file instead of replacing it")
    loads = parser.add_argument_group("load")
    for field in fields(Load):
        kind = float if field.type == "float" else int
        loads.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return parser.parse_args()


def main() -> None:
    process.exit_on_sigterm()
    arguments = parse_arguments()
    arguments.model = arguments.model or model_shape.llama_3_1_8b()
    for name in arguments.systems:
        system(name, int(arguments.host_gib * GIB), arguments.overspill_extra)
    chosen_workloads(arguments.workloads)
    out = arguments.out or record.default_path("offload")
    result = load_result(arguments, out)
    if result["link"] is None:
        result["link"] = measure_link()
    record.write(out, result)
    say("importing vLLM")
    engine_life.import_engine()
    run_all(arguments, out, result)
    print_ratios(result)
    say(f"written to {out}")


if __name__ == "__main__":
    main()
