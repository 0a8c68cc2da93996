"""Why vLLM ended, in one sentence, from the last lines of its log; and which lines to show."""

import re
from collections.abc import Sequence

# The first that matches some line says why, so what has numbers, and what names a cause, stands before what does not.
_KNOWN = (
    (r"OverspillError: (?P<said>.+)", "{said}"),
    (r"CUDA out of memory occurred when warming up (?:sampler|pooler) with (?P<said>\d+)",
     "the GPU's memory ran out when {said} requests at once were tried; give fewer with --max-num-seqs, or less to the "
     "engine with --gpu-memory"),
    (r"CUDA out of memory\. Tried to allocate (?P<need>[\d.]+ \w+)\. GPU \d+ has a total capacity of "
     r"(?P<all>[\d.]+ \w+) of which (?P<have>[\d.]+ \w+) is free",
     "the GPU's memory ran out: {need} more was needed, and {have} of {all} was free; give less to the engine with "
     "--gpu-memory, fewer --max-num-batched-tokens, or a shorter --max-model-len"),
    (r"(?:CUDA )?(?:torch\.)?OutOfMemoryError|CUDA out of memory",
     "the GPU's memory ran out; give less to the engine with --gpu-memory, or a shorter --max-model-len"),
    (r"Cannot allocate memory|MemoryError",
     "RAM ran out; give less with --ram, or a shorter --max-model-len"),
    (r"[Aa]ddress already in use", "another program took the port meanwhile; give another --port"),
    (r"error: (?P<said>(?:unrecognized arguments|argument|ambiguous option|the following arguments).+)",
     "vLLM does not accept its flags: {said}"),
    (r"max seq len \((?P<len>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed, .* memory \((?P<have>-?[\d.]+) GiB\)"
     r"\. .*estimated maximum model length is (?P<longest>\d+)\.",
     "{len} tokens need {need} GiB of KV cache; {have} GiB is free. Longest context that fits: {longest}. Use "
     "--max-model-len {longest}, or let the rest spill with more --ram"),
    (r"max seq len \((?P<len>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed, .* memory \((?P<have>-?[\d.]+) GiB\)",
     "{len} tokens need {need} GiB of KV cache; {have} GiB is free, which holds not one token. Give more to the engine "
     "with --gpu-memory, put weights in RAM with --cpu-offload-gb, or take a quantised model"),
    (r"Available KV cache memory: -(?P<said>[\d.]+) GiB",
     "nothing is left for the KV cache: weights and what vLLM computes with need {said} GiB more than the engine may "
     "take of the GPU. Give more with --gpu-memory, use fewer --max-num-batched-tokens or --enforce-eager, put that "
     "much and a context's KV more of the weights in RAM with --cpu-offload-gb, or take a quantised model"),
    (r"No available memory for the cache blocks|Cannot auto-fit max_model_len",
     "nothing is left for the KV cache beside weights and what vLLM computes with. Give more with --gpu-memory, use "
     "fewer --max-num-batched-tokens or --enforce-eager, put weights in RAM with --cpu-offload-gb, or take a quantised "
     "model"),
    (r"Free memory on device \S+ \((?P<have>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than desired GPU memory "
     r"utilization \([\d.]+, (?P<need>[\d.]+) GiB\)",
     "the engine was to take {need} GiB of the GPU's {all}, and {have} GiB is free: other programs use the rest. End "
     "them, or give less with --gpu-memory {have}GiB"),
    (r"Available memory on node \S+ \((?P<have>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than desired CPU "
     r"memory utilization \([\d.]+, (?P<need>[\d.]+) GiB\)",
     "the engine was to take {need} GiB of {all} GiB of RAM, and {have} GiB is available. Remove "
     "--gpu-memory-utilization, and give less with --gpu-memory"),
    (r"Error in memory profiling\. Initial free memory (?P<before>[\d.]+) GiB, current free memory (?P<now>[\d.]+) GiB",
     "another program gave GPU memory back while vLLM measured its own ({before} GiB was free before and {now} GiB "
     "after), so nothing can be told from it; start again when that program has ended or settled"),
    # Of a child that somebody killed there is no other word.
    (r"Failed core proc\(s\): \{[^}]*: -9\b|Worker proc \S+ died unexpectedly \(exit code: -9\)",
     "the engine was killed, most often by the kernel because RAM ran out (dmesg tells); give less with --ram"),
    (r"(?P<said>Model architectures? .* (?:are|is) not supported.*|no module or parameter named.*)",
     "vLLM cannot load this model: {said}"),
    (r"SafetensorError: (?P<said>.+)", "a weight file is broken: {said}; download it again"),
    (r"No space left on device", "the disk is full"),
)  # fmt: skip
# `(EngineCore pid=12) ERROR 11-15 09:17:54 [core.py:1] ` in front of what was said.
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s?)*(?:[A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\]\s?)?")
# What vLLM says of a KV cache that is less than nothing, it says as a mere fact; the error that follows has no number.
_HARMLESS = re.compile(r"^(?:\([^)]*pid=\d+\)\s?)*(?:INFO|DEBUG|WARNING) (?!.*Available KV cache memory: -\d)")
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
