"""An engine as pages and the API see it at one moment."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from overspill.manager.engines.memory import NOTHING, Memory
from overspill.manager.engines.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What went through the gateway since the manager was started."""

    requests: int = 0
    failed: int = 0
    """By the gateway or the engine: answers of 500 and above, and streams that broke."""
    cancelled: int = 0
    in_flight: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """As far as answers say."""
    last_used: float | None = None
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    name: str
    state: State
    since: float
    """When it got into this state, in seconds since 1970."""
    is_registered: bool
    is_managed: bool
    """Whether a manager started it, and will stop it when it ends itself."""
    phase: str = ""
    phases: tuple[tuple[str, float], ...] = ()
    messages: tuple[str, ...] = ()
    is_draining: bool = False
    url: str | None = None
    served_names: tuple[str, ...] = ()
    pid: int | None = None
    unit: str | None = None
    holds: Memory = NOTHING
    error: str = ""
    log_lines: tuple[str, ...] = ()
    """The last ones before it failed."""
    retry_at: float | None = None
    """Before which a request does not start it again; seconds since 1970."""
    log_file: str | None = None
    log_hint: str = ""
    """Where its log is, if not in a file that is known."""
    stop_reason: str = ""
    """Why it is being stopped, or was the last time."""
    needs_restart: tuple[str, ...] = ()
    """Settings that were changed since it was started."""
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: dict[str, int | None] = dataclasses.field(default_factory=dict)
    """Bytes of weights, KV and the rest, as its workers report them."""
    traffic: Traffic = Traffic()

    def as_json(self) -> dict[str, Any]:
        told = dataclasses.asdict(self)
        return {**told, "state": str(self.state), "phases": [{"phase": name, "at": at} for name, at in self.phases]}
