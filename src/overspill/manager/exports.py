"""The manager's own /metrics: the machine, engines' states and what went through the gateway, in Prometheus' form."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from overspill.manager.application import Application
from overspill.manager.engines.states import State

PREFIX = "overspill_manager_"
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
    "used_bytes": "GPU memory in use.",
    "total_bytes": "GPU memory in all.",
    "use": "Share of time in which a kernel ran.",
    "to_gpu_bytes_per_s": "Bytes per second over PCIe to the GPU.",
    "from_gpu_bytes_per_s": "Bytes per second over PCIe from the GPU.",
}


class _Collector:
    """Made for one answer, from what is known then."""

    def __init__(self, application: Application) -> None:
        self._app = application

    def collect(self) -> Iterator[Metric]:
        yield from self._machine()
        yield from self._engines()

    def _machine(self) -> Iterator[Metric]:
        moment = self._app.watching.latest
        if moment is None:
            return
        for name, (series, text) in _MACHINE.items():
            if name in moment.values:
                yield GaugeMetricFamily(PREFIX + series, text, value=moment.values[name])
        for name, text in _GPU.items():
            family = GaugeMetricFamily(f"{PREFIX}gpu_{name}", text, labels=["gpu"])
            for gpu in moment.sample.gpus:
                if (value := getattr(gpu, name)) is not None:
                    family.add_metric([str(gpu.index)], value)
            yield family
        family = GaugeMetricFamily(f"{PREFIX}process_ram_bytes", "RAM of an engine or a job.", labels=["process"])
        for name, process in moment.sample.processes.items():
            family.add_metric([name], process.ram_bytes)
        yield family

    def _engines(self) -> Iterator[Metric]:
        engines = self._app.engines.snapshots()
        state = GaugeMetricFamily(f"{PREFIX}engine_state", "1 for the state it is in.", labels=["model", "state"])
        for one in engines:
            for each in State:
                state.add_metric([one.name, str(each)], float(one.state is each))
        yield state
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


def metrics_page(application: Application) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(application))
    return generate_latest(registry)
