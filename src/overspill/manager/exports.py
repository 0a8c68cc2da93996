"""The manager's /metrics: the machine, engines' states, what went through the gateway, and engines' own series."""

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from overspill.manager.application import Application
from overspill.manager.engines.states import State
from overspill.manager.exposition import merged
from overspill.manager.watching.watcher import Moment

PREFIX = "overspill_manager_"
# Prometheus waits 10 s for the whole page, unless it is told otherwise.
_ENGINE_WAIT_S = 2.0
_TRAFFIC = {
    "requests": "Requests that the gateway took.",
    "failed": "Of these, such that failed.",
    "cancelled": "Of these, such that their client cancelled.",
    "prompt_tokens": "Prompt tokens, as answers tell.",
    "completion_tokens": "Answer tokens, as answers tell.",
}
_MACHINE = {
    "ram.total_bytes": ("ram_total_bytes", "RAM of the machine."),
    "ram.available_bytes": ("ram_available_bytes", "RAM that can be taken without swapping."),
    "ram.pinned_bytes": ("ram_pinned_bytes", "RAM that engines pinned for KV."),
    "ram.spilled_bytes": ("ram_spilled_bytes", "RAM for spilled KV."),
    "cpu.use": ("cpu_use", "Share of all cores that is busy."),
}
_GPU = {
    "used_bytes": ("used_bytes", "GPU memory in use."),
    "total_bytes": ("total_bytes", "GPU memory in all."),
    "use": ("use", "Share of time in which a kernel ran."),
    "temperature_c": ("temperature_celsius", "Temperature of the GPU."),
    "power_w": ("power_watts", "Power that the GPU takes."),
    "to_gpu_bytes_per_s": ("to_gpu_bytes_per_s", "Bytes per second over PCIe to the GPU."),
    "from_gpu_bytes_per_s": ("from_gpu_bytes_per_s", "Bytes per second over PCIe from the GPU."),
}
_DISK = {
    "free_bytes": ("free_bytes", "Free on the disk of models, or of logs."),
    "total_bytes": ("total_bytes", "Size of that disk."),
    "read_bytes_per_s": ("read_bytes_per_s", "Bytes per second read from it."),
    "write_bytes_per_s": ("write_bytes_per_s", "Bytes per second written to it."),
}


class _Collector:
    """Made for one answer, from what is known then."""

    def __init__(self, application: Application, pages: Mapping[str, bytes | None]) -> None:
        self._app, self._pages = application, pages

    def collect(self) -> Iterator[Metric]:
        if self._app.watching.latest is not None:
            yield from machine_families(self._app.watching.latest)
        yield from self._engines()

    def _engines(self) -> Iterator[Metric]:
        engines = self._app.engines.snapshots()
        state = GaugeMetricFamily(f"{PREFIX}engine_state", "1 for the state it is in.", labels=["model", "state"])
        for one in engines:
            for each in State:
                state.add_metric([one.name, str(each)], float(one.state is each))
        yield state
        answered = GaugeMetricFamily(
            f"{PREFIX}engine_answered", "1 if a ready engine's own series are here, 0 if it was too slow.",
            labels=["model"],
        )  # fmt: skip
        for model, page in self._pages.items():
            answered.add_metric([model], float(page is not None))
        yield answered
        for name, text in _TRAFFIC.items():
            counter = CounterMetricFamily(f"{PREFIX}{name}", text, labels=["model"])
            for one in engines:
                counter.add_metric([one.name], getattr(one.traffic, name))
            yield counter
        for name, text in (("in_flight", "Requests being answered."), ("waiting", "Requests that wait for a model.")):
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=["model"])
            for one in engines:
                gauge.add_metric([one.name], getattr(one.traffic, name))
            yield gauge
        yield GaugeMetricFamily(f"{PREFIX}start_time_seconds", "When the manager began.", value=self._app.since)
        jobs = sum(not job.is_over for job in self._app.jobs.list())
        yield GaugeMetricFamily(f"{PREFIX}jobs", "Jobs that run or wait.", value=jobs)


def machine_families(moment: Moment) -> Iterator[Metric]:
    for name, (series, text) in _MACHINE.items():
        if name in moment.values:
            yield GaugeMetricFamily(PREFIX + series, text, value=moment.values[name])
    yield from _gauges("gpu", _GPU, {str(gpu.index): gpu for gpu in moment.sample.gpus})
    yield from _gauges("disk", _DISK, moment.sample.disks)
    family = GaugeMetricFamily(f"{PREFIX}process_ram_bytes", "RAM of an engine or a job.", labels=["process"])
    for name, process in moment.sample.processes.items():
        family.add_metric([name], process.ram_bytes)
    yield family


def _gauges(kind: str, table: Mapping[str, tuple[str, str]], samples: Mapping[str, object]) -> Iterator[Metric]:
    """A family for each field of the samples, which are told apart by a label of this kind."""
    for field, (series, text) in table.items():
        family = GaugeMetricFamily(f"{PREFIX}{kind}_{series}", text, labels=[kind])
        for name, sample in samples.items():
            if (value := getattr(sample, field)) is not None:
                family.add_metric([name], value)
        yield family


async def metrics_page(application: Application) -> bytes:
    pages = await _engines_pages(application)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(application, pages))
    own = generate_latest(registry)
    # Beside the event loop, in which tokens pass: a page of vLLM's has hundreds of lines.
    return own + await asyncio.to_thread(merged, {name: page for name, page in pages.items() if page is not None})


async def _engines_pages(application: Application) -> dict[str, bytes | None]:
    """Of engines that are ready, all asked at once; None is one that does not answer in time."""
    engines = application.engines
    urls = {one.name: one.url for one in engines.snapshots() if one.state is State.READY and one.url is not None}
    answers = await asyncio.gather(*(engines.upstream.get(url, "/metrics", _ENGINE_WAIT_S) for url in urls.values()))
    return {name: answer[1] if answer is not None and answer[0] == 200 else None for name, answer in zip(urls, answers)}
