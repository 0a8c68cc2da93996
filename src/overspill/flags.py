"""vLLM's flags: how its parser reads them, and which of them hold secrets."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overspill.kv.errors import OverspillError

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


HIDDEN = "***"
# vLLM and huggingface_hub read these as well. A process's environment is its user's to read, its command line
# everybody's.
VARIABLES = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
# vLLM's parser completes the beginnings of names, where only one begins so.
_SHORTEST = {"--api-key": "--api-k", "--hf-token": "--hf-t"}
# Of other programs too: those are shown as well. vLLM's watermark is a secret by its own list.
_SECRET_NAME = re.compile(
    r"--([\w.-]*[-.])?(password|passwd|passphrase|secret|token|api-key|access-key|secret-key)|--watermark-config.*"
)
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SECRET_IN_JSON = re.compile(
    r'("[\w.-]*(?:password|passwd|secret|api[_-]?key|access[_-]?key|(?:auth|access|hf|bearer)[_-]?token)[\w.-]*"\s*:\s*")'
    r'(?:[^"\\]|\\.)*',
    re.IGNORECASE,
)


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The words, with `***` for values of flags that hold secrets, for the user in addresses, and for values in JSON
    whose names say that they are secret."""
    words, hides = [], False
    for word in argv:
        if hides and not word.startswith("--"):
            words.append(HIDDEN)  # vLLM's --api-key takes several
            continue
        name, equals, _ = word.partition("=")
        is_secret = _is_secret(name)
        hides = is_secret and not equals
        words.append(f"{name}={HIDDEN}" if is_secret and equals else hide_in_value(word))
    return words


def hide_in_value(text: str) -> str:
    """A single value, as of a variable, without its secrets."""
    return _SECRET_IN_JSON.sub(rf"\1{HIDDEN}", _USER_OF_URL.sub(HIDDEN, text))


def hide_in_text(text: str) -> str:
    """Flags as somebody wrote them, for a message that says what is wrong with them."""
    return " ".join(without_secrets(text.split()))


def refuse_secrets(flags: Iterable[Flag], where: str) -> None:
    """`where` is a place that others may read."""
    for flag in flags:
        if list(flag.words) != without_secrets(flag.words):
            variable = VARIABLES.get(_full_name(flag.name))
            instead = f"set {variable} in the environment" if variable else "leave out the secret, or the flag"
            instead += ", which holds one key" if variable and len(flag.words) > 2 else ""
            raise OverspillError(f"{flag.name} would put a secret into {where}; {instead}")


def into_environment(flags: Sequence[Flag]) -> tuple[tuple[Flag, ...], dict[str, str]]:
    """The flags without those whose secret a variable can hold, and these variables.

    A variable holds one key. Several stay a flag, and so does none: an empty one takes the variable's key away.
    """
    moved = {}
    for name, variable in VARIABLES.items():
        given = [flag for flag in flags if _full_name(flag.name) == name]
        if given and (value := given[-1].value) and (given[-1].words[0].count("=") or len(given[-1].words) == 2):
            moved[name] = variable, value
    kept = tuple(flag for flag in flags if _full_name(flag.name) not in moved)
    return kept, dict(moved.values())


def _is_secret(name: str) -> bool:
    name = name.replace("_", "-")
    return _SECRET_NAME.fullmatch(name) is not None or _full_name(name) in VARIABLES


def _full_name(name: str) -> str:
    found = (full for full, short in _SHORTEST.items() if full.startswith(name) and name.startswith(short))
    return next(found, name)
