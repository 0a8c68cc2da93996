"""Conversations read from a file in ShareGPT's format."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from overspill.measure import MeasureError

_SHAPE = 'a list of {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}'
_ASKS, _ANSWERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")

Turn = tuple[str, str]
"""A question and its answer."""


@dataclass(frozen=True, slots=True)
class Conversations:
    turns: tuple[tuple[Turn, ...], ...]
    """Turns of each conversation that begins with a question and its answer."""
    digest: str
    """First 16 hex digits of the file's SHA-256."""


@cache
def read_conversations(path: str) -> Conversations:
    """Read JSON, or one JSON object per line; messages may also use OpenAI's names, `role` and `content`."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise MeasureError(f"{path} cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig").strip()
        # Not splitlines(), which also cuts at separators that JSON allows inside a text.
        lines = (line for line in text.split("\n") if line.strip())
        found = json.loads(text) if text[:1] == "[" else [json.loads(line) for line in lines]
    except ValueError as error:
        raise MeasureError(f"{path} is not JSON ({type(error).__name__}); it should be {_SHAPE}") from error
    turns = tuple(filter(None, (_turns(entry) for entry in found)))
    if not turns:
        raise MeasureError(f"{path} has no conversation with a question and an answer; it should be {_SHAPE}")
    return Conversations(turns, hashlib.sha256(content).hexdigest()[:16])


def _turns(entry: Any) -> tuple[Turn, ...]:
    """Turns of a conversation, as long as questions and answers alternate."""
    messages = (entry.get("conversations") or entry.get("messages") or ()) if isinstance(entry, dict) else ()
    said = [
        (one.get("from") or one.get("role"), _text_of(one.get("value") or one.get("content")))
        for one in messages
        if isinstance(one, dict) and "system" not in (one.get("from"), one.get("role"))
    ]
    found: list[Turn] = []
    for (asks, question), (answers, answer) in zip(said[::2], said[1::2]):
        if asks not in _ASKS or answers not in _ANSWERS or question is None or answer is None:
            break
        found.append((question, answer))
    return tuple(found)


def _text_of(content: Any) -> str | None:
    """The text of a message, which may be in parts; None if it has anything but text."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if len(found) == len(parts) else None
