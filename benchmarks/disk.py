"""A prompt that returns after a stop and a start: from disk, beside the disk's raw read speed and vLLM's own fs tier.

    python benchmarks/disk.py --tokens 65536 --folder /mnt/nvme/kv

Each system has two engine lives, in processes of their own: one fills the disk and stops, one finds the prompt again.
Between them the page cache forgets the files, and the second waits until its pool is pinned, as it is by the time a
server with real weights answers. `raw` reads files of as many bytes with direct I/O and as many threads: one before the
prompt is read and one after. Both are as old as the KV: a disk may be faster with what was just written. `index` is the
time to read a journal of a million entries.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import record
import shapes
from record import GIB, Json, say

SYSTEMS = ("overspill", "vllm-fs")
READ_THREADS, READ_BYTES = 8, 8 << 20
MADV_POPULATE_WRITE = 23
LIFE_S = 600
# vLLM wants as much to be free at its start.
GPU_SHARE = 0.4
# Of Overspill's metrics, how long reading from disk and copying to the GPU took.
MEASURED = ("overspill_disk_read_", "overspill_load_")


def transfer_config(system: str, folder: Path, host_bytes: int, disk_bytes: int) -> Json:
    if system == "overspill":
        extra: Json = {
            "host_bytes": host_bytes, "disk_bytes": disk_bytes, "disk_path": str(folder), "load": "always",
            "reserve_bytes": 0,
        }  # fmt: skip
        return {
            "kv_connector": "OverspillConnector",
            "kv_connector_module_path": "overspill.kv.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        },
    }


def kv_bytes(arguments: argparse.Namespace) -> int:
    """Of the prompt."""
    element_bytes = 4 if arguments.dtype == "float32" else 2
    return int(arguments.tokens) * shapes.kv_bytes_per_token(arguments.model, element_bytes)


def live(arguments: argparse.Namespace) -> Json:
    """One engine life, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    config = transfer_config(
        arguments.system, arguments.folder, int(arguments.host_gib * GIB), int(arguments.disk_gib * GIB)
    )
    began = time.perf_counter()
    llm = LLM(
        model=str(arguments.model), load_format=arguments.load_format, dtype=arguments.dtype, skip_tokenizer_init=True,
        max_model_len=arguments.tokens + 64, enforce_eager=arguments.enforce_eager,
        # As planned engines are given theirs: another one may start or stop on the card meanwhile.
        kv_cache_memory_bytes=2 * kv_bytes(arguments), gpu_memory_utilization=GPU_SHARE,
        kv_transfer_config=KVTransferConfig(**config), disable_log_stats=False,
    )  # fmt: skip
    result: Json = {"start_s": time.perf_counter() - began}
    _pause_like_a_server(llm)

    prompts = shapes.Prompts(shapes.config_of(arguments.model)["vocab_size"], 0)

    def ask(number: int, tokens: int) -> Json:
        prompt = {"prompt_token_ids": prompts("disk", number, tokens)}
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return {
            "seconds": seconds,
            "cached_tokens": answer.num_cached_tokens,
            "token": answer.outputs[0].token_ids[0],
        }

    ask(1, min(2048, arguments.tokens))  # kernels are compiled, and memory is touched
    if arguments.life == "fill":
        result["computed"] = ask(7, arguments.tokens)
        _settle(llm, arguments.folder)
    else:
        result |= _wait_until_ready(llm)
        result["hit"] = ask(7, arguments.tokens)
        result["metrics"] = _metrics()
        result["computed"] = ask(8, arguments.tokens)
    begun = time.perf_counter()
    llm.llm_engine.engine_core.shutdown()
    result["stop_s"] = time.perf_counter() - begun
    return result


def _pause_like_a_server(llm: Any) -> None:
    """After a step without a model run, as vLLM's engine process does. Otherwise this loop would hold the interpreter's
    lock, for which threads that read wait."""
    core = llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def paused() -> Any:
        outputs, model_executed = step()
        if not model_executed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, model_executed

    core.step_fn = paused


def _wait_until_ready(llm: Any) -> Json:
    """Overspill's index and pool; vLLM's tier is ready when its engine is."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector
    worker: Any = get_kv_transfer_group()
    if not type(worker).__module__.startswith("overspill."):
        return {}
    began = time.perf_counter()
    scheduler._scheduler.disk.wait_until_open()
    worker._worker.memory.wait_until_prepared()
    return {"wait_s": time.perf_counter() - began, "pinned_bytes": worker._worker.memory.pinned_bytes}


def _metrics() -> Json:
    from prometheus_client import REGISTRY

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return {one.name: one.value for one in samples if one.name.startswith(MEASURED) and one.name.endswith("_total")}


def _settle(llm: Any, folder: Path) -> None:
    """Until stores are over, and a tier that writes as it goes has written."""
    core = llm.llm_engine.engine_core.engine_core
    size, still = -1, 0
    while core.scheduler.has_requests() or still < 5:
        llm.llm_engine.step()
        time.sleep(0.2)
        now = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
        size, still = now, still + 1 if now == size else 0


def forget_page_cache(folder: Path) -> list[Path]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size]
    os.sync()
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return files


def write_raw(path: Path, num_bytes: int) -> None:
    """A file of random bytes, past the page cache."""
    count = max(1, num_bytes // READ_BYTES)

    def write(thread: int) -> None:
        buffer = mmap.mmap(-1, READ_BYTES)
        for number in range(thread, count, READ_THREADS):
            buffer[:] = os.urandom(READ_BYTES)
            os.pwritev(file, [buffer], number * READ_BYTES)

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        with ThreadPoolExecutor(READ_THREADS) as threads:
            list(threads.map(write, range(READ_THREADS)))
        os.fsync(file)
    finally:
        os.close(file)


def raw_read(path: Path) -> Json:
    """Read the file past the page cache, on as many threads as Overspill reads with, and remove it. Into as much memory
    and as large pages as KV: a few buffers in turn stay in the CPU's caches, and have another speed."""
    num_bytes = path.stat().st_size
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(MADV_POPULATE_WRITE)
    view = memoryview(memory)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(thread: int) -> int:
        places = range(thread * READ_BYTES, num_bytes, READ_THREADS * READ_BYTES)
        return sum(os.preadv(file, [view[at : at + READ_BYTES]], at) for at in places)

    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(READ_THREADS) as threads:
            read_bytes = sum(threads.map(read, range(READ_THREADS)))
        seconds = time.perf_counter() - began
    finally:
        os.close(file)
        path.unlink()
    return {"bytes": read_bytes, "seconds": seconds, "bytes_per_s": read_bytes / seconds}


def index_seconds(entries: int) -> Json:
    import numpy as np

    from overspill.kv.disk.index import DiskIndex
    from overspill.kv.disk.journal import KEY_BYTES, Journal, record_type

    with tempfile.TemporaryDirectory() as folder:
        records = np.zeros(entries, record_type(1))
        records["key"] = np.frombuffer(os.urandom(entries * KEY_BYTES), f"V{KEY_BYTES}")
        records["parent"][1:] = records["key"][:-1]
        records["place"] = np.arange(entries)
        journal = Journal(Path(folder) / "journal", bytes(32), 1)
        journal.open()
        for first in range(0, entries, 256):
            journal.append(records[first : first + 256])
        journal.close()
        began = time.perf_counter()
        journal = Journal(Path(folder) / "journal", bytes(32), 1)
        index = DiskIndex.load(journal.open(), entries, 1)
        seconds = time.perf_counter() - began
        journal.close()
    return {"entries": len(index), "seconds": seconds}


def measure(system: str, num_bytes: int, arguments: argparse.Namespace) -> Json:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        older, younger = folder / "older", folder / "younger"
        write_raw(older, num_bytes)
        say(f"{system}: fill")
        result: Json = {"fill": run_life(system, "fill", folder / "kv", arguments)}
        if "error" in result["fill"]:
            return result
        write_raw(younger, num_bytes)
        files = forget_page_cache(folder / "kv")
        result["disk_bytes"] = sum(file.stat().st_blocks * 512 for file in files)
        result["raw"] = [raw_read(older)]
        say(f"{system}: hit")
        result["hit"] = run_life(system, "hit", folder / "kv", arguments)
        result["raw"].append(raw_read(younger))
    if "error" not in result["hit"]:
        hit = result["hit"]["hit"]
        result["hit_bytes_per_s"] = num_bytes / hit["seconds"]
        result["share_of_tokens"] = hit["cached_tokens"] / arguments.tokens
        raw = statistics.fmean(one["bytes_per_s"] for one in result["raw"])
        result["share_of_raw"] = result["hit_bytes_per_s"] / raw
        result["same_token"] = hit["token"] == result["fill"]["computed"]["token"]
    return result


def run_life(system: str, life: str, folder: Path, arguments: argparse.Namespace) -> Json:
    command = [sys.executable, __file__, "--life", life, "--system", system, "--folder", str(folder)]
    for name in ("model", "tokens", "host_gib", "disk_gib", "load_format", "dtype"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += ["--enforce-eager"] if arguments.enforce_eager else []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=LIFE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not over after {LIFE_S} s"}
    if answer.returncode:
        return {"error": "\n".join(answer.stderr.splitlines()[-5:])}
    found: Json = json.loads(answer.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--model", help="a folder with a config.json, or tiny; Llama-3.1-8B's shape if not given")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; two subfolders are made")
    parser.add_argument("--host-gib", type=float, default=24.0)
    parser.add_argument("--disk-gib", type=float, default=32.0)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--life", choices=("fill", "hit"), help=argparse.SUPPRESS)
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.model = shapes.folder_of(arguments.model)
    if arguments.life:
        print(json.dumps(live(arguments)))
        return
    num_bytes = kv_bytes(arguments)
    result = record.header("disk", record.settings(arguments))
    result["index"] = index_seconds(arguments.entries)
    path = arguments.out or record.default_path("disk")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    result["systems"] = {}
    for system in arguments.systems:
        result["systems"][system] = measure(system, num_bytes, arguments)
        record.write(path, result)
        say(f"{system}: {result['systems'][system]}")
    say(f"written to {path}")


if __name__ == "__main__":
    main()
