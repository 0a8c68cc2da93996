"""Experiments of experiments.toml, run by `overspill ab`, and its reports kept among the results.

    python benchmarks/experiments.py multi-turn                       runs one, and keeps its report
    python benchmarks/experiments.py multi-turn --print               only prints its command
    python benchmarks/experiments.py --keep report.json ab-mine.json --note "the clock of the GPU was locked"

Tables of the documentation are made from what is kept. Names of folders do not travel with it: commands are shortened
to their names, and paths to what follows a --folder.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import record
import shapes
from record import Json

EXPERIMENTS: Json = tomllib.loads((Path(__file__).parent / "experiments.toml").read_text())


def command_of(name: str, model: str) -> list[str]:
    one = EXPERIMENTS[name]
    words = ["overspill", "ab", model]
    for letter, configuration in zip("abcdefgh", one["configurations"]):
        words += [f"--{letter}", configuration]
    words += ["--common", one["common"], "--workload", one["workload"]]
    words += ["--repeats", str(one["repeats"]), "--seed", "0", "--keep"]
    return words + (["--expect", one["expect"]] if "expect" in one else [])


def kept(report: Json, *, commit: str, notes: list[str], folders: list[str]) -> Json:
    started = min((result["started_at"] for result in report["results"]), default=None)
    if started is None:
        raise SystemExit("error: the report holds no result: nothing was measured")
    short: Json = _without(report, tuple(folder.rstrip("/") + "/" for folder in folders))
    for result in short["results"]:
        result["config"].pop("log_file", None)
        if result["argv"]:
            result["argv"][0] = Path(result["argv"][0]).name
    return {"benchmark": "ab", "started": started, "commit": commit, "notes": notes, **short}


def _without(value: Any, folders: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, folders) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, folders) for item in value]
    if isinstance(value, str):
        for folder in folders:
            value = value.replace(folder, "")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("name", nargs="?", choices=EXPERIMENTS, help="of an experiment")
    parser.add_argument("--model", default=None, help="folder; default: Llama-3.1-8B's shape")
    parser.add_argument("--print", action="store_true", help="print the command, run nothing")
    parser.add_argument("--keep", nargs=2, metavar=("REPORT", "FILE"), help="keep what overspill ab --json wrote")
    parser.add_argument("--commit", help="of Overspill that was measured; the one checked out, if it is not given")
    parser.add_argument("--note", action="append", default=[], help="what a reader should know; may be given again")
    parser.add_argument("--folder", action="append", default=[], help="left out of paths in it; may be given again")
    arguments = parser.parse_args()
    if (arguments.name is None) == (arguments.keep is None):
        parser.error("give the name of an experiment, or --keep")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.print:
        print(shlex.join(command_of(arguments.name, arguments.model or "llama-3.1-8b")))
        return
    if arguments.keep:
        report, path = Path(arguments.keep[0]), record.RESULTS / Path(arguments.keep[1]).name
    else:
        model = shapes.folder_of(arguments.model)
        arguments.folder.append(str(model.parent))
        report = Path(tempfile.mkdtemp(prefix="ab-")) / "report.json"
        path = record.default_path(f"ab-{arguments.name}")
        command = [sys.executable, "-m", *command_of(arguments.name, str(model)), "--json", str(report)]
        subprocess.run(command, check=True)
    commit = arguments.commit or record.commit() or "not recorded"
    record.write(path, kept(record.read(report), commit=commit, notes=arguments.note, folders=arguments.folder))
    record.say(f"kept as {path}")


if __name__ == "__main__":
    main()
