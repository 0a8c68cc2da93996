"""Workloads by name, and their scripts: what each sends, when, and after which answer.

Workload and seed alone determine a script, before anything is sent. Prompts are token ids: no tokenizer is needed, and
the same seed sends the same to every server.
"""

import json
import math
import os
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.sharegpt import read_conversations
from overspill.model.source import cache_folder, find_snapshot
from overspill.settings import nearest

Number = int | float
_MOST = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Workload parameter, a whole number if its default is one."""

    name: str
    default: Number
    help: str
    least: Number = 1
    most: Number = _MOST

    def parse(self, text: str) -> Number:
        kind = int if isinstance(self.default, int) else float
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:
            what = "a whole number" if kind is int else "a number"
            upto = "" if self.most == _MOST else f" to {self.most}"
            raise MeasureError(
                f"{self.name}={text!r:.40} is not {what} from {self.least}{upto}; {self.name} is {self.help}"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadKind:
    name: str
    help: str
    parameters: tuple[Parameter, ...]
    shortened_by: tuple[str, ...]
    """Parameters that shorten the longest request, in the order in which to try them."""

    @property
    def defaults(self) -> dict[str, Number]:
        return {parameter.name: parameter.default for parameter in self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    parameters: Mapping[str, Number]
    """Values of all parameters, defaults included."""
    file: str = ""
    """Path of the conversations; empty unless the workload is `file`."""
    digest: str = ""
    """Hash of that file's content."""

    def as_text(self) -> str:
        """Text for `parse_workload`, defaults left out."""
        defaults = _kind(self.name).defaults
        other = [f"{name}={value}" for name, value in self.parameters.items() if value != defaults[name]]
        return f"{self.name}:{','.join(other)}" if other else self.name


def _output(tokens: int) -> Parameter:
    return Parameter(name="output", default=tokens, help="tokens of each answer")


def _concurrency(requests: int) -> Parameter:
    return Parameter(name="concurrency", default=requests, help="most requests in flight at once")


_SINGLE_ANSWERS = (
    Parameter(name="requests", default=16, help="how many"),
    Parameter(name="input", default=4096, help="tokens of each prompt", least=2),
    _output(256),
    _concurrency(1),
)

WORKLOADS: Mapping[str, WorkloadKind] = {
    kind.name: kind
    for kind in (
        WorkloadKind(
            name="overhead",
            help="new prompts at a fixed rate: the cost of offload when no prompt returns",
            parameters=(
                Parameter(name="requests", default=60, help="how many"),
                Parameter(name="rate", default=2.0, help="requests a second", least=0.001),
                Parameter(name="input", default=8192, help="tokens of each prompt"),
                _output(1024),
            ),
            shortened_by=("input", "output"),
        ),
        WorkloadKind(
            name="multi-turn",
            help="conversations that take turns; each turn sends all that was said before",
            parameters=(
                Parameter(name="conversations", default=16, help="how many"),
                Parameter(name="turns", default=4, help="questions in a conversation that returns", least=2),
                Parameter(name="first", default=4096, help="tokens of the first question"),
                Parameter(name="input", default=2000, help="tokens of each later question"),
                _output(128),
                Parameter(name="returning", default=1.0, help="share of conversations with a second turn",
                          least=0.0, most=1.0),
                Parameter(name="think_time", default=1.0, help="seconds from an answer to the next question; half to "
                          "one and a half times this", least=0.0),
                _concurrency(6),
            ),
            shortened_by=("input", "first", "output"),
        ),
        WorkloadKind(
            name="shared-prefix",
            help="groups of requests that begin alike, in turns",
            parameters=(
                Parameter(name="groups", default=8, help="how many"),
                Parameter(name="requests", default=8, help="requests of each group"),
                Parameter(name="prefix", default=4096, help="tokens that a group's prompts begin with"),
                Parameter(name="suffix", default=128, help="tokens of their own"),
                _output(128),
                _concurrency(8),
            ),
            shortened_by=("prefix", "suffix", "output"),
        ),
        WorkloadKind(
            name="long-context",
            help="long prompts one after the other, then the same again",
            parameters=(
                Parameter(name="prompts", default=4, help="how many"),
                Parameter(name="passes", default=2, help="how often each is sent", least=2),
                Parameter(name="input", default=16384, help="tokens of each prompt"),
                _output(16),
                _concurrency(1),
            ),
            shortened_by=("input", "output"),
        ),
        WorkloadKind(
            name="offline",
            help="new prompts, all at once: throughput",
            parameters=(
                Parameter(name="requests", default=256, help="how many"),
                Parameter(name="input", default=512, help="tokens of each prompt"),
                _output(128),
            ),
            shortened_by=("input", "output"),
        ),
        WorkloadKind(
            name="edit",
            help="answers that repeat their prompt, as edits of code do: drafts are accepted",
            parameters=_SINGLE_ANSWERS,
            shortened_by=("input", "output"),
        ),
        WorkloadKind(
            name="write",
            help="answers that repeat nothing: drafts are rejected",
            parameters=_SINGLE_ANSWERS,
            shortened_by=("input", "output"),
        ),
    )
}  # fmt: skip


# Not in WORKLOADS, which are also offered where no file of this machine may be named.
FILE = WorkloadKind(
    name="file",
    help="conversations from a file, with real prompts",
    parameters=(
        Parameter(name="conversations", default=100, help="how many, drawn by the seed"),
        Parameter(name="turns", default=1, help="questions of each, at most"),
        Parameter(name="output", default=0, help="tokens of each answer; 0 for as many as in the file", least=0),
        Parameter(name="rate", default=0.0, help="conversations that begin per second; 0 for all at once", least=0.0),
        _concurrency(64),
    ),
    shortened_by=(),
)


def _kind(name: str) -> WorkloadKind:
    return FILE if name == FILE.name else WORKLOADS[name]


def parse_workload(text: str, file: str = "") -> Workload:
    """Parse `multi-turn` or `multi-turn:conversations=8,turns=4`. Only the `file` workload reads `file`: a text never
    names a file, since it may come from the manager's page."""
    name, _, settings = text.strip().partition(":")
    if name not in (*WORKLOADS, FILE.name):
        raise MeasureError(
            f"there is no workload {name!r:.60}; {nearest(name, WORKLOADS)} There are {', '.join(WORKLOADS)}"
        )
    if (name == FILE.name) != bool(file):
        raise MeasureError(f"--workload {FILE.name} and --prompts FILE need each other; only overspill bench has them")
    kind = _kind(name)
    place = {"file": os.path.abspath(file), "digest": read_conversations(os.path.abspath(file)).digest} if file else {}
    known = {parameter.name: parameter for parameter in kind.parameters}
    given: dict[str, Number] = {}
    for setting in filter(None, (part.strip() for part in settings.split(","))):
        key, equals, value = (part.strip() for part in setting.partition("="))
        key = key.replace("-", "_")
        if not equals:
            first = kind.parameters[0]
            raise MeasureError(
                f"{setting!r:.60} in {text!r:.80} has no value; write for example {name}:{first.name}={first.default}"
            )
        if key not in known:
            raise MeasureError(f"{name} has no parameter {key!r:.60}; {nearest(key, known)} It has {', '.join(known)}")
        if key in given:
            raise MeasureError(f"{key} is given twice in {text!r:.80}; leave one out")
        given[key] = known[key].parse(value)
    return Workload(name=name, parameters={**kind.defaults, **given}, **place)


Phase = Literal["cold", "returning"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a prompt. Pieces of the same name begin with the same tokens, so names include the workload."""

    name: str
    tokens: int
    ids: str | None = None
    """Token ids as JSON without the brackets; None if they are to be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request."""

    index: int
    pieces: tuple[Piece, ...]
    """Pieces of the prompt, or only the new turn's where the request continues a conversation."""
    output: int
    known_tokens: int = 0
    """Prompt tokens that the workload has already sent or received as an answer."""
    continues: bool = False
    """Whether the prompt begins with the previous step's prompt and answer."""
    wait_s: float = 0.0
    """Seconds to wait after the previous step's answer."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(piece.tokens for piece in self.pieces) + (self.known_tokens if self.continues else 0)

    @property
    def phase(self) -> Phase:
        return "returning" if self.known_tokens else "cold"


@dataclass(frozen=True, slots=True)
class Chain:
    """Requests in sequence, each sent after the previous answer."""

    steps: tuple[Step, ...]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    chains: tuple[Chain, ...]
    concurrency: int | None = None
    """Most requests under way at once; None for no limit."""

    @property
    def steps(self) -> list[Step]:
        return sorted((step for chain in self.chains for step in chain.steps), key=lambda step: step.index)

    @property
    def longest(self) -> int:
        return max(step.prompt_tokens + step.output for step in self.steps)

    @property
    def known_tokens(self) -> int:
        """Prompt tokens that a perfect, initially empty cache could serve."""
        return sum(step.known_tokens for step in self.steps)


def write_script(workload: Workload, seed: int) -> Script:
    if workload.file:
        raise MeasureError("a workload from a file needs a server's tokenizer, so only overspill bench takes it")
    return _WRITERS[workload.name](workload.parameters, seed)


def require_fit(workload: Workload, seed: int, max_model_len: int | None) -> None:
    """Raise if a request is too long, before any is sent: a server would refuse it, perhaps after an hour."""
    need = write_script(workload, seed).longest
    if max_model_len is None or need <= max_model_len:
        return
    fitting = _fitting(workload, seed, max_model_len)
    smaller = f"Use --workload {fitting.as_text()}, or serve" if fitting else "Serve"
    raise CannotMeasure(
        f"the longest request of {workload.as_text()} needs {need:,} tokens; the server takes {max_model_len:,}. "
        f"{smaller} with --max-model-len {need}"
    )


def _fitting(workload: Workload, seed: int, max_model_len: int) -> Workload | None:
    """Workload with one parameter reduced no more than needed, or, where one is not enough, with several."""
    kind = WORKLOADS[workload.name]
    for name in kind.shortened_by:
        if found := shortened(workload, seed, max_model_len, name):
            return found
    return shortened(workload, seed, max_model_len, *kind.shortened_by)


def shortened(workload: Workload, seed: int, max_model_len: int, *names: str) -> Workload | None:
    """Workload with these parameters reduced by the same share until the longest request fits; None if none fits."""
    least = {each.name: int(each.least) for each in WORKLOADS[workload.name].parameters}
    lengths = {name: int(workload.parameters[name]) for name in names}
    finest = max(lengths.values())

    def scaled(share: int) -> Workload | None:
        changed = {name: max(least[name], value * share // finest) for name, value in lengths.items()}
        smaller = Workload(name=workload.name, parameters={**workload.parameters, **changed})
        return smaller if write_script(smaller, seed).longest <= max_model_len else None

    largest = bisect_left(range(1, finest + 1), True, key=lambda share: scaled(share) is None)
    return scaled(largest) if largest else None


_Parameters = Mapping[str, Number]


def _singles(prompt: Callable[[int, int], tuple[Piece, ...]], given: _Parameters, seed: int) -> Script:
    """Script of new prompts, at a rate or all at once; `prompt` makes one from its index and its length in tokens."""
    rate, tokens = given.get("rate"), int(given["input"])
    chains = [
        _single(i, given, *prompt(i, tokens), start_s=i / rate if rate else 0.0) for i in range(int(given["requests"]))
    ]
    return Script(tuple(chains), int(given["concurrency"]) if "concurrency" in given else None)


def _new(workload: str) -> Callable[[int, int], tuple[Piece, ...]]:
    return lambda i, tokens: (Piece(f"{workload}/{i}", tokens),)


def _repeated(i: int, tokens: int) -> tuple[Piece, ...]:
    """Text followed by its own beginning: a model that continues repeats the text."""
    begun = max(1, tokens // 8)
    return Piece(f"edit/{i}", tokens - begun), Piece(f"edit/{i}", begun)


def _single(index: int, given: _Parameters, *pieces: Piece, known_tokens: int = 0, start_s: float = 0.0) -> Chain:
    return Chain((Step(index=index, pieces=pieces, output=int(given["output"]), known_tokens=known_tokens),), start_s)


def _long_context(given: _Parameters, seed: int) -> Script:
    prompts, tokens = int(given["prompts"]), int(given["input"])
    chains = [
        _single(i, given, Piece(f"long-context/{i % prompts}", tokens), known_tokens=tokens if i >= prompts else 0)
        for i in range(prompts * int(given["passes"]))
    ]
    return Script(tuple(chains), int(given["concurrency"]))


def _shared_prefix(given: _Parameters, seed: int) -> Script:
    groups, prefix, suffix = int(given["groups"]), int(given["prefix"]), int(given["suffix"])
    chains = []
    for i in range(groups * int(given["requests"])):
        shared, own = Piece(f"shared-prefix/prefix-{i % groups}", prefix), Piece(f"shared-prefix/suffix-{i}", suffix)
        chains.append(_single(i, given, shared, own, known_tokens=prefix if i >= groups else 0))
    return Script(tuple(chains), int(given["concurrency"]))


def _multi_turn(given: _Parameters, seed: int) -> Script:
    conversations, output = int(given["conversations"]), int(given["output"])
    returning = [one for one in range(conversations) if _returns(one, float(given["returning"]))]
    waits = random.Random(f"{seed}/multi-turn/think-time")
    chains: dict[int, list[Step]] = {}
    index = 0
    for turn in range(int(given["turns"])):
        for one in returning if turn else range(conversations):
            earlier = chains.setdefault(one, [])
            known = earlier[-1].prompt_tokens + output if earlier else 0
            tokens = int(given["input"] if earlier else given["first"])
            wait_s = float(given["think_time"]) * waits.uniform(0.5, 1.5) if earlier else 0.0
            earlier.append(
                Step(
                    index=index, pieces=(Piece(f"multi-turn/{one}-{turn}", tokens),), output=output,
                    known_tokens=known, continues=bool(earlier), wait_s=wait_s,
                )
            )  # fmt: skip
            index += 1
    return Script(tuple(Chain(tuple(steps)) for steps in chains.values()), int(given["concurrency"]))


def _returns(conversation: int, share: float) -> bool:
    """Whether a conversation returns; returning ones are spread evenly among the others."""
    return int((conversation + 1) * share + 1e-9) > int(conversation * share + 1e-9)


_WRITERS: Mapping[str, Callable[[_Parameters, int], Script]] = {
    "overhead": partial(_singles, _new("overhead")),
    "multi-turn": _multi_turn,
    "shared-prefix": _shared_prefix,
    "long-context": _long_context,
    "offline": partial(_singles, _new("offline")),
    "edit": partial(_singles, _repeated),
    "write": partial(_singles, _new("write")),
}


# Ids that every language model's tokenizer has.
_SAFE = (100, 1000)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids from `low` up to, but not including, `high`."""

    low: int
    high: int

    def draw(self, piece: Piece, seed: int) -> str:
        """Token ids as JSON without the brackets: a conversation grows by joining such texts."""
        if piece.ids is not None:
            return piece.ids
        ids = random.Random(f"{seed}/{piece.name}").choices(range(self.low, self.high), k=piece.tokens)
        return ids_as_text(ids)


def ids_as_text(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def find_vocabulary(root: str | None) -> Vocabulary:
    """Ids of the model that a server names as its root if its config is on this machine, else safe ones."""
    size = None if not root else _vocab_size(root)
    if size is None:
        return Vocabulary(*_SAFE)
    # Special tokens, such as image placeholders, are at either end.
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
