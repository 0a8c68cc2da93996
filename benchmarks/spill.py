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
import tempfile
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import model_shape
import process
import record
import spill_life
import spill_plan
import spill_summary
import spill_tables
from record import Json, say
from spill_life import Life
from spill_plan import LOAD_HELP, Load

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
    from overspill.kv.sizes import parse_size

    return int(parse_size(text))


def element_bytes(arguments: argparse.Namespace) -> int:
    if arguments.kv_cache_dtype.startswith("fp8"):
        return 1
    return 4 if arguments.dtype == "float32" else 2


def make_life(name: str, report: Path, seconds: float, arguments: argparse.Namespace) -> Life:
    load = Load(**{field.name: getattr(arguments, field.name) for field in fields(Load)})
    lengths, phases = arguments.lengths, arguments.phases
    max_model_len = max(lengths) + spill_plan.output_room(load, lengths, phases)
    transfer: Json | None = None
    if name == "spill":
        extra: Json = {
            "spill_bytes": arguments.spill_bytes
            or spill_plan.spill_bytes(
                load, phases, max_model_len=max_model_len,
                bytes_per_token=model_shape.kv_bytes_per_token(arguments.model, element_bytes(arguments)),
            )
        }  # fmt: skip
        if arguments.resident_bytes:
            extra["resident_bytes"] = arguments.resident_bytes
        transfer = {
            "kv_connector": "OverspillConnector", "kv_connector_module_path": "overspill.kv.connector",
            "kv_role": "kv_both", "kv_connector_extra_config": extra | arguments.overspill_extra,
        }  # fmt: skip
    fits_only = name == "baseline"
    return Life(
        name=name, model=str(arguments.model), report=str(report), seconds=max(0.0, seconds - SHUTDOWN_SECONDS),
        lengths=() if fits_only else lengths, phases=("long",) if fits_only else phases, batches=arguments.batches,
        load=load, max_model_len=-1 if fits_only else max_model_len, positions=max_model_len,
        kv_transfer_config=transfer,
        gpu_bytes=None if name == "gpu" else arguments.gpu_bytes,
        kv_bytes=arguments.resident_bytes if fits_only else None,
        kv_cache_dtype=arguments.kv_cache_dtype, dtype=arguments.dtype, load_format=load_format(arguments.model),
        block_size=arguments.block_size, max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens, enforce_eager=arguments.enforce_eager,
        cudagraph_mode=arguments.cudagraph_mode,
    )  # fmt: skip


def load_format(model: Path) -> str:
    return "auto" if any(model.glob("*.safetensors")) else "dummy"


def run_life(name: str, seconds: float, arguments: argparse.Namespace) -> Json:
    """One engine life from start to end, whatever becomes of it."""
    folder = arguments.logs or Path(tempfile.mkdtemp(prefix="life-"))
    stem = f"{name}-{arguments.model.name}-{arguments.kv_cache_dtype}-{max(arguments.lengths)}-{int(time.time())}"
    log = folder / f"{stem}.log"
    # Beside the log: should even this process be killed, the file of the life that ran is still there.
    life = make_life(name, folder / f"{stem}.jsonl", seconds, arguments)
    ended = process.run_to_end(name, partial(spill_life.run, life), log, seconds)
    return {
        "name": name,
        "model": arguments.model.name,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "at": record.now(),
        "settings": life_settings(life),
        **ended,
        **read_report(Path(life.report)),
    }


def life_settings(life: Life) -> Json:
    kept = ("lengths", "phases", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "gpu_bytes", "kv_bytes",
            "kv_transfer_config", "dtype", "load_format", "enforce_eager", "cudagraph_mode")  # fmt: skip
    return {name: getattr(life, name) for name in kept}


def read_report(path: Path) -> Json:
    life: Json = {"phases": {}, "failed": [], "notes": []}
    for event, said in record.events(path):
        match event:
            case "started":
                life |= said
            case "repeat":
                life["phases"].setdefault(said.pop("phase"), []).append(said)
            case "failed":
                life["failed"].append(said)
            case _:
                life["notes"].append(said)
    return life


def load_result(arguments: argparse.Namespace, out: Path) -> Json:
    # Where files lie on this machine says nothing about the result.
    settings = record.settings(arguments) | {"model": arguments.model.name}
    header = record.header("spill", {k: v for k, v in settings.items() if k not in ("out", "logs", "tables")})
    if not (arguments.resume and out.exists()):
        return header | {"lives": [], "skipped": [], "resumed": []}
    return record.resumed(out, header)


def run_all(arguments: argparse.Namespace, out: Path, result: Json) -> None:
    """The lives one after another, as far as the budget goes."""
    deadline = time.monotonic() + arguments.budget_seconds
    for name in arguments.lives:
        left = deadline - time.monotonic()
        if left < min(LEAST_SECONDS, arguments.life_seconds):
            why = f"{left:.0f} s of the budget left"
            result["skipped"].append({"life": name, "why": why})
            say(f"skipped {name}: {why}")
            record.write(out, result)
            continue
        say(f"{name}: lengths {arguments.lengths}; {left:.0f} s of the budget left")
        life = run_life(name, min(left, arguments.life_seconds), arguments)
        result["lives"].append(life)
        result["summary"] = spill_summary.summarise(result)
        record.write(out, result)
        say(f"{name}: {life['seconds']:.0f} s; measured {', '.join(life['phases']) or 'nothing'}")
        if life["error"] == process.STOPPED:
            raise SystemExit(143)


def model_folder(given: str | None) -> Path:
    if given is None:
        return model_shape.llama_3_1_8b()
    if given == "tiny":
        return model_shape.tiny()
    folder = Path(given).resolve()
    if not (folder / "config.json").is_file():
        raise SystemExit(f"--model {given}: there is no config.json")
    return folder


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
    parser.add_argument("--life-seconds", type=float, default=420, help="a life is killed after this")
    parser.add_argument("--budget-seconds", type=float, default=3600, help="what does not fit is skipped, and said so")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--logs", type=Path, default=None, help="folder for the engines' logs")
    parser.add_argument("--resume", action="store_true", help="add to the result file instead of replacing it")
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
    process.exit_on_sigterm()
    arguments = parse_arguments()
    if arguments.tables:
        print(spill_tables.text(record.read(arguments.tables)), end="")
        return
    if arguments.skip_longest:
        arguments.lengths = sorted(arguments.lengths)[:-1]
    if not arguments.lengths:
        raise SystemExit("--lengths leaves no length to measure")
    arguments.model = model_folder(arguments.model)
    out = arguments.out or record.default_path("spill")
    result = load_result(arguments, out)
    record.write(out, result)
    say("importing vLLM")
    spill_life.import_engine()
    run_all(arguments, out, result)
    print(spill_tables.text(result), end="")
    say(f"written to {out}")
    if any(life["failed"] for life in result["lives"]):
        raise SystemExit("some measurements are not what they claim to be: see 'failed' above")


if __name__ == "__main__":
    main()
