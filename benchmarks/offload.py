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
from dataclasses import fields
from functools import partial
from pathlib import Path

import lives
import record
import shapes
import summary
from record import GIB, Json, say
from systems import DEFAULT_SYSTEMS, system
from workloads import GROUPS, WORKLOADS, Life, Load

SMALL_CACHE_BLOCKS = 4500
# 24 requests of 8k + 1k tokens at once, in blocks of 16.
LARGE_CACHE_BLOCKS = 14_000
FIRST_LIFE_SECONDS = 150.0
# What is left of a life's time after its last repeat goes to shutting down.
SHUTDOWN_SECONDS = 20.0


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


def measure_link() -> Json | None:
    """In a process of its own: a CUDA context kept here would take memory from the engines."""
    command = [sys.executable, str(lives.HERE / "gpu.py")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if answer.returncode:
        say(f"link not measured: {answer.stderr.strip().splitlines()[-1:]}")
        return None
    link: Json | None = json.loads(answer.stdout.strip().splitlines()[-1])
    return link


def make_life(
    name: str, blocks: int, workloads: list[str], arguments: argparse.Namespace, seconds: float
) -> tuple[Life]:
    target = system(name, int(arguments.host_gib * GIB), arguments.overspill_extra)
    load = Load(**{field.name: getattr(arguments, field.name) for field in fields(Load)})
    return (
        Life(
            system=name, model=str(arguments.model), workloads=workloads, gpu_blocks=blocks, load=load,
            kv_transfer_config=target.kv_transfer_config, seconds=max(0.0, seconds - SHUTDOWN_SECONDS),
            max_model_len=arguments.max_model_len, load_format=arguments.load_format, dtype=arguments.dtype,
            enforce_eager=arguments.enforce_eager,
        ),
    )  # fmt: skip


def read_report(events: list[tuple[str, Json]]) -> Json:
    life: Json = {"at": record.now(), "workloads": {}, "notes": []}
    for event, facts in events:
        match event:
            case "started":
                life |= facts
            case "repeat":
                life["workloads"].setdefault(facts.pop("workload"), []).append(facts)
            case _:
                life["notes"].append(facts)
    return life


def run_all(arguments: argparse.Namespace, out: Path, result: Json) -> None:
    """Every system's lives in turns."""

    def keep(life: lives.Life, events: list[tuple[str, Json]], ended: Json) -> None:
        name = life.about["system"]
        entry = result["systems"].setdefault(
            name, {"kv_transfer_config": life.arguments(0.0)[0].kv_transfer_config, "lives": []}
        )
        entry["lives"].append(read_report(events) | {"gpu_blocks": life.kind} | ended)
        # Of a run that this one resumes.
        result["skipped"] = [one for one in result["skipped"] if {key: one[key] for key in life.about} != life.about]
        summary.summarise(result)
        say_life(name, entry)

    planned = [
        lives.Life(
            name=f"{name}-{blocks}", kind=blocks, work="live", about={"system": name, "workloads": group},
            arguments=partial(make_life, name, blocks, group, arguments),
        )
        for _ in range(arguments.lives)
        for blocks, group in lives_of(chosen_workloads(arguments.workloads), arguments.gpu_blocks)
        for name in arguments.systems
    ]  # fmt: skip
    lives.run_all(
        "engine_life", planned, keep, result=result, out=out, options=arguments, least_seconds=FIRST_LIFE_SECONDS,
        in_process=False,
    )  # fmt: skip


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


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--model", default=None, help="folder, or 'tiny'; default: Llama-3.1-8B's shape")
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
    lives.add_options(parser, life_seconds=300)
    loads = parser.add_argument_group("load")
    for field in fields(Load):
        kind = float if field.type == "float" else int
        loads.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    for name in arguments.systems:
        system(name, 0, arguments.overspill_extra)
    chosen_workloads(arguments.workloads)
    arguments.model = shapes.folder_of(arguments.model)
    per_token = shapes.kv_bytes_per_token(arguments.model, 4 if arguments.dtype == "float32" else 2)
    fresh: Json = {"kv_bytes_per_token": per_token, "link": None, "systems": {}}
    out, result = lives.load_result("offload", record.settings(arguments), arguments, fresh)
    if result["link"] is None:
        result["link"] = measure_link()
    run_all(arguments, out, result)
    print_ratios(result)
    say(f"written to {out}")


if __name__ == "__main__":
    main()
