"""Tables made from the code: settings, options, metrics, recipes, and the list of packages.

python docs/generate.py            writes the tables
python docs/generate.py --check    fails if a page is stale
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
MARKED = re.compile(
    r"(?P<head><!-- generated:(?P<name>[\w-]+) -->\n).*?(?P<end><!-- /generated -->)",
    re.DOTALL,
)


def options() -> str:
    from overspill.kv.options import Options

    rows = []
    for f in fields(Options):
        default = str(f.default).lower() if isinstance(f.default, bool) else str(f.default)
        rows.append((f"`{f.name}`", _default(f.name, default), f.metadata["help"]))
    return _table(("option", "default", "meaning"), rows)


def elsewhere() -> str:
    from overspill.kv.options import ELSEWHERE

    same: dict[str, list[str]] = {}
    for name, instead in ELSEWHERE.items():
        same.setdefault(instead, []).append(f"`{name}`")
    return _table(("there", "here"), [(", ".join(names), _sentence(instead)) for instead, names in same.items()])


def counters() -> str:
    from overspill.kv.metrics import COUNTERS

    return _table(("series", "counts"), _series(COUNTERS, "_total"))


def gauges() -> str:
    from overspill.kv.metrics import GAUGES

    return _table(("series", "is"), _series(GAUGES, ""))


def contexts() -> str:
    from docs import recipes

    tables = recipes.contexts().items()
    return "\n".join(f"### {machine.text} of RAM\n\n{_table(head, rows)}" for machine, (head, *rows) in tables)


def _settings(scopes: Sequence[str], left_out: Sequence[str] = ()) -> Callable[[], str]:
    def table() -> str:
        from overspill.settings import TABLE

        rows = [
            (", ".join(f"`{flag}`" for flag in setting.flags), setting.help)
            for setting in TABLE
            if setting.scope in scopes and setting.name not in left_out
        ]
        return _table(("flag", "meaning"), rows)

    return table


def service_flags() -> str:
    from overspill.settings import SETTINGS

    flags = [flag for setting in SETTINGS for flag in setting.flags if setting.name not in ("gpu", "force")]
    return _table(("flag", "meaning"), [(", ".join(f"`{flag}`" for flag in flags), "[what to plan](plan.md)")])


def _recipe(name: str) -> Callable[[], str]:
    def table() -> str:
        from docs import recipes

        head, *rows = getattr(recipes, name)()
        return _table(head, rows)

    return table


def formula() -> str:
    from docs import recipes

    return f"```text\n{recipes.formula()}```\n"


def packages() -> str:
    """Packages and top modules of Overspill, each with the first line of its documentation."""
    source = ROOT / "src/overspill"
    rows = [(f"{path.parent.name}/", _purpose(path)) for path in source.glob("*/__init__.py")]
    rows += [(path.name, _purpose(path)) for path in source.glob("[a-z]*.py")]
    width = max(len(name) for name, _ in rows)
    lines = (f"{name:{width}}  {purpose}\n" for name, purpose in sorted(rows))
    return "```text\n" + "".join(lines) + "```\n"


def _purpose(path: Path) -> str:
    """A module's first line of documentation."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].rstrip(".")


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "elsewhere": elsewhere,
    "counters": counters,
    "gauges": gauges,
    "plan-settings": _settings(("everywhere", "commands"), ("host", "port")),
    "serve-settings": _settings(("everywhere", "commands")),
    "model-settings": _settings(("everywhere", "models"), ("vllm_args",)),
    "service-flags": service_flags,
    "contexts": contexts,
    "lengths": _recipe("lengths"),
    "too-large": _recipe("too_large"),
    "smaller": _recipe("smaller"),
    "idle": _recipe("idle"),
    "formula": formula,
    "packages": packages,
}
PAGES = tuple(
    HERE / f"{name}.md"
    for name in ("options", "metrics", "recipes", "architecture", "plan", "serve", "models", "service")
)


def refresh(page: str) -> str:
    """The page with every marked table made anew."""
    return MARKED.sub(lambda match: match["head"] + TABLES[match["name"]]() + match["end"], page)


def _default(name: str, default: str) -> str:
    from overspill.kv.sizes import format_size

    return f'`"{format_size(int(default)).replace(" ", "")}"`' if name == "reserve_bytes" else f"`{default}`"


def _sentence(text: str) -> str:
    """With names of options and flags as code."""
    text = re.sub(r'"[a-z_]+": "\w+"|"\w+"|--[a-z-]+|\b[a-z]+(?:_[a-z]+)+\b', lambda match: f"`{match[0]}`", text)
    return text[0].upper() + text[1:] + "."


def _series(table: Mapping[str, str], suffix: str) -> list[tuple[str, ...]]:
    return [(f"`overspill_{name}{suffix}`", f"{text}.") for name, text in table.items()]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    check = parser.parse_args().check
    stale = []
    for path in PAGES:
        before = path.read_text()
        after = refresh(before)
        if before != after:
            stale.append(path.name)
            if not check:
                path.write_text(after)
    if check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run: python docs/generate.py")


if __name__ == "__main__":
    main()
