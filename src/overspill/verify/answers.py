"""What is asked of an engine, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn of a conversation, with all that was said before it."""

    conversation: str
    turn: int
    prompt: tuple[int, ...]
    max_tokens: int

    @property
    def name(self) -> str:
        return f"{self.conversation}/{self.turn}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    name: str
    """Of the ask."""
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """At each position, of the likeliest tokens."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    spilled_bytes: int = 0
    alone: bool = True
    """Whether nothing else ran meanwhile, so that it was computed in the same pieces wherever it was asked."""
