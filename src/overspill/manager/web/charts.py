"""Charts of the dashboard: a table of series, matched with the numbers that the machine and its engines report."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    key: str
    title: str
    unit: str
    """One of bytes, bytes/s, share, s, tok/s, °C and W; empty for plain counts."""
    lines: tuple[Line, ...]


RANGES = (("15 min", 900), ("1 h", 3600), ("6 h", 21600), ("24 h", 86400))
"""Names and seconds of the time ranges for charts; all but the first show averages per minute."""

# Key, title, unit, and the lines' series and labels; `*` stands for a GPU, a disk or an engine.
_CHARTS = (
    ("tokens", "Tokens", "tok/s", (
        ("engine.*.generation_tokens_per_s", "answers"), ("engine.*.prompt_tokens_per_s", "prompts"),
    )),
    ("ttft", "Time to the first token", "s", (("engine.*.ttft_s", "TTFT"),)),
    ("hits", "Hits", "share", (("engine.*.prefix_hit_rate", "on the GPU"), ("engine.*.external_hit_rate", "in RAM"))),
    ("kv", "KV in use", "share", (("engine.*.kv_cache_use", "KV"),)),
    ("requests", "Requests", "", (
        ("engine.*.requests_running", "running"), ("engine.*.requests_waiting", "waiting"),
    )),
    ("gpu-memory", "GPU memory", "bytes", (("gpu*.used_bytes", "used"), ("gpu*.total_bytes", "in all"))),
    ("gpu-use", "GPU use", "share", (("gpu*.use", "busy"),)),
    ("gpu-temperature", "GPU temperature", "°C", (("gpu*.temperature_c", "temperature"),)),
    ("gpu-power", "GPU power", "W", (("gpu*.power_w", "power"),)),
    ("ram", "RAM", "bytes", (
        ("ram.used_bytes", "used"), ("ram.available_bytes", "free"), ("ram.pinned_bytes", "pinned for KV"),
        ("ram.spilled_bytes", "spilled KV"), ("engine.*.pool_used_bytes", "idle KV"),
    )),
    ("cpu", "CPU", "share", (("cpu.use", "all cores"),)),
    ("link", "Link", "bytes/s", (
        ("gpu*.to_gpu_bytes_per_s", "to the GPU"), ("gpu*.from_gpu_bytes_per_s", "from the GPU"),
        ("engine.*.load_bytes_per_s", "idle KV in"), ("engine.*.store_bytes_per_s", "idle KV out"),
        ("engine.*.spill_in_bytes_per_s", "spilled KV in"), ("engine.*.spill_out_bytes_per_s", "spilled KV out"),
    )),
    ("disk", "Disk", "bytes/s", (("disk.*.read_bytes_per_s", "read"), ("disk.*.write_bytes_per_s", "written"))),
    ("disk-free", "Disk, free", "bytes", (("disk.*.free_bytes", "free"),)),
)  # fmt: skip


def charts_of(names: Collection[str]) -> list[Chart]:
    """Charts that have at least one line among the series `names`."""
    known = sorted(names)
    found = []
    for key, title, unit, lines in _CHARTS:
        drawn = tuple(line for pattern, label in lines for line in _lines(pattern, label, known))
        if drawn:
            found.append(Chart(key, title, unit, drawn))
    return found


def _lines(pattern: str, label: str, names: Collection[str]) -> list[Line]:
    head, star, tail = pattern.partition("*")
    if not star:
        return [Line(pattern, label)] if pattern in names else []
    matching = [name for name in names if name.startswith(head) and name.endswith(tail)]
    kind = head.strip(".")
    whose = {name: name[len(head) : len(name) - len(tail)] for name in matching}
    return [Line(name, f"{kind} {one} {label}" if kind == "gpu" else f"{one} {label}") for name, one in whose.items()]
