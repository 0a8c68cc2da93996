"""Three engines of one card, whose KV memory follows their bursts: beside fixed thirds, and beside one engine alone.

    python benchmarks/elastic.py                      Llama-3.1-8B's shape; about 6 minutes on an H200
    python benchmarks/elastic.py --model tiny --dtype float32 --kv-bytes 24MiB --host-bytes 64MiB --move-bytes 4MiB \\
        --max-model-len 1024 --requests 8 --input 400 --output 16 --rounds 1                on a CPU, 3 minutes

Measured, side by side in one run, with bursts of --requests prompts at once:

    static     one engine with all of the KV memory, which is fixed
    alone      one engine with all of it, elastic
    thirds     three elastic engines with a third each, which nobody changes: bursts in turn
    shared     the same three, and the manager's division of the card

Each burst has prompts of its own. After the bursts each engine gets its last prompts once more: what of them is found,
on the GPU or in RAM, was not lost by shrinking. Weights are drawn at random: speed depends on shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import record
import shapes
from overspill.address import free_port
from overspill.kv.ledger import Account, Ledger
from overspill.manager.grants import Grants, committed
from park import COMPUTED, FEW_GRAPHS, Parked, command, has_gpu, size
from record import Json, say
from servers import started

ENGINES = ("a", "b", "c")
LOOK_SECONDS = 0.1  # as the manager looks
GRAPHS = {**FEW_GRAPHS, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32]}


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, names: tuple[str, ...], ledger: Path | None) -> Iterator[list[Parked]]:
    logs = Path(tempfile.mkdtemp(prefix="elastic-"))
    options: Json = {"store": "lazy"}
    if ledger is not None:
        options |= {"ledger": str(ledger), "ledger_bytes": arguments.kv_bytes // len(names)}
    flags = ["--max-num-seqs", "64"]
    # Uncompiled: starts are shorter, and every phase decodes alike.
    flags += ["--compilation-config", json.dumps(GRAPHS)] if has_gpu() else ["--enforce-eager"]
    with contextlib.ExitStack() as stack:
        servers = []
        for name in names:
            port = free_port()
            servers.append(stack.enter_context(started(command(arguments, port, options, *flags), logs / name, port)))
        for server in servers:
            try:
                server.wait("/health", arguments.timeout)
            except RuntimeError:
                print("\n".join(server.tail(60)), flush=True)
                raise
        engines = [Parked(server, "", str(arguments.model)) for server in servers]
        for engine in engines:
            engine.ask([100, 101, 102, 103])
        yield engines


class Division(threading.Thread):
    """The manager's side: looks at the ledger and grants; keeps what it saw."""

    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(daemon=True)
        self._grants, self._capacity, self._over = Grants(path), capacity, threading.Event()
        self.seen: list[tuple[float, dict[int, Account]]] = []

    def run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            accounts = self._grants.look()
            self.seen.append((time.monotonic(), accounts))
            free = self._capacity - committed(accounts.values())
            self._grants.grant(accounts, free, claimed=0, starting=())

    def end(self) -> None:
        self._over.set()
        self.join()
        self._grants.close()


def burst(engine: Parked, prompts: list[list[int]], output: int) -> Json:
    computed, began = engine.counter(COMPUTED), time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: engine.stream(prompt, output), prompts))
    seconds = time.monotonic() - began
    times = [one["ttft_seconds"] for one in answers]
    return {
        "seconds": seconds, "mean_ttft_seconds": statistics.mean(times), "worst_ttft_seconds": max(times),
        "tokens_per_second": sum(len(one["tokens"]) for one in answers) / seconds,
        "computed_share": (engine.counter(COMPUTED) - computed) / sum(map(len, prompts)),
    }  # fmt: skip


def moved_seconds(seen: list[tuple[float, dict[int, Account]]], num_bytes: int) -> float | None:
    """The shortest time in which some engine's memory grew by so much."""
    best: float | None = None
    for row in {row for _, accounts in seen for row in accounts}:
        held = [(at, accounts[row].held) for at, accounts in seen if row in accounts]
        for first, (begun, before) in enumerate(held):
            grown = next((at - begun for at, now in held[first:] if now - before >= num_bytes), None)
            best = grown if best is None else min(best, grown or best)
    return best


def measure(arguments: argparse.Namespace, result: Json, out: Path) -> None:
    make = shapes.Prompts(int(shapes.config_of(arguments.model)["vocab_size"]), 0)

    def prompts(name: str, number: int) -> list[list[int]]:
        return [make(f"{name}-{number}", index, arguments.input) for index in range(arguments.requests)]

    def keep(name: str, facts: Json) -> None:
        result["phases"][name] = facts
        record.write(out, result)
        say(f"{name}: {record.dumps({key: value for key, value in facts.items() if key != 'bursts'})}")

    def in_turn(name: str, engines: list[Parked], rounds: int) -> list[Json]:
        return [
            {"engine": ENGINES[at], **burst(engine, prompts(f"{name}-{ENGINES[at]}", number), arguments.output)}
            for number in range(rounds)
            for at, engine in enumerate(engines)
        ]

    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    for name, path in (("static", None), ("alone", folder / "one.ledger")):
        with serving(arguments, (name,), path) as (engine,):
            burst(engine, prompts("warm", 0), 2)
            keep(name, summary(in_turn(name, [engine], arguments.rounds * len(ENGINES))))
    path = folder / "three.ledger"
    ledger = Ledger(path)
    with serving(arguments, ENGINES, path) as engines:
        for engine in engines:
            burst(engine, prompts("warm", 0), 2)
        rows = sorted(ledger.accounts(), key=lambda row: ledger.accounts()[row].pid)
        result["floor_bytes"] = ledger.accounts()[rows[0]].floor
        keep("thirds", summary(in_turn("thirds", engines, arguments.rounds)))
        division = Division(path, arguments.kv_bytes)
        division.start()
        try:
            bursts = in_turn("shared", engines, arguments.rounds)
        finally:
            division.end()
        again = [
            burst(engine, prompts(f"shared-{ENGINES[at]}", arguments.rounds - 1), 2)
            for at, engine in enumerate(engines)
        ]
        most = max(sum(one.held for one in accounts.values()) for _, accounts in division.seen)
        keep("shared", {
            **summary(bursts), "most_held_bytes": most, "move_bytes": arguments.move_bytes,
            "move_seconds": moved_seconds(division.seen, arguments.move_bytes),
            "found_again_share": [1 - one["computed_share"] for one in again],
            **{name: sum(engine.counter(f"overspill_{name}") for engine in engines)
               for name in ("shrink_lost_blocks", "shrunk_bytes", "grown_bytes")},
        })  # fmt: skip
        if most > arguments.kv_bytes:
            raise SystemExit("error: engines held more than there is")
    ledger.close()
    phases = result["phases"]
    result["summary"] = {
        "steady_over_static": phases["alone"]["tokens_per_second"] / phases["static"]["tokens_per_second"],
        "shared_ttft_over_alone": phases["shared"]["mean_ttft_seconds"] / phases["alone"]["mean_ttft_seconds"],
        "thirds_ttft_over_alone": phases["thirds"]["mean_ttft_seconds"] / phases["alone"]["mean_ttft_seconds"],
        "move_seconds": phases["shared"]["move_seconds"],
        "lost_blocks": phases["shared"]["shrink_lost_blocks"],
    }


def summary(bursts: list[Json]) -> Json:
    names = ("mean_ttft_seconds", "tokens_per_second")
    return {**{name: statistics.mean(one[name] for one in bursts) for name in names}, "bursts": bursts}


def main() -> None:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--model", default=None, help="folder, or 'tiny'; default: Llama-3.1-8B's shape")
    parser.add_argument("--rounds", type=int, default=2, help="bursts for each engine")
    parser.add_argument("--requests", type=int, default=20, help="of a burst, at once")
    parser.add_argument("--input", type=int, default=8000, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument("--kv-bytes", type=size, default=size("27GiB"), help="GPU memory for KV, of all engines")
    parser.add_argument("--host-bytes", type=size, default=size("20GiB"), help="RAM for KV, of each")
    parser.add_argument("--move-bytes", type=size, default=size("8GiB"), help="of which the time to move is measured")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one start")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    arguments.model = shapes.folder_of(arguments.model)
    out = arguments.out or record.default_path("elastic")
    result = record.header("elastic", record.settings(arguments)) | {"phases": {}}
    measure(arguments, result, out)
    record.write(out, result)
    print(record.dumps(result["summary"]))
    say(f"written to {out}")


if __name__ == "__main__":
    main()
