"""An engine's states, the next step as a pure function of what is wanted and what is seen, and its snapshot.

No state is stored. A user or a request sets what is wanted; /proc and the engine's own answers show what is there; and
a manager that was killed and started again arrives at the same state by looking.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from overspill.manager.needs import NOTHING, Memory

EngineAction = Literal["start", "switch", "stop", "restart", "park", "wake"]
KV_FIELDS = ("granted", "held", "used", "wanted", "floor", "most")
"""What is shown of an elastic engine's row of the ledger."""


class State(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    """Also while it is being parked."""
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
    """The process lives, and has not answered yet."""
    SERVING = "serving"
    """The engine answers."""
    PARKED = "parked"
    """The engine answers, and computes nothing."""
    SILENT = "silent"
    """No answer for too long, after there were some."""
    ENDING = "ending"
    """SIGTERM was sent, or the server is gone and some of its processes are left."""


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
    """`launched`: a process was started or adopted for this wish; `failed`: the last one ended by itself."""
    match wanted, seen:
        case Wanted.UP, Seen.ABSENT:
            return Decision(State.FAILED, Step.GIVE_UP) if launched else Decision(State.STARTING, Step.LAUNCH)
        case Wanted.PARKED, Seen.ABSENT if launched:
            return Decision(State.FAILED, Step.GIVE_UP)
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
    """How long the manager waits for what; one object, so that tests can be impatient."""

    look_starting_s: float = 0.25
    look_ready_s: float = 2.0
    look_models_s: float = 1.0
    """How often the registry and the machine's engines are looked through for what others changed."""
    health_s: float = 5.0
    """An engine that is busy answers late."""
    silent_s: float = 120.0
    """After so long without an answer an engine counts as hung, and is ended."""
    start_s: float = 3600.0
    """So long a start may take; a large model on a slow disk takes half of it."""
    park_s: float = 180.0
    """A park stores what the GPU has cached, and a wake copies the weights; both take seconds at most."""
    stop_patience_s: float = 60.0
    """`overspill serve` takes up to 35 s to end vLLM itself; what lives longer is killed."""
    back_off_s: float = 10.0
    """After a failed start, doubled with each further one; an engine that served longer is started again at once."""
    most_back_off_s: float = 300.0
    least_service_s: float = 10.0
    """For which a busy model is not evicted after it became ready."""
    drain_s: float = 120.0
    """Requests in flight are given so long to end before their model is stopped for another one."""
    settle_s: float = 2.0
    """A driver frees memory a moment after the process is gone."""
    load_s: float = 900.0
    """The longest that a request waits for its model."""
    first_sign_s: float = 1.0
    """A stream whose model is not ready by then gets its headers: later, a refusal is an event of the stream."""
    sign_s: float = 5.0
    """How often a stream without anything to tell gets a comment, so that no proxy gives it up."""
    stalled_client_s: float = 120.0
    """A client that takes nothing for so long has left."""

    def back_off(self, num_failures: int) -> float:
        return min(self.most_back_off_s, self.back_off_s * 2.0 ** (num_failures - 1)) if num_failures else 0.0


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Requests through the gateway since the manager was started."""

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


OF_ENGINE = (
    "name", "state", "since", "is_managed", "is_draining", "is_leaving", "start_s", "url", "holds", "can_park",
    "log_hint", "stop_reason",
)  # fmt: skip
"""What a snapshot has as its engine has it."""


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
    is_leaving: bool = False
    """It drains because it was stopped: a second stop does not wait."""
    start_s: float | None = None
    """How long its last start took."""
    url: str | None = None
    served_names: tuple[str, ...] = ()
    pid: int | None = None
    unit: str | None = None
    holds: Memory = NOTHING
    can_park: bool = False
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
    kv: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of an elastic engine's KV on the GPU, as the ledger has them."""
    traffic: Traffic = dataclasses.field(default_factory=Traffic)

    def as_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {**fields, "state": str(self.state), "phases": [{"phase": name, "at": at} for name, at in self.phases]}
