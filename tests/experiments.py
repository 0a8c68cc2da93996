"""An experiment as tests ask for it."""

from typing import Any

from overspill.measure.experiment import Experiment


def definition(**changes: Any) -> Experiment:
    values: dict[str, Any] = {
        "model": "tiny", "configurations": (("a", "none"), ("b", "native:1GiB")), "common": "--max-model-len 4k",
        "workload": "multi-turn:turns=2", "seed": 7, "repeats": 3, "keeps_engines": False, "expects": "offload",
    }  # fmt: skip
    return Experiment(**{**values, **changes})
