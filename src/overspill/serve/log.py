"""vLLM's log: copied to terminal and file, and read for a one-sentence reason why vLLM ended."""

import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from overspill.files import state_folder
from overspill.kv.errors import OverspillError
from overspill.processes import signal_name

# When the engine core dies, the server logs a traceback for each request, after the core's own.
_KEPT_LINES = 10_000
# `(EngineCore pid=12) ERROR 11-15 09:17:54 [core.py:1] ` precedes the message.
_SOURCE = re.compile(r"^(?:\([^)]*pid=\d+\)\s?)*")
_LEVEL = re.compile(r"^(?P<level>[A-Z]+) \d\d-\d\d [\d:.]+ \[[^\]]*\]\s?")
# vLLM logs a negative size of the KV cache at INFO level; the error that follows has no number.
_HARMLESS = re.compile(r"^(?:INFO|DEBUG|WARNING) (?!.*Available KV cache memory: -\d)")
_ERROR = re.compile(r"^(?P<said>(?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception)\b.*)")
# pydantic prints the class, then for each mistake the setting, unless several are involved, and an indented message.
_INVALID = re.compile(r"ValidationError: \d+ validation errors? for (?P<what>\w+)")
_INPUT = re.compile(r" \[type=\w+, input_value=.*\]$")
_LINK = "For further information visit "
_FRAME = re.compile(r'\s*(?:File ".+", line \d|[~^]+$)')
# Remarks of libraries at a process's end, not errors.
_ASIDE = re.compile(r"nanobind: |\S+:\d+: \w*Warning: ")
_NEVER_SHOWN = ("Traceback ", "nanobind: ")
_MOST_LINES = 12
"""Most lines kept of one error: some errors print their whole input."""
_SHOWN_LINES = 8
# Written by overspill.serve.guard.
_CORE = r"^overspill: the engine core \(process \d+\) "
_CORE_ENDED = re.compile(rf"{_CORE}(?P<how>[^;]+); OOM kills meanwhile: (?P<kills>\w+)")

# Flags to advise by what ran short: Overspill's, or vLLM's own where it runs without a plan.
_PLANNED = {
    "gpu": "--gpu-memory",
    "share": "--gpu-memory {have}GiB",
    "node": "Remove --gpu-memory-utilization, and give less with --gpu-memory",
    "kv": "let the rest spill with more --ram",
    "ram": "give less with --ram",
}
_PLAIN = {
    "gpu": "--gpu-memory-utilization",
    "share": "--gpu-memory-utilization {part}",
    "node": "Give less with --gpu-memory-utilization {part}",
    "kv": "give more of the GPU with --gpu-memory-utilization",
    "ram": "give less of it to KV (such as native:4GiB) and to weights (--cpu-offload-gb)",
}
# The first pattern that matches any line gives the reason, so patterns with numbers or a cause come first.
_KNOWN = (
    (rf"{_CORE}(?:was killed by SIGKILL|is gone); OOM kills meanwhile: [1-9]",
     "RAM ran out, and the kernel's OOM killer killed the engine core; {ram}, or a shorter --max-model-len"),
    (rf"{_CORE}was killed by SIGKILL; OOM kills meanwhile: 0",
     "the engine core was killed by SIGKILL; the kernel counts no OOM kill, so another program or a user did it, as "
     "with kill -9"),
    (rf"{_CORE}(?P<said>was killed by SIG(?:KILL|TERM|INT|HUP|QUIT))", "the engine core {said}"),
    (r"OverspillError: (?P<said>.+)", "{said}"),
    (r"CUDA out of memory occurred when warming up (?:sampler|pooler) with (?P<said>\d+)",
     "the GPU's memory ran out when {said} requests at once were tried; give fewer with --max-num-seqs, or less to the "
     "engine with {gpu}"),
    (r"CUDA out of memory\. Tried to allocate (?P<need>[\d.]+ \w+)\. GPU \d+ has a total capacity of "
     r"(?P<all>[\d.]+ \w+) of which (?P<have>[\d.]+ \w+) is free",
     "the GPU's memory ran out: {need} more was needed, and {have} of {all} was free; give less to the engine with "
     "{gpu}, fewer --max-num-batched-tokens, or a shorter --max-model-len"),
    (r"(?:CUDA )?(?:torch\.)?OutOfMemoryError|CUDA out of memory",
     "the GPU's memory ran out; give less to the engine with {gpu}, or a shorter --max-model-len"),
    (r"Cannot allocate memory|MemoryError",
     "RAM ran out; {ram}, or a shorter --max-model-len"),
    (r"[Aa]ddress already in use", "another program took the port meanwhile; give another --port"),
    (r"error: (?P<said>(?:unrecognized arguments|argument|ambiguous option|the following arguments).+)",
     "vLLM does not accept its flags: {said}"),
    (r"max seq len \((?P<len>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed, .* memory \((?P<have>-?[\d.]+) GiB\)"
     r"\. .*estimated maximum model length is (?P<longest>\d+)\.",
     "{len} tokens need {need} GiB of KV cache; {have} GiB is free. Longest context that fits: {longest}. Use "
     "--max-model-len {longest}, or {kv}"),
    (r"max seq len \((?P<len>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed, .* memory \((?P<have>-?[\d.]+) GiB\)",
     "{len} tokens need {need} GiB of KV cache; {have} GiB is free, too little for one token. Give more to the engine "
     "with {gpu}, put weights in RAM with --cpu-offload-gb, or take a quantised model"),
    (r"Available KV cache memory: -(?P<said>[\d.]+) GiB",
     "nothing is left for the KV cache: weights and activations need {said} GiB more GPU memory than the engine may "
     "take. Give more with {gpu}, use fewer --max-num-batched-tokens or --enforce-eager, move that much of the "
     "weights, and a context's KV more, to RAM with --cpu-offload-gb, or take a quantised model"),
    (r"No available memory for the cache blocks|Cannot auto-fit max_model_len",
     "nothing is left for the KV cache beside weights and activations. Give more with {gpu}, use "
     "fewer --max-num-batched-tokens or --enforce-eager, put weights in RAM with --cpu-offload-gb, or take a quantised "
     "model"),
    (r"Free memory on device \S+ \((?P<have>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than desired GPU memory "
     r"utilization \([\d.]+, (?P<need>[\d.]+) GiB\)",
     "the engine was to take {need} GiB of the GPU's {all}, and {have} GiB is free: other programs use the rest. End "
     "them, or give less with {share}"),
    (r"Available memory on node \S+ \((?P<have>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than desired CPU "
     r"memory utilization \([\d.]+, (?P<need>[\d.]+) GiB\)",
     "the engine was to take {need} GiB of {all} GiB of RAM, and {have} GiB is available. {node}"),
    (r"Error in memory profiling\. Initial free memory (?P<before>[\d.]+) GiB, current free memory (?P<now>[\d.]+) GiB",
     "another program gave GPU memory back while vLLM measured its own ({before} GiB was free before and {now} GiB "
     "after), so the measurement is useless; start again when that program has ended or settled"),
    # A killed child leaves no other line.
    (r"Failed core proc\(s\): \{[^}]*: -9\b|Worker proc \S+ died unexpectedly \(exit code: -9\)",
     "the engine was killed, most often by the kernel because RAM ran out (see dmesg); {ram}"),
    (r"(?P<said>Model architectures? .* (?:are|is) not supported.*|no module or parameter named.*)",
     "vLLM cannot load this model: {said}"),
    (r"User-specified max_model_len \((?P<len>\d+)\) is greater than the derived max_model_len \((?P<key>[\w.]+)="
     r"(?P<most>\d+)",
     "{len} tokens are more than the {most} the model was made for ({key} of its config.json). Use --max-model-len "
     "{most}; if its positions may be stretched, give vLLM its rope scaling with --hf-overrides, or set "
     "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"),
    (r"Couldn't instantiate the backend tokenizer",
     "the model's folder has no usable tokenizer. Copy its files there, name a model that has the same one with "
     "--tokenizer, install sentencepiece and tiktoken if it needs them, or add --skip-tokenizer-init, and send and get "
     "token ids"),
    (r"SafetensorError: (?P<said>.+)", "a weight file is broken: {said}; download it again"),
    (r"No space left on device", "the disk is full"),
    (rf"{_CORE}(?P<said>was killed by .+);", "the engine core crashed: it {said}"),
)  # fmt: skip
# vLLM's parent process logs this for any failure of its child.
_SECONDHAND = re.compile(r"EngineDeadError|See (?:root cause|stack trace) above|Engine core initialization failed")


def open_log(given: Path | None, port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """Create or empty the log file: the given one, or the port's own in the XDG state folder."""
    folder = state_folder(environment)
    if given is None and folder is None:
        raise OverspillError("there is no home folder for vLLM's log; name a file with --log-file")
    path = given or (folder or Path()) / f"serve-{port}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        raise OverspillError(f"vLLM's log cannot be written to {path}: {error.strerror}; use --log-file") from error
    return path


class Log:
    def __init__(self, source: IO[bytes], terminal: IO[bytes] | None, file: Path | None) -> None:
        self._source, self._terminal = source, terminal
        # Append mode: programs that limit its size truncate the file, and serve's own output may go there too.
        self._file: IO[bytes] | None = file.open("ab") if file is not None else None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._copy, name="overspill-log", daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """The last lines; waits for the end of the log, so call it once vLLM has ended."""
        self._thread.join(timeout=5)
        return list(self._lines)

    def _copy(self) -> None:
        with self._source, self._file or contextlib.nullcontext():
            for line in self._source:
                self._lines.append(line.decode(errors="replace").rstrip())
                self._terminal = _written(self._terminal, line)
                self._file = _written(self._file, line)


def _written(sink: IO[bytes] | None, line: bytes) -> IO[bytes] | None:
    """Write a line; return the sink, or None if that failed: a full disk or closed terminal must not block vLLM."""
    if sink is not None:
        try:
            sink.write(line)
            sink.flush()
        except (OSError, ValueError):
            return None
    return sink


@dataclass(frozen=True, slots=True)
class Line:
    source: str
    """The process that wrote the line, as vLLM names it."""
    said: str
    """The message without source and level, with its indentation."""
    is_harmless: bool

    @classmethod
    def read(cls, line: str) -> "Line":
        source = _SOURCE.match(line)
        assert source is not None  # the pattern also matches an empty string
        rest = line[source.end() :]
        said = _LEVEL.sub("", rest).rstrip()
        return cls(source[0].strip(), _INPUT.sub("", said), _HARMLESS.match(rest) is not None)

    @property
    def is_indented(self) -> bool:
        return self.said[:1].isspace()

    @property
    def is_error(self) -> bool:
        return _ERROR.match(self.said) is not None

    @property
    def is_open(self) -> bool:
        """Whether the error continues in lines that need not be indented."""
        return self.is_error and (self.said.endswith(":") or _INVALID.search(self.said) is not None)


def without_tracebacks(lines: Sequence[str]) -> list[str]:
    """Log lines without the stack frames of vLLM's code."""
    read = [Line.read(line) for line in lines]
    belongs = {more for at, line in enumerate(read) if line.is_error for more in more_of(read, at)}
    return [
        line.rstrip()
        for at, (line, one) in enumerate(zip(lines, read))
        if at in belongs or (one.said and not one.is_indented and not one.said.startswith(_NEVER_SHOWN))
    ]


def more_of(lines: Sequence[Line], at: int) -> list[int]:
    """Indices of the lines that continue an error: from the same process, and indented or announced by it."""
    error, found = lines[at], list[int]()
    for number, line in enumerate(lines[at + 1 :], at + 1):
        if line.source != error.source:
            continue  # processes interleave their lines
        if not line.said.strip() or line.is_harmless or line.is_error or _ASIDE.match(line.said):
            break
        if line.said.startswith("Traceback ") or _FRAME.match(line.said):
            break
        if (not line.is_indented and not error.is_open) or len(found) == _MOST_LINES:
            break
        if _LINK not in line.said:
            found.append(number)
    return found


def reason(lines: Sequence[str], *, is_planned: bool = True) -> str:
    """Why vLLM failed: plain words for a known cause, else the last exception's message, or empty without one.

    `is_planned` decides which flags to advise: an engine without a plan only takes vLLM's.
    """
    read = [Line.read(line) for line in lines]
    for pattern, plain in _KNOWN:
        for line in read:
            if not line.is_harmless and (match := re.search(pattern, line.said.strip())):
                return _explained(plain, match, _PLANNED if is_planned else _PLAIN)
    # A server that lost its core raises errors of its own afterwards.
    is_of_core = [re.match(r"\((?:EngineCore|Worker)", line.source) is not None for line in read]
    has_core_ended = any(_CORE_ENDED.match(line) for line in lines)
    for at in sorted(range(len(read)), key=lambda at: (has_core_ended and is_of_core[at], at), reverse=True):
        # Indented lines count too: some errors quote another process's.
        match = _ERROR.match(read[at].said.strip())
        if match is not None and not read[at].is_harmless and not _SECONDHAND.search(match["said"]):
            return _whole(match["said"], [read[more].said for more in more_of(read, at)])
    return ""


def epitaph(
    code: int | None, lines: Sequence[str], *, during: str, log: str = "its log", is_planned: bool = True
) -> str:
    """How and why vLLM ended, and the last lines of its log; `during` says when in its life."""
    core = next((at for at, line in enumerate(lines) if _CORE_ENDED.match(line)), None)
    why = reason(lines, is_planned=is_planned)
    how = ""
    if core is not None:
        match = _CORE_ENDED.match(lines[core])
        assert match is not None
        why = why or f"the engine core {match['how']}, and its log does not say why"
        if match["kills"] not in ("0", "unknown") and "OOM killer" not in why:  # most likely a worker was killed
            why += f"; just before, the kernel's OOM killer killed {match['kills']} process(es)"
        # Later lines of the server only report that the core is gone.
        lines = [line for line in lines[: core + 1] if not line.startswith("(APIServer")]
    elif code:
        how = f" by {signal_name(code - 128)}" if code > 128 else f" with exit code {code}"
    else:
        why = why or "its server shut down without an error, as when another program asks it to"
    shown = [f"  {line}" for line in without_tracebacks(lines)[-_SHOWN_LINES:]]
    sentence = f"vLLM ended{how} {during}" + (f": {why}" if why else "")
    return "\n".join([sentence, f"the last lines of {log}:", *shown]) if shown else sentence


def _explained(plain: str, match: re.Match[str], advice: Mapping[str, str]) -> str:
    found = match.groupdict()
    if "all" in found:
        found["part"] = _part(found["have"], found["all"])
    text = plain
    for name, flags in advice.items():
        text = text.replace(f"{{{name}}}", flags)
    return text.format(**found).strip()


def _part(have: str, everything: str) -> str:
    """The free share of memory for --gpu-memory-utilization, rounded down so that the free memory suffices."""
    try:
        return f"{max(1, int(100 * float(have) / float(everything))) / 100:.2f}"
    except (ValueError, ZeroDivisionError):
        return ""  # sizes with units, where the advice names no share


def _whole(error: str, more: Sequence[str]) -> str:
    """The error and the lines that continue it, as one line."""
    if not more:
        return error
    if (invalid := _INVALID.search(error)) is None:
        return " ".join([error, *(line.strip() for line in more)])
    mistakes, setting = [], ""
    for line in more:
        if line[:1].isspace():
            mistakes.append(f"{setting}{line.strip().removeprefix('Value error, ').rstrip('.')}")
            setting = ""
        else:
            setting = f"{line.strip()}: "
    return f"vLLM does not accept its settings ({invalid['what']}): {'; '.join(mistakes)}" if mistakes else error
