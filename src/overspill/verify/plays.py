"""What happens in each scenario, on an engine of its own. Runs in a child only."""

import random
from collections.abc import Callable, Mapping

from overspill.verify.engine import Engine
from overspill.verify.faults import abort_under_way, damage, loaded_slots, watched_loads
from overspill.verify.script import Script

Say = Callable[[str], None]
# By then every request that runs has wanted a block.
_PRESSED_STEPS = 1000


Play = Callable[[Engine, Script, Say], None]


def returning(engine: Engine, script: Script, say: Say) -> None:
    """They take turns, so that each comes back after the others have taken its blocks."""
    for turn in zip(*script.conversations, strict=True):
        for ask in turn:
            engine.ask(ask)


def preempted(engine: Engine, script: Script, say: Say) -> None:
    """Requests run together until there is no block left for the next token."""
    for ask in (turns[0] for turns in script.conversations):
        engine.add(ask)
    for _ in range(2):  # prompts are under way, and the first tokens are there
        engine.step()
    before = engine.figures().get("preemptions", 0)
    with engine.pressure() as press:
        for _ in range(_PRESSED_STEPS):
            if not engine.is_busy or engine.figures().get("preemptions", 0) > before:
                break
            press()  # a window gives blocks back as it moves on
            engine.step()
    # What was preempted leaves the GPU before it is resumed.
    engine.evict()
    engine.run()
    for turns in script.conversations:
        engine.evict()
        engine.ask(turns[1])


def aborted(engine: Engine, script: Script, say: Say) -> None:
    draw = random.Random(script.seed)
    for turns in script.conversations:
        engine.ask(turns[0])
    for turns, beside in zip(script.conversations, (*script.conversations[1:], script.conversations[0]), strict=True):
        engine.evict()
        # One is aborted while it is loaded, beside one that goes on; then it is asked again.
        engine.add(beside[0])
        for _ in range(draw.randrange(1, 4)):
            engine.step()
        abort_under_way(engine, engine.add(turns[1]), steps=draw.randrange(1, 3))
        engine.run()
        abort_under_way(engine, engine.add(script.fresh), steps=1)
        engine.drain()
        engine.evict()
        engine.ask(turns[1])


def damaged(engine: Engine, script: Script, say: Say) -> None:
    """A block that was loaded once is damaged before it is loaded again."""
    for turns in script.conversations[:2]:
        engine.ask(turns[0])
        engine.forget()
        slots = loaded_slots(engine, turns[0])
        engine.forget()
        if slots:
            damage(engine, random.Random(script.seed).choice(slots))
        engine.ask(turns[0])
        # What replaced it is good.
        engine.forget()
        engine.ask(turns[0])
    engine.faults["caught"] = engine.figures().get("corrupt_blocks", 0)


def damaged_unseen(engine: Engine, script: Script, say: Say) -> None:
    """The same, with nothing that looks; the last answer is what becomes of it."""
    ask = script.conversations[0][0]
    engine.ask(ask)
    engine.forget()
    slots = loaded_slots(engine, ask)
    engine.forget()
    if slots:
        damage(engine, random.Random(script.seed).choice(slots))
    engine.ask(ask)


def failed(engine: Engine, script: Script, say: Say) -> None:
    first, second, third = (turns[0] for turns in script.conversations[:3])
    for ask in (first, second, third):
        engine.ask(ask)
    engine.forget()
    with watched_loads(engine, failures=1):
        engine.ask(first)
    engine.forget()
    with watched_loads(engine, failures=1):  # beside one that does not
        engine.ask(second, third)
    engine.faults["caught"] = engine.figures().get("load_failures", 0)
    engine.forget()
    for turns in script.conversations[:3]:
        engine.ask(turns[1])


def until_killed(engine: Engine, script: Script, say: Say) -> None:
    """Loads, stores and steps under way, until somebody ends the process."""
    for turns in script.conversations:
        engine.ask(turns[0])
    engine.evict()
    for turns in script.conversations:
        engine.add(turns[1])
    engine.step()
    say("under way")
    while True:
        engine.add(script.fresh)
        engine.run()


def spilled(engine: Engine, script: Script, say: Say) -> None:
    first, second = script.longs
    engine.ask(first[0])
    engine.ask(script.shorts[0])
    engine.ask(first[1])
    engine.ask(second[0], *script.shorts)
    engine.ask(second[1], first[0])


def spilled_and_offloaded(engine: Engine, script: Script, say: Say) -> None:
    """What spilled is stored from RAM, and is loaded into RAM."""
    first, second = script.longs
    engine.ask(first[0])
    engine.forget()
    engine.ask(first[0])
    engine.ask(first[1])
    engine.ask(second[0], *script.shorts)
    engine.forget()
    engine.ask(second[1], script.shorts[0])
    engine.ask(first[1])


def arrivals(engine: Engine, script: Script, say: Say) -> None:
    """Requests come when they come, some are aborted wherever they are, and blocks go in between."""
    draw = random.Random(script.seed)
    groups = (*script.conversations, *script.longs, tuple(script.shorts))
    waiting = [draw.choice(group) for _ in range(4) for group in groups]
    draw.shuffle(waiting)
    live: dict[str, int | None] = {}
    while waiting or live:
        while waiting and len(live) < 4 and draw.random() < 0.6:
            live[engine.add(waiting.pop())] = draw.randrange(1, 12) if draw.random() < 0.2 else None
        if draw.random() < 0.1:
            engine.evict()
        for request in engine.step() if live else ():
            del live[request]
        for request, left in list(live.items()):
            if left == 1:
                engine.abort(request)
                engine.count("injected")
                del live[request]
            elif left is not None:
                live[request] = left - 1


PLAYS: Mapping[str, Play] = {
    "returning": returning,
    "preempted": preempted,
    "aborted": aborted,
    "damaged": damaged,
    "damaged-unseen": damaged_unseen,
    "failed-load": failed,
    "until-killed": until_killed,
    "restarted": returning,
    "spilled": spilled,
    "spilled-and-offloaded": spilled_and_offloaded,
    "arrivals": arrivals,
}
