"""Engine lives: each in a child process, one after another within a budget; what they report is kept in the result."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
from overspill.verify.children import ChildDied, Children
from record import Json, say

HERE = Path(__file__).parent
# The error of a life that ended because the script was asked to.
STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class Life:
    """One engine from its start to its end. `work` is a function of the module that children load."""

    name: str
    work: str
    arguments: Callable[[float], tuple[Any, ...]]
    """What it is given, for so many seconds."""
    kind: Any
    """Lives of one kind take about as long."""
    about: Json
    """How the list of skipped ones names it."""


Kept = Callable[[Life, list[tuple[str, Json]], Json], None]


def run_all(
    module: str, lives: Iterable[Life], keep: Kept, *, result: Json, out: Path, options: argparse.Namespace,
    least_seconds: float, in_process: bool = True,
) -> None:  # fmt: skip
    """As far as the budget goes; the result file is written after each. `keep` gets a life, what it reported, and how
    it ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logs = options.logs or Path(tempfile.mkdtemp(prefix="lives-"))
    logs.mkdir(parents=True, exist_ok=True)
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process)),
        # The compiler would choose kernels by timing them, and lives would round differently.
        "TORCHINDUCTOR_DETERMINISTIC": "1",
    }
    deadline = time.monotonic() + options.budget_seconds
    slowest: dict[Any, float] = {}
    with Children(module, environment, have_children=True) as children:
        for life in lives:
            left = deadline - time.monotonic()
            needed = slowest.get(life.kind, min(least_seconds, options.life_seconds))
            if left < needed:
                why = f"{left:.0f} s of the budget left, about {needed:.0f} s needed"
                result["skipped"].append({**life.about, "why": why})
                say(f"skipped {life.name}: {why}")
                record.write(out, result)
                continue
            say(f"{life.name}; {left:.0f} s of the budget left")
            children.log = logs / f"{re.sub('[:/]', '-', life.name)}-{int(time.time())}.log"
            events, ended = _run(children, life, min(left, options.life_seconds))
            # The first life also compiles, so it is a safe guess for the next ones.
            slowest[life.kind] = max(slowest.get(life.kind, 0.0), ended["seconds"])
            keep(life, events, ended)
            record.write(out, result)
            if ended["error"] == STOPPED:
                raise SystemExit(143)


def _run(children: Children, life: Life, seconds: float) -> tuple[list[tuple[str, Json]], Json]:
    began = time.monotonic()
    events: list[tuple[str, Json]] = []
    # Beside the log: should even this process be killed, what the life measured is still there.
    with children.log.with_suffix(".jsonl").open("a") as lines:

        def hear(said: Json) -> None:
            print(json.dumps(said), file=lines, flush=True)
            events.append((said.pop("event"), said))

        error = None
        try:
            children.run(life.work, *life.arguments(seconds), hear=hear, seconds=seconds)
        except ChildDied as died:
            error = str(died)
        except SystemExit:
            # This process was asked to end; what the life has measured is kept all the same.
            error = STOPPED
    ended: Json = {"seconds": time.monotonic() - began, "error": error}
    if error:
        ended["log_tail"] = children.log.read_text(errors="replace").splitlines()[-40:]
        print(f"{life.name}: {error}; last lines of {children.log}:", *ended["log_tail"][-15:], sep="\n", flush=True)
    return events, ended


def load_result(benchmark: str, settings: Json, options: argparse.Namespace, fresh: Json) -> tuple[Path, Json]:
    """The file, and what is in it so far: `fresh`, unless it is resumed."""
    out: Path = options.out or record.default_path(benchmark)
    # Where files lie on this machine says nothing about the result.
    kept = {key: value for key, value in settings.items() if key not in ("out", "logs", "models")}
    header = record.header(benchmark, kept)
    if options.resume and out.exists():
        return out, record.resumed(out, header)
    result = header | fresh | {"skipped": [], "resumed": []}
    record.write(out, result)
    return out, result


def add_options(parser: argparse.ArgumentParser, *, life_seconds: float) -> None:
    parser.add_argument("--life-seconds", type=float, default=life_seconds, help="an engine is killed after this")
    parser.add_argument("--budget-seconds", type=float, default=3600, help="what does not fit is skipped, and said so")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--logs", type=Path, default=None, help="folder for the engines' logs")
    parser.add_argument("--resume", action="store_true", help="add to the result file instead of replacing it")
