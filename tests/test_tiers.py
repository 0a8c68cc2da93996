"""Tests that start something are told from those that do not."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.engine import engine, random_prompt, stock
from tests.tiers import starts_nothing


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-V"])


def uses_an_engine() -> None:
    with engine(Path("model")):
        pass


def uses_one_elsewhere() -> None:
    stock(Path("model"), [[1]])


def uses_a_class() -> None:
    Server()


def uses_a_nested_function() -> None:
    def start() -> None:
        subprocess.run([sys.executable, "-V"], check=True)

    start()


def imports_within() -> None:
    from tests.managed_here import managed_here

    managed_here(cast(Any, None))


def computes() -> None:
    assert random_prompt(1, 2)


def item_of(function: Callable[[], None], fixtures: dict[str, Any] | None = None) -> pytest.Function:
    definitions = {name: [SimpleNamespace(func=func)] for name, func in (fixtures or {}).items()}
    info = SimpleNamespace(name2fixturedefs=definitions)
    return cast(pytest.Function, SimpleNamespace(function=function, fixturenames=list(definitions), _fixtureinfo=info))


@pytest.mark.parametrize(
    "test", [uses_an_engine, uses_one_elsewhere, uses_a_class, uses_a_nested_function, imports_within]
)
def test_a_test_that_starts_something_is_not_fast(test: Callable[[], None]) -> None:
    assert not starts_nothing(item_of(test))
    assert not starts_nothing(item_of(computes, {"running": test})), "its fixture does"


def test_a_test_that_starts_nothing_is_fast() -> None:
    assert starts_nothing(item_of(computes, {"numbers": computes}))


def test_this_test_is_fast(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("fast")
