"""Cards that would serve a context, and how fast."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from overspill.hardware.cards import CARDS, Card
from overspill.hardware.stated import parse_gpu
from overspill.planning.attempts import Attempt, attempts, attempts_without_ram, fits
from overspill.planning.setup import CUDA, Setup, nothing_measured
from overspill.planning.ways import Way

BestWay = Callable[[Setup, Sequence[Attempt], int], Way | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFit:
    card: Card
    alone: bool
    """Everything fits on the GPU."""
    with_ram: bool
    """It fits with the RAM there is."""
    way: Way | None = None
    """What a plan would recommend there, where speeds are asked for."""


def card_fits(setup: Setup, best_at: BestWay | None = None) -> tuple[CardFit, ...]:
    """All cards of the table, from the one with the least memory; `best_at` finds their ways, which takes a second."""
    return tuple(_card_fit(setup, card, best_at) for card in sorted(CARDS, key=lambda card: card.total_bytes))


def smallest_card(found: tuple[CardFit, ...], *, alone: bool) -> Card | None:
    return next((one.card for one in found if (one.alone if alone else one.with_ram)), None)


def _card_fit(setup: Setup, card: Card, best_at: BestWay | None) -> CardFit:
    # A budget is for the card at hand; what was measured there, too.
    wishes = replace(setup.wishes, gpu_memory_bytes=None)
    other = replace(setup, gpu=parse_gpu(card.key), wishes=wishes, platform=CUDA, profiles=nothing_measured)
    budget, length = other.budget(), other.max_model_len
    whole = [attempt for attempt in attempts_without_ram(other, budget) if attempt.is_exact]
    divided = [attempt for attempt in attempts(other, budget) if attempt.is_exact]
    return CardFit(
        card=card,
        alone=any(fits(other, whole, length)),
        with_ram=any(fit.ram_bytes <= other.ram_bytes.value for fit in fits(other, divided, length)),
        way=None if best_at is None else best_at(other, divided, length),
    )
