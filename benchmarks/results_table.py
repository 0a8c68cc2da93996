"""The documents that show tables of results.

A document holds `<!-- table:NAME -->` … `<!-- /table -->`; what is between the markers is made by the
renderer NAME from the newest result of its benchmark, or from FILE in benchmarks/results where the
marker names one (`<!-- table:NAME FILE -->`); a table of several benchmarks takes FILE,FILE:

    python benchmarks/results_table.py README.md docs/*.md            writes the tables
    python benchmarks/results_table.py --check README.md docs/*.md    fails if a document is stale
    python benchmarks/results_table.py --print ttft --file mine.json  prints one table
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import record
from markdown_tables import TABLES

MARKED = re.compile(
    r"(?P<head><!-- table:(?P<name>[\w-]+)(?: (?P<file>[^\s>]+))? -->\n).*?(?P<end><!-- /table -->)",
    re.DOTALL,
)


def render(name: str, file: str | None = None, results: Path = record.RESULTS) -> str:
    if name not in TABLES:
        raise SystemExit(f"there is no table '{name}'; known: {', '.join(TABLES)}")
    benchmarks, renderer = TABLES[name]
    paths = (
        [results / one for one in file.split(",")] if file else [newest(one, results) for one in benchmarks.split(",")]
    )
    return renderer(*map(record.read, paths))


def newest(benchmark: str, results: Path) -> Path:
    found = sorted(results.glob(f"{benchmark}-*.json"), key=lambda path: str(record.read(path)["started"]))
    if not found:
        raise SystemExit(f"no {benchmark}-*.json in {results}")
    return found[-1]


def refresh(document: str, results: Path = record.RESULTS) -> str:
    """The document with every marked table made anew."""

    def replace(match: re.Match[str]) -> str:
        return match["head"] + render(match["name"], match["file"], results) + match["end"]

    return MARKED.sub(replace, document)


def main() -> None:
    parser = record.argument_parser(__doc__)
    parser.add_argument("documents", type=Path, nargs="*")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is stale")
    parser.add_argument("--print", metavar="NAME", choices=TABLES, help="print one table of --file")
    parser.add_argument("--file", help="result file, instead of the newest")
    arguments = parser.parse_args()
    if arguments.print:
        file = str(Path(arguments.file).resolve()) if arguments.file else None
        print(render(arguments.print, file), end="")
    stale = []
    for path in arguments.documents:
        before = path.read_text()
        after = refresh(before)
        if before != after:
            stale.append(str(path))
            if not arguments.check:
                path.write_text(after)
    if arguments.check and stale:
        sys.exit(f"stale tables in {', '.join(stale)}; run: python benchmarks/results_table.py {' '.join(stale)}")


if __name__ == "__main__":
    main()
