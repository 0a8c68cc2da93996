"""Spill on one GPU: requests longer than its KV cache, beside the same requests all on the GPU.

Each life is an engine of its own, in a process of its own:

    spill      Overspill, GPU memory held to --gpu-bytes, the rest of the KV in RAM           about 230 s
    gpu        plain vLLM with the whole GPU: the peer, and the reference for tokens          about 140 s
    baseline   plain vLLM held to --gpu-bytes: the longest context that fits without spill     about 80 s

and runs these phases (estimates: Llama-3.1-8B on an H200; a start with CUDA graphs takes 60 to 100 s of them):

    long       TTFT of cold prompts of --lengths, then decode; tokens and logprobs are compared between lives
    batch      1, 8 and 64 short requests that need no RAM: time per token with spill on and without
    sharing    16 short requests beside a long one that decodes, at the default spill_share and at 1

The GPU memory of 'spill' holds a window for as many tokens as the longest of --lengths, so a length of 524288 belongs
in a run of its own: with it, 64 short requests no longer fit beside the window. A prompt of it takes two minutes.

    python benchmarks/spill.py                       all of it, about 450 s
    python benchmarks/spill.py --lives spill gpu --budget-seconds 560 --out mine.json --logs logs
    python benchmarks/spill.py --lives baseline --resume --out mine.json                adds a life to the file: 80 s
    python benchmarks/spill.py --lengths 524288 --phases long --lives spill gpu --resume --out mine.json       450 s
    python benchmarks/spill.py --lengths 131072 --phases long --lives spill gpu --kv-cache-dtype fp8           220 s
    python benchmarks/spill.py --lengths 131072 --phases long --lives spill gpu --gpu-bytes 70GB \\
        --model qwen3-coder-30b-a3b                                                                            280 s
    python benchmarks/spill.py --tables mine.json    only prints the tables
    python benchmarks/spill.py --model tiny --dtype float32 --enforce-eager --block-size 32 --lengths 300,2500 \\
        --spill-bytes 6MiB --resident-bytes 4MiB --max-num-batched-tokens 256 --batches 1,2 --batch-output 16 \\
        --sharing-requests 4 --sharing-input 32 --sharing-output 32 --sharing-long-output 256   on a CPU, 1 minute

--model is a folder with a config.json; without weights in it they are drawn at random, so that tokens depend on all
of the KV. The result file is written after every life, and keeps what a life that was killed had measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import lives
import markdown_tables as tables
import record
import shapes
import spill_plan
import spill_summary
from overspill.kv.sizes import parse_size
from record import Json, say
from spill_plan import LOAD_HELP, Life, Load

LIVES = ("spill", "gpu", "baseline")
PHASES = ("long", "batch", "sharing")
LENGTHS = (39_000, 52_000, 131_072)
BATCHES = (1, 8, 64)
# With less, an engine would be up just in time to be stopped.
LEAST_SECONDS = 100.0
# What is left of a life's time after its last repeat goes to shutting down.
SHUTDOWN_SECONDS = 20.0


def token_counts(text: str) -> list[int]:
    """`39k,52k,131072` -> tokens; k is a thousand."""
    return [int(float(part[:-1]) * 1000) if part.endswith("k") else int(part) for part in text.split(",")]


def size(text: str) -> int:
    return int(parse_size(text))


def element_bytes(arguments: argparse.Namespace) -> int:
    if arguments.kv_cache_dtype.startswith("fp8"):
        return 1
    return 4 if arguments.dtype == "float32" else 2


def make_life(name: str, arguments: argparse.Namespace, seconds: float) -> Life:
    load = Load(**{field.name: getattr(arguments, field.name) for field in fields(Load)})
    lengths, phases = arguments.lengths, arguments.phases
    max_model_len = max(lengths) + spill_plan.output_room(load, lengths, phases)
    per_token = shapes.kv_bytes_per_token(arguments.model, element_bytes(arguments))
    spilled = spill_plan.spill_bytes(load, phases, max_model_len=max_model_len, bytes_per_token=per_token)
    resident = {"resident_bytes": arguments.resident_bytes} if arguments.resident_bytes else {}
    options = {"spill_bytes": arguments.spill_bytes or spilled, **resident, **arguments.overspill_extra}
    fits_only = name == "baseline"
    return Life(
        name=name, model=str(arguments.model), seconds=max(0.0, seconds - SHUTDOWN_SECONDS),
        lengths=() if fits_only else lengths, phases=("long",) if fits_only else phases, batches=arguments.batches,
        load=load, max_model_len=-1 if fits_only else max_model_len, positions=max_model_len,
        options=options if name == "spill" else None, gpu_bytes=None if name == "gpu" else arguments.gpu_bytes,
        kv_bytes=arguments.resident_bytes if fits_only else None,
        load_format="auto" if any(arguments.model.glob("*.safetensors")) else "dummy",
        **{key: getattr(arguments, key) for key in ("kv_cache_dtype", "dtype", "block_size", "max_num_seqs",
           "max_num_batched_tokens", "enforce_eager", "cudagraph_mode")},
    )  # fmt: skip


def read_report(events: list[tuple[str, Json]]) -> Json:
    life: Json = {"phases": {}, "failed": [], "notes": []}
    for event, facts in events:
        match event:
            case "started":
                life |= facts
            case "repeat":
                life["phases"].setdefault(facts.pop("phase"), []).append(facts)
            case "failed":
                life["failed"].append(facts)
            case _:
                life["notes"].append(facts)
    return life


def run_all(arguments: argparse.Namespace, out: Path, result: Json) -> None:
    about = {"model": arguments.model.name, "kv_cache_dtype": arguments.kv_cache_dtype}

    def keep(life: lives.Life, events: list[tuple[str, Json]], ended: Json) -> None:
        settings = make_life(life.kind, arguments, arguments.life_seconds).settings()
        measured = read_report(events)
        result["lives"].append(
            {"name": life.kind, **about, "at": record.now(), "settings": settings, **ended, **measured}
        )
        result["summary"] = spill_summary.summarise(result)
        say(f"{life.kind}: {ended['seconds']:.0f} s; measured {', '.join(measured['phases']) or 'nothing'}")

    planned = [
        lives.Life(
            name=f"{name}-{arguments.model.name}-{arguments.kv_cache_dtype}-{max(arguments.lengths)}", kind=name,
            work="live", arguments=partial(_given, name, arguments), about={"life": name},
        )
        for name in arguments.lives
    ]  # fmt: skip
    lives.run_all("spill_phases", planned, keep, result=result, out=out, options=arguments, least_seconds=LEAST_SECONDS)


def _given(name: str, arguments: argparse.Namespace, seconds: float) -> tuple[Life]:
    return (make_life(name, arguments, seconds),)


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--model", default=None, help="folder, or 'tiny'; default: Llama-3.1-8B's shape")
    parser.add_argument("--lives", nargs="+", choices=LIVES, default=list(LIVES))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="of 'spill' and 'gpu'")
    parser.add_argument("--lengths", type=token_counts, default=list(LENGTHS), help="of prompts, as 39k,52k,131072")
    parser.add_argument("--skip-longest", action="store_true", help="leave out the longest of --lengths")
    parser.add_argument("--batches", type=token_counts, default=list(BATCHES), help="sizes, as 1,8,64")
    parser.add_argument("--gpu-bytes", type=size, default=size("24GB"), help="GPU memory, weights included")
    parser.add_argument("--spill-bytes", type=size, default=None, help="default: enough for the longest length")
    parser.add_argument("--resident-bytes", type=size, default=None, help="GPU memory for KV; default: what is free")
    parser.add_argument("--overspill-extra", type=json.loads, default={}, help="JSON added to Overspill's options")
    parser.add_argument("--kv-cache-dtype", default="auto", help="fp8 halves the bytes of KV")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: faster start, slower decode")
    parser.add_argument("--cudagraph-mode", default=None, help="default: vLLM's, FULL_AND_PIECEWISE")
    lives.add_options(parser, life_seconds=420)
    parser.add_argument(
        "--tables", type=Path, default=None, metavar="FILE", help="print a result's tables, run nothing"
    )
    loads = parser.add_argument_group("load")
    for field in fields(Load):
        kind: Any = float if field.type == "float" else int
        option = f"--{field.name.replace('_', '-')}"
        loads.add_argument(option, type=kind, default=field.default, help=f"{LOAD_HELP[field.name]}; {field.default}")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.tables:
        print(tables.spill_text(record.read(arguments.tables)), end="")
        return
    if arguments.skip_longest:
        arguments.lengths = sorted(arguments.lengths)[:-1]
    if not arguments.lengths:
        raise SystemExit("--lengths leaves no length to measure")
    arguments.model = shapes.folder_of(arguments.model)
    settings = record.settings(arguments) | {"model": arguments.model.name}
    settings.pop("tables")
    out, result = lives.load_result("spill", settings, arguments, {"lives": []})
    run_all(arguments, out, result)
    print(tables.spill_text(result), end="")
    say(f"written to {out}")
    if any(life["failed"] for life in result["lives"]):
        raise SystemExit("some measurements are not what they claim to be: see 'failed' above")


if __name__ == "__main__":
    main()
