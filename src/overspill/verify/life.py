"""One engine's life, in a process of its own. What it has to say goes through a pipe."""

import os
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from overspill.verify.answers import Answer, Ask
from overspill.verify.engine_life import EngineLife
from overspill.verify.script import Script, make_script
from overspill.verify.workload import Workload


@dataclass(frozen=True, slots=True)
class Reference:
    """Answers without Overspill."""

    script: Script
    answers: Mapping[str, Answer]
    again: tuple[Answer, ...]
    """Of the last turns, all at once and from nothing: computed in other pieces."""


@dataclass(frozen=True, slots=True)
class Played:
    """What a scenario came to."""

    answers: tuple[Answer, ...]
    awaited: int
    """Answers that there should be."""
    figures: Mapping[str, int]
    left_behind: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something on the way."""

    text: str


@dataclass(frozen=True, slots=True)
class Died:
    """It could not go on, and says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReferenceJob:
    life: EngineLife
    workload: Workload
    seed: int


@dataclass(frozen=True, slots=True)
class PlayJob:
    life: EngineLife
    play: str
    script: Script


Job = ReferenceJob | PlayJob


def live(job: Job, pipe: Connection, log: Path) -> None:
    """Entry point of the child."""
    os.setsid()  # what it may start is found, and ended, with it; and a Ctrl-C is the parent's to handle
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    try:
        pipe.send(_reference(job) if isinstance(job, ReferenceJob) else _play(job, pipe))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(Died(_told(error)))
    # An engine's threads must not keep the process: all is said.
    os._exit(0)


def _end_with_parent(pipe: Connection) -> None:
    """Nobody waits for an answer, and an engine holds a GPU's memory."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def _reference(job: ReferenceJob) -> Reference:
    from overspill.verify.engine import Engine

    engine = Engine(job.life)

    def answer(ask: Ask) -> Answer:
        engine.ask(ask)
        return engine.answers[-1]

    script = make_script(job.workload, answer, job.seed)
    answers = {given.name: given for given in engine.answers}
    engine.answers.clear()
    engine.evict()
    engine.ask(*(turns[-1] for turns in (*script.conversations, *script.longs)), *script.shorts)
    return Reference(script, answers, tuple(engine.answers))


def _play(job: PlayJob, pipe: Connection) -> Played:
    from overspill.verify.engine import Engine
    from overspill.verify.plays import PLAYS

    engine = Engine(job.life)
    PLAYS[job.play](engine, job.script, lambda text: pipe.send(Event(text)))
    left_behind = engine.left_behind()
    figures: dict[str, Any] = {**engine.figures(), **engine.faults}
    return Played(tuple(engine.answers), engine.awaited, figures, left_behind)


def _told(error: BaseException) -> str:
    """The last line of what went wrong: vLLM wraps its reasons."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
