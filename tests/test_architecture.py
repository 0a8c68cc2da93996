"""Imports run one way, as docs/architecture.md draws it."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/overspill"
PAGE = (ROOT / "docs/architecture.md").read_text()
PICTURE = PAGE.partition("<!-- layers -->")[2].partition("```text\n")[2].partition("```")[0]
LAYERS = [line.split() for line in PICTURE.splitlines()]
FLOOR = {name: len(LAYERS) - number for number, layer in enumerate(LAYERS) for name in layer}


def part_of(module: str) -> str:
    """Package or top module of a dotted name."""
    return module.split(".")[1]


def modules() -> Iterator[tuple[str, Path]]:
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(path: Path) -> set[str]:
    """Our modules that a file imports, in functions too; not those for type checkers only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("overspill.")}


@cache
def imports() -> dict[str, set[str]]:
    """By module; read when it is asked for, not in every process that collects tests."""
    return {module: imported(path) for module, path in modules() if module != "overspill"}


def arrows() -> set[tuple[str, str, str]]:
    return {
        (part_of(module), part_of(name), module)
        for module, names in imports().items()
        for name in names
        if part_of(name) in FLOOR and part_of(name) != part_of(module)
    }


def test_the_picture_shows_every_part() -> None:
    drawn = [name for layer in LAYERS for name in layer]
    parts = {part_of(module) for module in imports()} - {"__main__"}
    assert sorted(drawn) == sorted(parts)


def test_imports_run_down_the_picture() -> None:
    up = [
        f"{module} imports {to}" for of, to, module in sorted(arrows()) if of != "__main__" and FLOOR[of] <= FLOOR[to]
    ]
    assert not up


def test_kv_imports_nothing_else_of_ours() -> None:
    assert not [arrow for arrow in arrows() if arrow[0] == "kv"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = set(imports())
    graph = {}
    for module, names in imports().items():
        targets = {name if name in known else name.rpartition(".")[0] for name in names}
        graph[module] = {target for target in targets if target in known and target != module}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle
