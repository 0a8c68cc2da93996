"""What was asked for on the command line, and whether it can be tried here."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from overspill.kv.errors import OverspillError
from overspill.launch.vllm import Vllm, installed_vllm, wrong_build
from overspill.planning.planner import Plan
from overspill.planning.refusal import refusal
from overspill.verify.errors import CannotVerify
from overspill.verify.scenarios import NAMES, Scenario, chosen

_MINUTES = 30
# Prompts are drawn from seeds; one that is larger is a typing mistake.
_MOST_SEED = 2**32
_MOST_MINUTES = 7 * 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    soak: bool
    seconds: float | None
    """How long a soak may take."""
    seed: int
    scenarios: tuple[Scenario, ...]
    random_weights: bool = False
    """In place of the model's, which need not be there."""

    @property
    def words(self) -> tuple[str, ...]:
        """What repeats it, but for seed and scenarios. The first round is the one that is repeated."""
        weights = ("--load-format", "dummy") if self.random_weights else ()
        return (*weights, *(("--soak", "--minutes", "1") if self.soak else ()))


def read_request(
    *, quick: bool, soak: bool, minutes: str | None, seed: str | None, scenarios: Sequence[str],
    load_format: str | None = None,
) -> Request:  # fmt: skip
    if load_format not in (None, "auto", "dummy"):
        raise OverspillError(
            f"--load-format: {load_format!r} is neither auto nor dummy; leave it out for the model's own weights"
        )
    if quick and soak:
        raise OverspillError("--quick and --soak exclude each other; leave one of them out")
    if minutes is not None and not soak:
        raise OverspillError("--minutes is for --soak: how long it goes on; add --soak, or leave it out")
    names = tuple(dict.fromkeys(scenarios))
    for name in names:
        if name not in NAMES:
            nearest = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
            raise OverspillError(
                f"--scenario: there is no {name!r}; did you mean {nearest}? Scenarios: {', '.join(NAMES)}"
            )
    found = chosen(names, soak=soak)
    for one in found:
        if one.soak_only and not soak:
            raise OverspillError(f"--scenario {one.name} is part of --soak; add that")
    seconds = 60 * _number("--minutes", minutes or str(_MINUTES), 1, _MOST_MINUTES) if soak else None
    return Request(soak=soak, seconds=seconds, seed=_number("--seed", seed or "0", 0, _MOST_SEED), scenarios=found,
                   random_weights=load_format == "dummy")  # fmt: skip


def _number(flag: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise OverspillError(f"{flag}: {text!r} is not a whole number from {least} to {most}; write for example 7")
    return int(text)


def require_this_machine(plan: Plan, vllm: Vllm | None = None) -> None:
    """A plan can be made for any machine; a proof is made on this one."""
    vllm = vllm or installed_vllm()
    if vllm is None:
        raise CannotVerify(
            "vLLM is not installed in this Python environment, and it is what is verified; install it with: "
            "pip install 'overspill[cuda]'"
        )
    if plan.chosen is None:
        raise CannotVerify(refusal(plan))
    if plan.gpu.is_stated and not plan.platform.is_cpu:
        raise OverspillError(
            "--gpu states a card, and a proof is made on the GPU that is here; leave it out, or use --gpu-memory to "
            "keep to a part of the GPU"
        )
    if (why := wrong_build(plan, vllm)) is not None:
        raise CannotVerify(why)
