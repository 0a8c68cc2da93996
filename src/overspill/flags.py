"""vLLM's flags: the known ones, how vLLM's parser reads them, and which of them hold secrets."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
    """Full name with dashes: `--max-model-len`."""
    value: str
    """The flag's value; empty for a flag without one."""
    words: tuple[str, ...]
    """The words as they were written."""

    def __str__(self) -> str:
        """Short form for messages, without secrets."""
        first, *rest = without_secrets(self.words)
        name, equals, value = first.partition("=")
        value = value if equals else " ".join(rest)
        return f"{name} {value if len(value) <= 40 else f'{value[:37]}...'}".strip()


def read_flags(words: Sequence[str]) -> list[Flag]:
    """Group words into flags: a leading dash begins a flag, except in a negative number; the rest are values."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") and not _NUMBER.match(word) and word != "-":
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            raise OverspillError(
                f"{word!r} is neither a flag nor a flag's value; give one model, and vLLM's flags after it"
            )
    return [_flag(group) for group in groups]


def find(flags: Iterable[Flag], *names: str) -> Flag | None:
    """The last flag with one of these names, which is the one vLLM uses."""
    return next((flag for flag in reversed(list(flags)) if flag.name in names), None)


def matches(given: str, name: str) -> bool:
    """Whether a given flag sets `name`: the flag itself, its opposite, or an abbreviation, which vLLM's parser
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


# Gone from vLLM 0.32; the nearest flag that it has would mislead.
_GONE = {
    "--swap-space": "use --ram to limit RAM, and --offload-ram for the part of it that keeps idle KV",
    "--preemption-mode": "with --offload-ram, a preempted request is loaded from RAM",
    "--disable-log-requests": "its replacement is --no-enable-log-requests, which is the default",
}
# Names that other servers have for vLLM's flags: llama.cpp, SGLang, TGI and Ollama.
_ELSEWHERE = {
    **dict.fromkeys(
        ("--ctx-size", "--context-length", "--max-total-tokens", "--num-ctx", "--context", "--max-context"),
        "--max-model-len",
    ),
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--max-concurrent-requests": "--max-num-seqs",
    "--tp-size": "--tensor-parallel-size",
    "--num-shard": "--tensor-parallel-size",
}


@dataclass(frozen=True, slots=True)
class _Known:
    """Values that vLLM accepts for one of its flags, as vllm_flags.txt describes them."""

    kind: str
    is_many: bool

    @property
    def choices(self) -> list[str]:
        return self.kind.removeprefix("~").split("|") if "|" in self.kind else []

    def problem(self, values: Sequence[str]) -> str | None:
        if self.kind in ("on", "on-off"):
            return "takes no value" if values else None
        if not self.is_many and len(values) != 1:
            return f"takes one value, and {len(values)} are given"
        return next((why for value in values if (why := self._problem_of(value))), None)

    def _problem_of(self, value: str) -> str | None:
        if self.kind in ("int", "float"):
            try:
                (int if self.kind == "int" else float)(value)
            except ValueError:
                return f"{value!r:.40} is not {'a whole number' if self.kind == 'int' else 'a number'}"
        elif choices := self.choices:
            meant = value.lower().replace("-", "_") if self.kind.startswith("~") else value
            if meant not in choices:
                return none_of(value, choices)
        return None


@cache
def _known_flags() -> dict[str, _Known]:
    """Flags by every name, of the vLLM that Overspill runs with; from a file, as importing vLLM takes seconds."""
    known = {}
    for word in Path(__file__).with_name("vllm_flags.txt").read_text().split():
        names, _, kind = word.partition(":")
        is_many = kind.endswith("*")
        for name in names.split(","):
            known[name] = _Known(kind.removesuffix("*"), is_many)
            if kind == "on-off" and name.startswith("--"):
                known["--no-" + name.removeprefix("--")] = known[name]
    return known


def choices_of(name: str) -> list[str]:
    """Values that vLLM accepts for one of its flags; empty where there is no fixed set."""
    return _known_flags()[name].choices


def refuse_unknown(flags: Iterable[Flag], own: Iterable[str] = ()) -> None:
    """Raise for a flag or a value that vLLM would refuse at its start; `own` are Overspill's flags that the user may
    have meant."""
    for flag in flags:
        if (why := _GONE.get(flag.name)) is not None:
            raise OverspillError(f"vLLM 0.32 no longer has {flag.name}; {why}")
        written, equals, value = flag.words[0].partition("=")
        if written.startswith("-O"):
            continue  # -O3, -O.mode=3
        name, dot, _ = flag.name.partition(".")
        known = _found(name, list(own))
        if not dot and "." not in written:  # a name with a dot is a key of a JSON value, left to vLLM
            problem = known.problem([value, *flag.words[1:]] if equals else flag.words[1:])
            if problem is not None:
                raise OverspillError(f"{written}: {problem}")


def _found(name: str, own: Sequence[str]) -> _Known:
    known = _known_flags()
    if name in known:
        return known[name]
    # vLLM's parser completes unambiguous beginnings of names.
    begun = [one for one in known if name.startswith("--") and len(name) > len("--") and one.startswith(name)]
    if len(begun) == 1:
        if begun[0] in own:
            raise OverspillError(f"{name} is only the beginning of a setting's name; did you mean {begun[0]}?")
        return known[begun[0]]
    if begun:
        raise OverspillError(f"{name} can be {', '.join(begun)}; write it in full")
    if (meant := _ELSEWHERE.get(name.replace("_", "-"))) is not None:
        raise OverspillError(f"vLLM has no flag {name}; it is {meant} here")
    advice = nearest(name, [*own, *known], 0.6) or "--help lists Overspill's, and vllm serve --help=all vLLM's"
    raise OverspillError(f"neither Overspill nor vLLM has a flag {name}; {advice}")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """Suggestion of the nearest name, `did you mean …?`; empty where none is as near as `cutoff`, from 0 to 1."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {found[0]}?" if found else ""


def none_of(value: str, choices: Sequence[str]) -> str:
    """Refusal with the nearest choice; among few, only if close: `cuda` for `cuad`, but not `cpu` for `gpu`."""
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.7 if len(choices) <= _FEW else 0.0)
    return f"{value!r:.40} is none of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")


def among(name: str, known: Iterable[str], if_none: str) -> str:
    """Suggestion for an unknown name: a known one that is close, else some that exist."""
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {near[0]}?"
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"known here: {', '.join(names[:_MOST_NAMED])}{more}" if names else if_none


_FEW = 4
_MOST_NAMED = 5
HIDDEN = "***"
# vLLM and huggingface_hub read these as well. Only its user can read a process's environment; everybody can read its
# command line.
VARIABLES = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
# vLLM's parser completes unambiguous beginnings of names.
_SHORTEST = {"--api-key": "--api-k", "--hf-token": "--hf-t"}
# Covers other programs' flags, which are shown as well. vLLM itself lists its watermark as a secret.
_SECRET_NAME = re.compile(r"--([\w.-]*[-.])?(password|passwd|passphrase|secret|token|key)|--watermark-config.*")
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SECRET_IN_JSON = re.compile(
    r'("[\w.-]*(?:password|passwd|secret|api[_-]?key|access[_-]?key|(?:auth|access|hf|bearer)[_-]?token)[\w.-]*"\s*:\s*")'
    r'(?:[^"\\]|\\.)*',
    re.IGNORECASE,
)


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The words with `***` for values of flags that hold secrets, for users in URLs, and for values in JSON whose names
    say that they are secret."""
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
    """A single value, such as a variable's, with its secrets hidden."""
    return _SECRET_IN_JSON.sub(rf"\1{HIDDEN}", _USER_OF_URL.sub(HIDDEN, text))


def hide_in_text(text: str) -> str:
    """Flags as the user wrote them, with secrets hidden, for a message that says what is wrong with them."""
    return " ".join(without_secrets(text.split()))


def refuse_secrets(flags: Iterable[Flag], where: str) -> None:
    """Raise for flags with secrets; `where` names the place that others may read."""
    for flag in flags:
        if list(flag.words) != without_secrets(flag.words):
            variable = VARIABLES.get(_full_name(flag.name))
            instead = f"set {variable} in the environment" if variable else "leave out the secret, or the flag"
            instead += ", which holds one key" if variable and len(flag.words) > 2 else ""
            raise OverspillError(f"{flag.name} would put a secret into {where}; {instead}")


def into_environment(flags: Sequence[Flag]) -> tuple[tuple[Flag, ...], dict[str, str]]:
    """The flags without those whose secret a variable can hold, and these variables.

    A variable holds one key. Several keys stay a flag, and so does an empty one, which overrides the variable's key.
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
