"""The manager's /metrics: the machine, engines' states, requests through the gateway, and engines' own series."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from overspill.manager.fleet import Engines
from overspill.manager.jobs import Jobs
from overspill.manager.states import Snapshot, State
from overspill.manager.telemetry.watcher import Moment, Watching

PREFIX = "overspill_manager_"
LABEL = "model"
# Prometheus waits 10 s for the whole page by default.
_ENGINE_WAIT_S = 2.0
_TRAFFIC = {
    "requests": "Requests that the gateway took.",
    "failed": "Of these, those that failed.",
    "cancelled": "Of these, those that the client cancelled.",
    "prompt_tokens": "Prompt tokens, as answers report.",
    "completion_tokens": "Answer tokens, as answers report.",
}
_WAITING = {"in_flight": "Requests being answered.", "waiting": "Requests that wait for a model."}
_MACHINE = {
    "ram.total_bytes": ("ram_total_bytes", "RAM of the machine."),
    "ram.available_bytes": ("ram_available_bytes", "RAM that can be taken without swapping."),
    "ram.pinned_bytes": ("ram_pinned_bytes", "RAM that engines pinned for KV."),
    "ram.spilled_bytes": ("ram_spilled_bytes", "RAM for spilled KV."),
    "cpu.use": ("cpu_use", "Busy share of all cores."),
}
_GPU = {
    "used_bytes": ("used_bytes", "GPU memory in use."),
    "total_bytes": ("total_bytes", "Total GPU memory."),
    "use": ("use", "Share of time in which a kernel ran."),
    "temperature_c": ("temperature_celsius", "Temperature of the GPU."),
    "power_w": ("power_watts", "Power draw of the GPU."),
    "to_gpu_bytes_per_s": ("to_gpu_bytes_per_s", "Bytes per second over PCIe to the GPU."),
    "from_gpu_bytes_per_s": ("from_gpu_bytes_per_s", "Bytes per second over PCIe from the GPU."),
}
_DISK = {
    "free_bytes": ("free_bytes", "Free on the disk of models, or of logs."),
    "total_bytes": ("total_bytes", "Size of that disk."),
    "read_bytes_per_s": ("read_bytes_per_s", "Bytes per second read from it."),
    "write_bytes_per_s": ("write_bytes_per_s", "Bytes per second written to it."),
}
_PROCESS = {"ram_bytes": ("ram_bytes", "RAM of an engine or a job.")}
# A valid sample; any other line, whatever an engine wrote there, would make the whole page unreadable for Prometheus.
_SAMPLE = re.compile(
    rb'([a-zA-Z_:][\w:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*",? ?)*)\})?[ \t]+'
    rb"([+-]?(?i:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|inf|nan)(?:[ \t]+-?\d+)?)\s*"
)
_ABOUT = re.compile(rb"# (HELP|TYPE) ([a-zA-Z_:][\w:]*)(?: (.*))?")
_TAKEN = re.compile(rb'((?:"(?:[^"\\]|\\.)*"|[^"])*?)\b' + LABEL.encode() + rb'="')
_PARTS = (b"_bucket", b"_sum", b"_count")


async def metrics_page(engines: Engines, watching: Watching, jobs: Jobs, since: float) -> bytes:
    """The page in Prometheus' text format; `since` is when the manager began."""
    pages = await _engine_pages(engines)
    own = [] if watching.latest is None else list(machine_families(watching.latest))
    own += _engine_families(engines.snapshots(), pages)
    num_jobs = sum(not job.is_over for job in jobs.list())
    own.append(GaugeMetricFamily(f"{PREFIX}start_time_seconds", "When the manager started.", value=since))
    own.append(GaugeMetricFamily(f"{PREFIX}jobs", "Jobs that run or wait.", value=num_jobs))
    # In a thread: the event loop passes tokens on, and a vLLM page has hundreds of lines.
    merging = asyncio.to_thread(merged, {name: page for name, page in pages.items() if page is not None})
    return generate_latest(_Collected(own)) + await merging


async def _engine_pages(engines: Engines) -> dict[str, bytes | None]:
    """Pages of all ready engines, fetched at once; None for an engine that does not answer in time."""
    urls = {one.name: one.url for one in engines.snapshots() if one.state is State.READY and one.url is not None}
    answers = await asyncio.gather(*(engines.upstream.ask(url, "/metrics", _ENGINE_WAIT_S) for url in urls.values()))
    return {name: answer[1] if answer is not None and answer[0] == 200 else None for name, answer in zip(urls, answers)}


def machine_families(moment: Moment) -> Iterator[Metric]:
    for name, (series, text) in _MACHINE.items():
        if name in moment.values:
            yield GaugeMetricFamily(PREFIX + series, text, value=moment.values[name])
    yield from _gauges("gpu", _GPU, {str(gpu.index): gpu for gpu in moment.sample.gpus})
    yield from _gauges("disk", _DISK, moment.sample.disks)
    yield from _gauges("process", _PROCESS, moment.sample.processes)


def _gauges(kind: str, table: Mapping[str, tuple[str, str]], samples: Mapping[str, object]) -> Iterator[Metric]:
    """One family per field of the samples, with `kind` as the label."""
    for attribute, (series, text) in table.items():
        family = GaugeMetricFamily(f"{PREFIX}{kind}_{series}", text, labels=[kind])
        for name, sample in samples.items():
            if (value := getattr(sample, attribute)) is not None:
                family.add_metric([name], value)
        yield family


def _engine_families(engines: list[Snapshot], pages: Mapping[str, bytes | None]) -> Iterator[Metric]:
    state = GaugeMetricFamily(f"{PREFIX}engine_state", "1 for the current state.", labels=[LABEL, "state"])
    for one in engines:
        for each in State:
            state.add_metric([one.name, str(each)], float(one.state is each))
    yield state
    text = "1 if this page has a ready engine's own series, 0 if the engine answered too late."
    answered = GaugeMetricFamily(f"{PREFIX}engine_answered", text, labels=[LABEL])
    for model, page in pages.items():
        answered.add_metric([model], float(page is not None))
    yield answered
    for name, text in (_TRAFFIC | _WAITING).items():
        kind = CounterMetricFamily if name in _TRAFFIC else GaugeMetricFamily
        family = kind(PREFIX + name, text, labels=[LABEL])
        for one in engines:
            family.add_metric([one.name], getattr(one.traffic, name))
        yield family


class _Collected:
    """Collector of ready-made families, as prometheus_client requires."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


# Engine pages. prometheus_client's parser would take six times as long, while no token passes the gateway.


@dataclass(slots=True)
class _Family:
    help: bytes = b""
    kind: bytes = b""
    lines: list[bytes] = field(default_factory=list)

    def text(self, name: bytes) -> Iterator[bytes]:
        if self.help:
            yield b"# HELP %s %s" % (name, self.help)
        yield b"# TYPE %s %s" % (name, self.kind or b"untyped")
        yield from self.lines


def merged(pages: Mapping[str, bytes]) -> bytes:
    """Pages of several engines as one: every series with its model's name, every family once, sorted by name."""
    families: dict[bytes, _Family] = {}
    for model, page in pages.items():
        _add(families, _label(model), page)
    lines = [line for name in sorted(families) if families[name].lines for line in families[name].text(name)]
    return b"\n".join([*lines, b""])


def _add(families: dict[bytes, _Family], label: bytes, page: bytes) -> None:
    current = b""
    for line in page.splitlines():
        if about := _ABOUT.fullmatch(line):
            what, current, text = about.groups(default=b"")
            family = families.setdefault(current, _Family())
            if what == b"HELP":
                family.help = family.help or text
            elif family.kind not in (b"", text):  # the engines' versions differ
                family.kind = b"untyped"
            else:
                family.kind = text
        elif sample := _SAMPLE.fullmatch(line):
            name, labels, value = sample.groups(default=b"")
            is_part = name != current and name.startswith(current) and name.removeprefix(current) in _PARTS
            family = families.setdefault(current if current and is_part else name, _Family())
            family.lines.append(b"%s{%s} %s" % (name, _with(label, labels), value))


def _label(model: str) -> bytes:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{LABEL}="{escaped}"'.encode()


def _with(label: bytes, labels: bytes) -> bytes:
    if taken := _TAKEN.match(labels):
        # As Prometheus does itself with a scraped label that clashes with its own.
        labels = b'%sexported_%s="%s' % (taken[1], LABEL.encode(), labels[taken.end() :])
    return b"%s,%s" % (label, labels) if labels else label
