"""Which tests start nothing: no engine, server, browser, database or other process. `make test-fast` runs those.

Read from the code of a test and of its fixtures: the functions and classes of the tests that they use, and so on.
"""

import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

# Modules, functions and attributes whose use starts a process or an engine.
STARTING = (
    "LLM",
    "asyncio.subprocess",
    "multiprocessing",
    "overspill.llm",
    "overspill.measure.ab.run",
    "overspill.measure.tune.run",
    "overspill.serve.run.run_server",
    "overspill.verify.children",
    "overspill.verify.run.prove",
    "subprocess",
    "tests.certificates",
    "tests.chromium",
    "tests.engine.engine",
    "tests.managed",
    "tests.manager_process",
    "tests.postgresql",
    "tests.zygote.cold",
    "vllm.entrypoints.llm",
)
# Fixtures of tests that start processes in other ways.
STARTING_FIXTURES = {"nothing_is_left", "here", "place"}


def starts_nothing(item: pytest.Function) -> bool:
    if STARTING_FIXTURES & set(item.fixturenames):
        return False
    automatic = {"own_ports", "preloaded"}
    definitions = item._fixtureinfo.name2fixturedefs
    fixtures = [one.func for name, found in definitions.items() if name not in automatic for one in found]
    return not any(map(_starts, (item.function, *fixtures)))


@cache
def _starts(function: Any) -> bool:
    """Asked once for all cases of a test, and all tests of a fixture."""
    return any(name.startswith(STARTING) for name in _used(function))


def _used(function: Any) -> Iterator[str]:
    """Names of all that the function uses; functions and classes of the tests are followed."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, types.ModuleType):
            yield one.__name__
            continue
        one = (getattr(one, "hypothesis", None) and one.hypothesis.inner_test) or one
        while hasattr(one, "__wrapped__"):
            one = one.__wrapped__
        module, name = getattr(one, "__module__", None), getattr(one, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            continue
        yield f"{module}.{name}"
        if not module.startswith("tests."):
            continue
        if isinstance(one, type):
            waiting += [getattr(part, "fget", None) or part for part in vars(one).values()]
        elif isinstance(one, types.FunctionType):
            for word in _words(one.__code__):
                yield word  # an attribute, or a module that is imported in the function
                if word in one.__globals__:
                    waiting.append(one.__globals__[word])


def _words(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _words(part)
