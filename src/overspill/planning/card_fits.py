"""Which cards would serve a context, by their memory."""

from dataclasses import dataclass, replace

from overspill.hardware.cards import CARDS, Card
from overspill.hardware.stated import parse_gpu
from overspill.planning.attempts import attempts, attempts_without_ram, fits
from overspill.planning.platform import CUDA
from overspill.planning.setup import Setup, nothing_measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFit:
    card: Card
    alone: bool
    """Everything fits on the GPU."""
    with_ram: bool
    """It fits with the RAM there is."""


def card_fits(setup: Setup) -> tuple[CardFit, ...]:
    """All cards of the table, from the one with the least memory."""
    return tuple(_card_fit(setup, card) for card in sorted(CARDS, key=lambda card: card.total_bytes))


def smallest_card(found: tuple[CardFit, ...], *, alone: bool) -> Card | None:
    return next((one.card for one in found if (one.alone if alone else one.with_ram)), None)


def _card_fit(setup: Setup, card: Card) -> CardFit:
    # A budget is for the card at hand; what was measured there, too.
    wishes = replace(setup.wishes, gpu_memory_bytes=None)
    other = replace(setup, gpu=parse_gpu(card.key), wishes=wishes, platform=CUDA, profiles=nothing_measured)
    budget = other.budget()
    whole = [attempt for attempt in attempts_without_ram(other, budget) if attempt.is_exact]
    divided = (attempt for attempt in attempts(other, budget) if attempt.is_exact)
    return CardFit(
        card=card,
        alone=any(fits(other, whole, other.max_model_len)),
        with_ram=any(fit.ram_bytes <= other.ram_bytes.value for fit in fits(other, divided, other.max_model_len)),
    )
