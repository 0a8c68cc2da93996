"""Flags as vLLM's parser reads them: dashes or underscores, a value after a space or `=`, dotted keys, short names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overspill.kv.errors import OverspillError
from overspill.serve.secret_flags import without_secrets

# vLLM's short names (engine/arg_utils.py) of flags that matter to a plan.
_SHORT = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-asc": "--api-server-count",
}
_NUMBER = re.compile(r"-\d")


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    """In full, with dashes: `--max-model-len`."""
    value: str
    """Empty for a flag that takes none."""
    words: tuple[str, ...]
    """As it was written."""

    def __str__(self) -> str:
        """Short, and without secrets: it is for messages."""
        first, *rest = without_secrets(self.words)
        name, equals, value = first.partition("=")
        value = value if equals else " ".join(rest)
        return f"{name} {value if len(value) <= 40 else f'{value[:37]}...'}".strip()


def read_flags(words: Sequence[str]) -> list[Flag]:
    """A word that starts with a dash begins a flag, unless it is a negative number; the rest are values."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") and not _NUMBER.match(word) and word != "-":
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            raise OverspillError(
                f"{word!r} is neither a flag nor a flag's value: one model is served, and vLLM's flags follow it"
            )
    return [_flag(group) for group in groups]


def find(flags: Iterable[Flag], *names: str) -> Flag | None:
    """The last with one of these names: it is the one that vLLM takes."""
    return next((flag for flag in reversed(list(flags)) if flag.name in names), None)


def matches(given: str, name: str) -> bool:
    """Whether a flag that was given sets `name`: itself, its opposite, or the start of it, which vLLM's parser
    completes (none of vLLM's flags is the start of one that a plan sets)."""
    given = "--" + given.removeprefix("--no-") if given.startswith("--no-") else given
    return given == name or (len(given) > len("--x") and name.startswith(given))


def _flag(words: list[str]) -> Flag:
    written, equals, value = words[0].partition("=")
    name = _SHORT.get(written, written)
    if name.startswith("--"):
        # vLLM replaces underscores before the first dot only: what follows are keys of a JSON value.
        name = name.partition(".")[0].replace("_", "-")
    return Flag(name, value if equals else " ".join(words[1:]), tuple(words))
