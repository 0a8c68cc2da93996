"""Prompts as token ids, drawn by seed: no tokenizer is needed, and the same seed asks the same of every server."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.bench.script import Piece
from overspill.model.source import cache_folder, find_snapshot

# Every tokenizer of a language model has these.
_SAFE = (100, 1000)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids from `low`, and below `high`."""

    low: int
    high: int

    def draw(self, piece: Piece, seed: int) -> str:
        """As JSON writes them, without the brackets: a conversation grows by joining texts."""
        ids = random.Random(f"{seed}/{piece.name}").choices(range(self.low, self.high), k=piece.tokens)
        return ids_as_text(ids)


def ids_as_text(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def find_vocabulary(root: str | None) -> Vocabulary:
    """Of the model that a server names as its root, if its config is on this machine."""
    size = None if not root else _vocab_size(root)
    if size is None:
        return Vocabulary(*_SAFE)
    # Special tokens, such as an image's place, are at either end.
    margin = min(1000, size // 8)
    return Vocabulary(margin, size - margin)


def _vocab_size(root: str) -> int | None:
    folder = Path(root)
    if not (folder / "config.json").is_file():
        found = find_snapshot(cache_folder(), root, "main")
        if found is None:
            return None
        folder = found
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size >= 64 else None
