"""Why vLLM ended, in one sentence, from the last lines of its log; and which lines to show."""

import re
from collections.abc import Sequence

# The first that matches the latest line says why; later lines of a traceback are closer to the cause's name.
_KNOWN = (
    (r"OverspillError: (?P<said>.+)", "{said}"),
    (r"(?:CUDA )?(?:torch\.)?OutOfMemoryError|CUDA out of memory",
     "the GPU's memory ran out; give less to the engine with --gpu-memory, or a shorter --max-model-len"),
    (r"Cannot allocate memory|MemoryError",
     "RAM ran out; give less with --ram, or a shorter --max-model-len"),
    (r"[Aa]ddress already in use", "another program took the port meanwhile; give another --port"),
    (r"error: (?P<said>(?:unrecognized arguments|argument|ambiguous option|the following arguments).+)",
     "vLLM does not accept its flags: {said}"),
    (r"To serve at least one request with the model'?s max(?:imum)? seq(?:uence)? len.*?\((?P<said>\d+)",
     "the KV cache does not hold one request of {said} tokens; use a shorter --max-model-len, or more --ram"),
    (r"Free memory on device .* is less than desired GPU memory utilization",
     "other programs use too much of the GPU's memory; end them, or give less with --gpu-memory"),
    (r"(?P<said>Model architectures? .* (?:are|is) not supported.*|no module or parameter named.*)",
     "vLLM cannot load this model: {said}"),
    (r"SafetensorError: (?P<said>.+)", "a weight file is broken: {said}; download it again"),
    (r"No space left on device", "the disk is full"),
)  # fmt: skip
# `(EngineCore pid=12) ERROR 11-15 09:17:54 [core.py:1] ` in front of what was said.
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s?)*(?:[A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\]\s?)?")
_HARMLESS = re.compile(r"^(?:\([^)]*pid=\d+\)\s?)*(?:INFO|DEBUG|WARNING) ")
_ERROR = re.compile(r"^(?P<said>(?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception)\b.*)")
# vLLM's parent process says this of any failure of its child's.
_SECONDHAND = re.compile(r"EngineDeadError|See (?:root cause|stack trace) above|Engine core initialization failed")


def reason(lines: Sequence[str]) -> str:
    """In plain words where the cause is known; else what the last exception said; empty if there was none."""
    said = [_PREFIX.sub("", line).strip() for line in lines if not _HARMLESS.match(line)]
    for pattern, plain in _KNOWN:
        for line in said:
            if match := re.search(pattern, line):
                return plain.format(**match.groupdict()).strip()
    for line in reversed(said):
        if (match := _ERROR.match(line)) and not _SECONDHAND.search(line):
            return match["said"]
    return ""


def without_tracebacks(lines: Sequence[str]) -> list[str]:
    """What was said, without where in vLLM's code."""
    kept = []
    for line in lines:
        said = _PREFIX.sub("", line)
        if said.strip() and not said[0].isspace() and not said.startswith("Traceback "):
            kept.append(line.rstrip())
    return kept
