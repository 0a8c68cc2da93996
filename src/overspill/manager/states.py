"""Engine states: the next step as a pure function of what is wanted and what is seen, and snapshots.

No state is stored. A user or a request sets what is wanted, /proc and the engine's own answers show what exists, and
a manager that was killed and restarted arrives at the same state by looking.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from overspill.manager.needs import NOTHING, Memory

EngineAction = Literal["start", "switch", "stop", "restart", "park", "wake"]
KV_FIELDS = ("granted", "held", "used", "wanted", "floor", "most")
"""Fields of an elastic engine's ledger row that are shown."""


class State(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    """The engine is being stopped or parked."""
    PARKED = "parked"
    """The process lives, and its GPU memory is free for others."""
    FAILED = "failed"
    """The engine ended by itself, or could not be started; the reason is kept until the next start."""


class Wanted(StrEnum):
    UP = "up"
    PARKED = "parked"
    DOWN = "down"


class Seen(StrEnum):
    ABSENT = "absent"
    """No process of the engine lives."""
    LOADING = "loading"
    """The process lives but has not answered yet."""
    SERVING = "serving"
    """The engine answers."""
    PARKED = "parked"
    """The engine answers but computes nothing."""
    SILENT = "silent"
    """The engine has not answered for too long, after its last answer or since its launch."""
    ENDING = "ending"
    """SIGTERM was sent, or the server is gone but some of its processes are left."""


class Step(StrEnum):
    WAIT = "wait"
    LAUNCH = "launch"
    PARK = "park"
    WAKE = "wake"
    END = "end"
    GIVE_UP = "give up"
    """The engine died: keep the reason, and do not start it again."""


@dataclass(frozen=True, slots=True)
class Decision:
    state: State
    step: Step


def decide(wanted: Wanted, seen: Seen, *, launched: bool, failed: bool) -> Decision:
    """State and step; `launched`: this wish started or adopted a process, `failed`: the last one ended by itself."""
    match wanted, seen:
        case Wanted.UP | Wanted.PARKED, Seen.ABSENT if launched:
            # A dead engine takes no requests while the reason for its end is read, which may take long.
            return Decision(State.STOPPING, Step.GIVE_UP)
        case Wanted.UP, Seen.ABSENT:
            return Decision(State.STARTING, Step.LAUNCH)
        case _, Seen.ABSENT:
            return Decision(State.FAILED if failed else State.STOPPED, Step.WAIT)
        case _, Seen.ENDING:
            return Decision(State.STOPPING, Step.WAIT)
        case Wanted.UP | Wanted.PARKED, Seen.LOADING:
            return Decision(State.STARTING, Step.WAIT)
        case Wanted.UP, Seen.SERVING:
            return Decision(State.READY, Step.WAIT)
        case Wanted.UP, Seen.PARKED:
            return Decision(State.STARTING, Step.WAKE)
        case Wanted.PARKED, Seen.SERVING:
            return Decision(State.STOPPING, Step.PARK)
        case Wanted.PARKED, Seen.PARKED:
            return Decision(State.PARKED, Step.WAIT)
        case _:
            # Not wanted, or silent: an engine that holds memory and answers nobody must end before another can start.
            return Decision(State.STOPPING, Step.END)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All intervals and timeouts of the manager in one object, so that tests can be impatient."""

    look_starting_s: float = 0.25
    look_ready_s: float = 2.0
    look_models_s: float = 1.0
    """Interval between looks at the registry and the machine's engines for outside changes."""
    health_s: float = 5.0
    """Timeout of a health check; a busy engine answers late."""
    silent_s: float = 120.0
    """Time without an answer after which an engine counts as hung and is ended."""
    start_s: float = 3600.0
    """Timeout of a start; a large model on a slow disk takes half of it."""
    park_s: float = 180.0
    """Timeout of a park, which stores the GPU's cache, or a wake, which copies weights; both take seconds at most."""
    stop_patience_s: float = 60.0
    """Time from SIGTERM to SIGKILL; `overspill serve` takes up to 35 s to end vLLM itself."""
    back_off_s: float = 10.0
    """Backoff after a failed start, doubled with each further one; an engine that served longer restarts at once."""
    most_back_off_s: float = 300.0
    least_service_s: float = 10.0
    """Time after becoming ready during which a busy model is not evicted."""
    drain_s: float = 120.0
    """Time for requests in flight to finish before their model is stopped."""
    settle_s: float = 2.0
    """Time for a driver to free memory after the process is gone."""
    load_s: float = 900.0
    """Longest time that a request waits for its model."""
    first_sign_s: float = 1.0
    """Wait before a stream whose model is not ready gets its headers; from then on a refusal is a stream event."""
    sign_s: float = 5.0
    """Interval of comments in a quiet stream, so that no proxy gives it up."""
    stalled_client_s: float = 120.0
    """Time without reading anything after which a client counts as gone."""

    def back_off(self, num_failures: int) -> float:
        return min(self.most_back_off_s, self.back_off_s * 2.0 ** (num_failures - 1)) if num_failures else 0.0


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Requests through the gateway since the manager was started."""

    requests: int = 0
    failed: int = 0
    """Requests failed by the gateway or the engine: answers of 500 and above, and broken streams."""
    cancelled: int = 0
    in_flight: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Answer tokens; like prompt tokens, as far as answers report them."""
    last_used: float | None = None
    """Time of the last request, in seconds since 1970."""


OF_ENGINE = (
    "name", "state", "since", "is_managed", "is_draining", "is_leaving", "start_s", "url", "holds", "can_park",
    "log_hint", "stop_reason",
)  # fmt: skip
"""Snapshot fields copied unchanged from the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    name: str
    state: State
    since: float
    """When the engine entered this state, in seconds since 1970."""
    is_registered: bool
    is_managed: bool
    """Whether a manager started the engine, and will stop it when the manager itself ends."""
    phase: str = ""
    phases: tuple[tuple[str, float], ...] = ()
    messages: tuple[str, ...] = ()
    is_draining: bool = False
    is_leaving: bool = False
    """Whether the engine drains because it was stopped; a second stop does not wait."""
    start_s: float | None = None
    """Duration of the last successful start."""
    url: str | None = None
    served_names: tuple[str, ...] = ()
    pid: int | None = None
    unit: str | None = None
    holds: Memory = NOTHING
    can_park: bool = False
    error: str = ""
    log_lines: tuple[str, ...] = ()
    """Last lines of the log before the failure."""
    retry_at: float | None = None
    """Earliest time at which a request starts the engine again, in seconds since 1970."""
    log_file: str | None = None
    log_hint: str = ""
    """Hint on where the log is; empty if the log file is known."""
    stop_reason: str = ""
    """Why the engine is being stopped, or was stopped last."""
    needs_restart: tuple[str, ...] = ()
    """Settings changed since the engine was started."""
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: dict[str, int | None] = dataclasses.field(default_factory=dict)
    """Bytes of weights, KV and the rest, as the workers report them."""
    kv: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of an elastic engine's KV on the GPU, from the ledger."""
    traffic: Traffic = dataclasses.field(default_factory=Traffic)

    def as_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {**fields, "state": str(self.state), "phases": [{"phase": name, "at": at} for name, at in self.phases]}
