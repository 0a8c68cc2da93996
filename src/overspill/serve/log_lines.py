"""Lines of vLLM's log: who said them, which belong to one error, and which to show."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# `(EngineCore pid=12) ERROR 11-15 09:17:54 [core.py:1] ` in front of what was said.
_SOURCE = re.compile(r"^(?:\([^)]*pid=\d+\)\s?)*")
_LEVEL = re.compile(r"^(?P<level>[A-Z]+) \d\d-\d\d [\d:.]+ \[[^\]]*\]\s?")
# What vLLM says of a KV cache that is less than nothing, it says as a mere fact; the error that follows has no number.
_HARMLESS = re.compile(r"^(?:INFO|DEBUG|WARNING) (?!.*Available KV cache memory: -\d)")
ERROR = re.compile(r"^(?P<said>(?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception)\b.*)")
# pydantic names the class, then for each mistake the setting, unless it is of several, and indented what is wrong.
INVALID = re.compile(r"ValidationError: \d+ validation errors? for (?P<what>\w+)")
_INPUT = re.compile(r" \[type=\w+, input_value=.*\]$")
_LINK = "For further information visit "
_FRAME = re.compile(r'\s*(?:File ".+", line \d|[~^]+$)')
# What libraries say when a process ends, and is nobody's error.
_ASIDE = re.compile(r"nanobind: |\S+:\d+: \w*Warning: ")
_NEVER_SHOWN = ("Traceback ", "nanobind: ")
_MOST_LINES = 12
"""Of an error's own words: some print the whole of what they were given."""


@dataclass(frozen=True, slots=True)
class Line:
    source: str
    """The process that said it, as vLLM names it."""
    said: str
    """With what it is indented by."""
    is_harmless: bool

    @classmethod
    def read(cls, line: str) -> "Line":
        source = _SOURCE.match(line)
        assert source is not None  # it matches nothing, too
        rest = line[source.end() :]
        said = _LEVEL.sub("", rest).rstrip()
        return cls(source[0].strip(), _INPUT.sub("", said), _HARMLESS.match(rest) is not None)

    @property
    def is_indented(self) -> bool:
        return self.said[:1].isspace()

    @property
    def is_error(self) -> bool:
        return ERROR.match(self.said) is not None

    @property
    def is_open(self) -> bool:
        """An error that goes on in lines which need not be indented."""
        return self.is_error and (self.said.endswith(":") or INVALID.search(self.said) is not None)


def without_tracebacks(lines: Sequence[str]) -> list[str]:
    """What was said, without where in vLLM's code."""
    read = [Line.read(line) for line in lines]
    belongs = {more for at, line in enumerate(read) if line.is_error for more in more_of(read, at)}
    return [
        line.rstrip()
        for at, (line, one) in enumerate(zip(lines, read))
        if at in belongs or (one.said and not one.is_indented and not one.said.startswith(_NEVER_SHOWN))
    ]


def more_of(lines: Sequence[Line], at: int) -> list[int]:
    """Which lines belong to an error: what follows it from the same process, indented, or announced by it."""
    error, found = lines[at], list[int]()
    for number, line in enumerate(lines[at + 1 :], at + 1):
        if line.source != error.source:
            continue  # processes write in turn
        if not line.said.strip() or line.is_harmless or line.is_error or _is_no_part(line):
            break
        if (not line.is_indented and not error.is_open) or len(found) == _MOST_LINES:
            break
        if _LINK not in line.said:
            found.append(number)
    return found


def _is_no_part(line: Line) -> bool:
    is_traceback = line.said.startswith("Traceback ") or _FRAME.match(line.said) is not None
    return is_traceback or _ASIDE.match(line.said) is not None
