"""Names of models: what is accepted, and which known one is nearest to a misspelt one."""

import difflib
import re
from collections.abc import Iterable

from overspill.registry.errors import RegistryError

MAX_NAME_LENGTH = 200
# Parts begin with a letter, a digit or an underscore: no `..`, no hidden file, nothing that looks like a flag.
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")


def is_name(name: str) -> bool:
    return len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


def parse_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise RegistryError(f"a model needs a name, got {name!r:.80}; write for example qwen or Qwen/Qwen3-8B")
    if len(name) > MAX_NAME_LENGTH:
        raise RegistryError(
            f"the name {name[:40]!r}… has {len(name)} characters; a model's name has at most {MAX_NAME_LENGTH}"
        )
    if not is_name(name):
        raise RegistryError(
            f"{name!r} is not a name for a model: letters, digits and . _ - are accepted, with / between parts that "
            "begin with a letter or a digit; write for example qwen or Qwen/Qwen3-8B"
        )
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or what is there; nothing for an empty list."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"did you mean {found[0]}?" if found else ""
