"""Prompts of random tokens, drawn from a seed in lengths that fill blocks of KV, and the answers to them."""

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from overspill.verify.stage import ANSWER, CONVERSATION_UNITS, Stage

TURNS = 3
LONG_TURNS = 2
_CONVERSATIONS, _LONGS, _SHORTS = 4, 2, 2
# So few tokens before the end of a block that the answer needs the next block, allocated while other requests wait.
_BEFORE_END = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn of a conversation, with everything said before it."""

    conversation: str
    turn: int
    prompt: tuple[int, ...]
    max_tokens: int

    @property
    def name(self) -> str:
        return f"{self.conversation}/{self.turn}"


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """The tokens generated for a prompt, as its user sees them arrive."""

    name: str
    """Name of the ask."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    """Log-probabilities of the likeliest tokens at each position."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    spilled_bytes: int = 0
    """Bytes of spilled KV, known once the request has ended."""
    alone: bool = True
    """Whether no other request ran meanwhile, so that any engine computes the prompt in the same pieces."""
    request: str = ""
    """The request's ID within vLLM."""
    began: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    is_done: bool = False

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]

    @property
    def tpot(self) -> float | None:
        """Time per output token as `vllm bench serve` defines it; also for a request that was stopped early."""
        steps = len(self.arrivals) - 1
        return (self.arrivals[-1] - self.arrivals[0]) / steps if steps > 0 else None


@dataclass(frozen=True, slots=True)
class Conversation:
    name: str
    pieces: tuple[tuple[int, ...], ...]
    """New tokens of each turn; a turn's prompt is all pieces so far and the answers between them."""


@dataclass(frozen=True, slots=True)
class Workload:
    conversations: tuple[Conversation, ...]
    """Conversations that fit together in RAM, but not on the GPU."""
    longs: tuple[Conversation, ...]
    """Conversations longer than the GPU's part of the KV cache with spill; none where the model cannot spill."""
    shorts: tuple[Conversation, ...]
    fresh: Conversation
    """A prompt never sent before, whose answer nobody waits for."""
    prompts: tuple[Conversation, ...] = ()
    """Single turns as long as the longs, for the CPU to attend to; every second one begins like the one before."""


@dataclass(frozen=True, slots=True)
class Script:
    """Prompts of all turns. A turn continues from the reference's answers, not from those of the tested engine: where
    rounding decides between two tokens, only that one answer differs, and not all that follow."""

    conversations: tuple[tuple[Ask, ...], ...]
    longs: tuple[tuple[Ask, ...], ...]
    shorts: tuple[Ask, ...]
    fresh: Ask
    seed: int
    prompts: tuple[Ask, ...] = ()


@dataclass(frozen=True, slots=True)
class Reference:
    """The script, and vLLM's answers without Overspill."""

    script: Script
    answers: Mapping[str, Answer]
    again: tuple[Answer, ...]
    """Answers to the last turns, sent all at once with nothing cached, and so computed in other pieces."""


@dataclass(frozen=True, slots=True)
class Played:
    """Result of one scenario."""

    answers: tuple[Answer, ...]
    awaited: int
    """Number of answers expected."""
    figures: Mapping[str, int]
    left_behind: str


def make_workload(stage: Stage, seed: int, *, varied: bool = False, prompts: int = 0) -> Workload:
    """Draw a workload; `varied` draws lengths too, and `prompts` are for scenarios that share attention."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(*stage.token_ids) for _ in range(count))

    def conversation(name: str, units: int, turns: int, least: float, *, whole: bool = False) -> Conversation:
        """A conversation whose last turn, answer included, ends within `units`. A drawn length is at least the share
        `least` of that, and with `whole` it ends before the end of a block, as fixed lengths do."""
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
    # `stage.units` hold twice what stays on the GPU, so even the shortest one spills.
    longs = [conversation(f"long-{i}", stage.units, LONG_TURNS, 3 / 4) for i in range(1, _LONGS + 1)]
    shorts = [
        Conversation(f"short-{i}", (tokens(draw.randrange(stage.unit // 4, stage.unit // 2)),))
        for i in range(1, _SHORTS + 1)
    ]
    fresh = Conversation("fresh", (tokens(2 * stage.unit + 1),))
    if stage.spill is None:
        return Workload(tuple(conversations), (), tuple(shorts), fresh)
    singles = [conversation(f"prompt-{i}", stage.units, 1, 3 / 4) for i in range(1, prompts + 1)]
    for i in range(1, prompts, 2):
        (before,), (own,) = singles[i - 1].pieces, singles[i].pieces
        half = min(len(before), len(own)) // 2
        singles[i] = Conversation(singles[i].name, ((*before[:half], *own[half:]),))
    return Workload(tuple(conversations), tuple(longs), tuple(shorts), fresh, tuple(singles))


def make_script(workload: Workload, answer: Callable[[Ask], Answer], seed: int) -> Script:
    """Build the script, getting each turn's answer before the next turn's prompt."""

    def turns(conversation: Conversation) -> tuple[Ask, ...]:
        history: tuple[int, ...] = ()
        asks = []
        for turn, piece in enumerate(conversation.pieces):
            ask = Ask(conversation.name, turn, (*history, *piece), ANSWER)
            asks.append(ask)
            history = (*ask.prompt, *answer(ask).tokens)
        return tuple(asks)

    return Script(
        conversations=tuple(map(turns, workload.conversations)),
        longs=tuple(map(turns, workload.longs)),
        shorts=tuple(turns(conversation)[0] for conversation in workload.shorts),
        fresh=turns(workload.fresh)[0],
        prompts=tuple(turns(conversation)[0] for conversation in workload.prompts),
        seed=seed,
    )
