"""The prompts of all turns, which follow from the workload and the reference's answers."""

from collections.abc import Callable
from dataclasses import dataclass

from overspill.verify.answers import Answer, Ask
from overspill.verify.workload import Conversation, Workload


@dataclass(frozen=True, slots=True)
class Script:
    """Turn by turn. A turn goes on from the reference's answers, whatever an engine answered itself: where rounding
    decides between two tokens, only one answer is another, and not all that follow."""

    conversations: tuple[tuple[Ask, ...], ...]
    longs: tuple[tuple[Ask, ...], ...]
    shorts: tuple[Ask, ...]
    fresh: Ask
    seed: int


def turns_of(conversation: Conversation, answer: Callable[[Ask], Answer]) -> tuple[Ask, ...]:
    """All turns of a conversation, each asked as soon as the one before is answered."""
    history: tuple[int, ...] = ()
    asks = []
    for turn, piece in enumerate(conversation.pieces):
        ask = Ask(conversation.name, turn, (*history, *piece), conversation.max_tokens)
        asks.append(ask)
        history = (*ask.prompt, *answer(ask).tokens)
    return tuple(asks)


def make_script(workload: Workload, answer: Callable[[Ask], Answer], seed: int) -> Script:
    return Script(
        conversations=tuple(turns_of(conversation, answer) for conversation in workload.conversations),
        longs=tuple(turns_of(conversation, answer) for conversation in workload.longs),
        shorts=tuple(turns_of(conversation, answer)[0] for conversation in workload.shorts),
        fresh=turns_of(workload.fresh, answer)[0],
        seed=seed,
    )
