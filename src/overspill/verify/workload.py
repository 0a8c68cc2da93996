"""The prompts: random tokens in lengths that fill blocks of KV, from a seed."""

import math
import random
from dataclasses import dataclass

from overspill.verify.stage import ANSWER, CONVERSATION_UNITS, Stage

TURNS = 3
LONG_TURNS = 2
_CONVERSATIONS, _LONGS, _SHORTS = 4, 2, 2
# So few before the end of a block that an answer goes on into the next one: it must be allocated while others wait.
_BEFORE_END = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    name: str
    pieces: tuple[tuple[int, ...], ...]
    """What is said in each turn; a turn's prompt is all of them so far and the answers between them."""
    max_tokens: int = ANSWER


@dataclass(frozen=True, slots=True)
class Workload:
    conversations: tuple[Conversation, ...]
    """Fit beside each other in RAM, and not on the GPU."""
    longs: tuple[Conversation, ...]
    """Each longer than the GPU's part of the KV cache, with spill; none where the model cannot spill."""
    shorts: tuple[Conversation, ...]
    fresh: Conversation
    """That nobody has asked before, and whose answer nobody waits for."""

    @property
    def all(self) -> tuple[Conversation, ...]:
        return (*self.conversations, *self.longs, *self.shorts, self.fresh)


def make_workload(stage: Stage, seed: int, *, varied: bool = False) -> Workload:
    """With `varied`, lengths are drawn too."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(*stage.token_ids) for _ in range(count))

    def conversation(name: str, units: int, turns: int, least: float, *, whole: bool = False) -> Conversation:
        """Its last turn, with its answer, ends within so many units; a drawn length is at least such a part of that,
        and with `whole` it ends before the end of a block as the others do."""
        units -= turns
        first = stage.unit * units - _BEFORE_END
        steps = [stage.unit - ANSWER] * (turns - 1)
        if varied:
            least_units = math.ceil(least * units)
            first -= stage.unit * draw.randrange(units - least_units + 1)
            first -= 0 if whole else draw.randrange(stage.unit // 2)
            steps = [draw.randrange(1, step + 1) for step in steps]
        return Conversation(name, tuple(tokens(count) for count in (first, *steps)))

    conversations = [
        conversation(f"conversation-{i}", CONVERSATION_UNITS, TURNS, 1 / 2, whole=i % 2 == 1)
        for i in range(1, _CONVERSATIONS + 1)
    ]
    # Twice what stays on the GPU, so even the shortest spills.
    longs = [conversation(f"long-{i}", stage.units, LONG_TURNS, 3 / 4) for i in range(1, _LONGS + 1)]
    shorts = [
        Conversation(f"short-{i}", (tokens(draw.randrange(stage.unit // 4, stage.unit // 2)),))
        for i in range(1, _SHORTS + 1)
    ]
    fresh = Conversation("fresh", (tokens(2 * stage.unit + 1),))
    return Workload(tuple(conversations), tuple(longs) if stage.spill is not None else (), tuple(shorts), fresh)
