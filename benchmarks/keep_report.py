"""Keep what `overspill ab --json` wrote among the results, where tables of the documentation are made from it.

    overspill ab MODEL --a ... --b ... --json report.json
    python benchmarks/keep_report.py report.json ab-mine.json --note "the clock of the GPU was locked"

Names of folders do not travel with it: commands are shortened to their names, and paths to what follows a --folder.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import record
from record import Json

RESULTS = Path(__file__).parent / "results"


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


def this_commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, cwd=RESULTS, capture_output=True, text=True, check=True).stdout.strip()


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("report", type=Path, help="what overspill ab --json wrote")
    parser.add_argument("name", help="of the file in benchmarks/results")
    parser.add_argument("--commit", help="of Overspill that was measured; the one checked out, if it is not given")
    parser.add_argument("--note", action="append", default=[], help="what a reader should know; may be given again")
    parser.add_argument("--folder", action="append", default=[], help="left out of paths in it; may be given again")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    result = kept(
        record.read(arguments.report),
        commit=arguments.commit or this_commit(),
        notes=arguments.note,
        folders=arguments.folder,
    )
    path = RESULTS / Path(arguments.name).name
    record.write(path, result)
    record.say(f"kept as {path}")


if __name__ == "__main__":
    main()
