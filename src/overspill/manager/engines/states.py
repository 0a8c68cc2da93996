"""An engine's five states, and what to do next: a pure function of what is wanted and what is seen.

Nothing here remembers a state. What is wanted comes from a user or a request, what is seen from /proc and from the
engine's own answers, and a manager that was killed and started again arrives at the same state by looking.
"""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"
    """It ended by itself, or could not be started; the reason is kept until the next start."""


class Wanted(StrEnum):
    UP = "up"
    DOWN = "down"


class Seen(StrEnum):
    ABSENT = "absent"
    """No process of it lives."""
    LOADING = "loading"
    """It lives, and has not answered yet."""
    SERVING = "serving"
    """It answers."""
    SILENT = "silent"
    """It answered once, and has not for too long."""
    ENDING = "ending"
    """It was asked to end, or its server is gone and some of its processes are left."""


class Step(StrEnum):
    WAIT = "wait"
    LAUNCH = "launch"
    END = "end"
    GIVE_UP = "give up"
    """It died: keep why, and want it no more."""


@dataclass(frozen=True, slots=True)
class Decision:
    state: State
    step: Step


def decide(wanted: Wanted, seen: Seen, *, launched: bool, failed: bool) -> Decision:
    """`launched`: a process was started or adopted for this wish; `failed`: the last one ended by itself."""
    match wanted, seen:
        case Wanted.UP, Seen.ABSENT:
            return Decision(State.FAILED, Step.GIVE_UP) if launched else Decision(State.STARTING, Step.LAUNCH)
        case Wanted.DOWN, Seen.ABSENT:
            return Decision(State.FAILED if failed else State.STOPPED, Step.WAIT)
        case _, Seen.ENDING:
            return Decision(State.STOPPING, Step.WAIT)
        case Wanted.UP, Seen.LOADING:
            return Decision(State.STARTING, Step.WAIT)
        case Wanted.UP, Seen.SERVING:
            return Decision(State.READY, Step.WAIT)
        case _:
            # Not wanted, or silent: what holds memory and answers nobody has to go before another can start.
            return Decision(State.STOPPING, Step.END)
