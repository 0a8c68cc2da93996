"""An experiment as tests ask for it."""

from typing import Any

from overspill.experiment.definition import Definition


def definition(**changes: Any) -> Definition:
    values: dict[str, Any] = {
        "model": "tiny", "configurations": (("a", "none"), ("b", "native:1GiB")), "common": "--max-model-len 4k",
        "workload": "multi-turn:turns=2", "seed": 7, "repeats": 3, "keeps_engines": False, "expects": "offload",
    }  # fmt: skip
    return Definition(**{**values, **changes})
