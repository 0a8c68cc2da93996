"""A model's card: its settings, its engine and what was measured of it, ready to be shown."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.kv.sizes import exact_size
from overspill.manager.pages.words import element_id
from overspill.manager.states import Snapshot, State
from overspill.registry import Model, Registry, list_results
from overspill.settings import MODEL_SETTINGS

_SPEEDS = ("output_throughput", "mean_ttft_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    action: str
    label: str
    help: str
    is_main: bool = False
    confirm: str = ""
    """What is asked before it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    model: Model | None
    """None for an engine whose model was removed meanwhile."""
    engine: Snapshot
    refusal: str = ""
    speed: Mapping[str, float] | None = None
    others: Sequence[str] = ()
    """Engines of other models that run: these may have to make room for it."""

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def id(self) -> str:
        return element_id(self.name)

    @property
    def phases(self) -> tuple[str, ...]:
        """What there is to say beside its state."""
        engine = self.engine
        is_kept, is_preloaded = (self.model.settings.keep, self.model.settings.preload) if self.model else (None, None)
        # Without a process it waits for memory; one that has just begun has told nothing yet.
        starting = engine.phase or ("the process begins" if engine.pid is not None else "waiting for room")
        told = (
            (engine.state is State.STARTING, starting),
            (engine.is_draining, "answers what it has, then stops for another model"),
            (not engine.is_managed and engine.pid is not None, "started outside the manager"),
            (is_kept, "kept"),
            (is_preloaded, "starts with the manager"),
        )
        return tuple(text for is_so, text in told if is_so)

    @property
    def buttons(self) -> tuple[Button, ...]:
        match self.engine.state:
            case State.STOPPED | State.FAILED:
                return (
                    Button(action="start", label="Start", help="Starts it, if there is room", is_main=True),
                    Button(
                        action="switch",
                        label="Switch to it",
                        help="Starts it, and stops what is in its way",
                        confirm=self._what_may_stop,
                    ),
                )
            case State.STARTING:
                return (Button(action="stop", label="Stop", help="Ends the start"),)
            case State.READY:
                return (
                    Button(action="stop", label="Stop", help="Ends it; requests that wait are refused"),
                    Button(
                        action="restart", label="Restart", help="Stops it, and starts it with its settings of now",
                        is_main=bool(self.engine.needs_restart),
                    ),
                )  # fmt: skip
        return ()

    @property
    def facts(self) -> list[tuple[str, Any, str]]:
        """Name, value and unit: as it runs, else as it is set."""
        facts = self._planned_facts if self.engine.plan else self._set_facts
        if self.speed is not None:
            facts += [
                ("Last measured", self.speed.get("output_throughput"), "tok/s"),
                ("TTFT then", _seconds(self.speed.get("mean_ttft_ms")), "s"),
            ]
        return facts

    @property
    def _planned_facts(self) -> list[tuple[str, Any, str]]:
        plan = self.engine.plan
        return [
            ("Context", plan.get("max_model_len"), "tokens"),
            ("RAM for KV", _sum(plan, "spilled_kv_bytes", "offload_bytes"), "bytes"),
            ("Weights in RAM", plan.get("weights_in_ram_bytes"), "bytes"),
        ]

    @property
    def _set_facts(self) -> list[tuple[str, Any, str]]:
        """What is not set is up to the plan, so that there is nothing to show of it."""
        if self.model is None:
            return []
        settings = self.model.settings
        facts = [
            ("Context", settings.max_model_len, "tokens"),
            ("RAM, at most", settings.ram, "bytes"),
            ("RAM for idle KV", settings.offload_ram, "bytes"),
            ("Weights in RAM", settings.weights_ram, "bytes"),
        ]
        return [fact for fact in facts if fact[1] is not None]

    @property
    def _what_may_stop(self) -> str:
        if not self.others:
            return ""
        return f"Switch to {self.name}? What is in its way is stopped. Running now: {', '.join(self.others)}."


def last_speeds(registry: Registry, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of each model's newest result. Blocks."""
    found = {}
    for name in names:
        for result in list_results(registry, model=name, limit=1):
            numbers = {key: result.metrics.get(key) for key in _SPEEDS}
            found[name] = {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}
    return found


def form_values(model: Model | None) -> dict[str, str]:
    """Settings as a form has them: sizes as people write them, empty for what is not set."""
    values = model.settings.as_json() if model is not None else {}
    shown = {}
    for setting in MODEL_SETTINGS:
        value = values.get(setting.name)
        if setting.name == "vllm_args":
            shown[setting.name] = " ".join(_quoted(word) for word in value or ())
        elif value is None:
            shown[setting.name] = ""
        elif setting.is_size:
            shown[setting.name] = exact_size(int(value))
        else:
            shown[setting.name] = str(value).lower() if isinstance(value, bool) else str(value)
    return shown


def changes_of(form: Mapping[str, str]) -> dict[str, object]:
    """Of a form that was sent: what is empty is taken back."""
    known = {setting.name for setting in MODEL_SETTINGS}
    return {name: value.strip() or None for name, value in form.items() if name in known}


def _quoted(word: str) -> str:
    return shlex.quote(word)


def _sum(plan: Mapping[str, Any], *names: str) -> int:
    return sum(int(plan.get(name) or 0) for name in names)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
