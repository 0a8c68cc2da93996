"""Figures keep where they come from."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from overspill.figures import Known, Origin, as_json, assumed, derived, measured, origin_of

A, D, M = assumed(1), derived(1), measured(1)


@pytest.mark.parametrize(
    ("sources", "origin"),
    [((M,), "derived"), ((M, M), "derived"), ((M, D), "derived"), ((D,), "derived"), ((A,), "assumed"),
     ((M, A), "assumed"), ((D, A), "assumed"), ((M, D, A), "assumed"), ((), "derived")],
)  # fmt: skip
def test_what_is_computed_is_no_better_than_its_weakest_source(sources: tuple[Known[int], ...], origin: str) -> None:
    assert origin_of(*sources) == origin
    assert derived("x", *sources, note="why") == Known("x", Origin(origin), "why")


def test_figures_become_json_with_integers_for_bytes() -> None:
    @dataclass(frozen=True)
    class Things:
        size_bytes: Known[int]
        nothing: Known[int] | None
        cpus: frozenset[int]
        folder: Path
        more: tuple[Known[bool], ...]

    things = Things(measured(2**40, "read"), None, frozenset({10, 9}), Path("/a"), (assumed(True),))
    assert json.loads(json.dumps(as_json(things))) == {
        "size_bytes": {"value": 2**40, "origin": "measured", "note": "read"},
        "nothing": None,
        "cpus": [9, 10],
        "folder": "/a",
        "more": [{"value": True, "origin": "assumed", "note": ""}],
    }


def test_what_has_no_json_form_is_an_error_and_not_a_string() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        as_json({"a": [object()]})
