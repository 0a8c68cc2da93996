"""Watchdog of steps that wait for flags: it ends the engine when something that they wait for was lost."""

import faulthandler
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import _exit as end_process

import torch
from vllm.logger import init_logger

from overspill.kv.attention.pool import Pool
from overspill.kv.spill.streams import Event

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# A step waits for something lost, a copy or an attention thread, if it takes longer than this from when the GPU gets to
# it, plus the time for its bytes at a quarter of the slowest link's speed.
_STALL_S, _SLOWEST_BYTES_PER_S = 5.0, 2e9
_POLL_S = 1.0


@dataclass(slots=True)
class Watched:
    """A step that the watchdog knows."""

    begun: Event
    seconds: float
    over: Mapping[str, Event] = field(default_factory=dict)  # ends of its parts; none until all of it is queued
    deadline: float | None = None  # from when the step was seen to have begun

    def is_over(self) -> bool:
        return bool(self.over) and not self.running()

    def running(self) -> list[str]:
        return [part for part, event in self.over.items() if not event.query()]


class Watchdog:
    """Ends the engine's process when a graph and its copies wait for each other: the GPU, and with it every request,
    would hang for ever."""

    def __init__(self, device: torch.device | None = None, threads: Pool | None = None) -> None:
        self._device = device
        self._threads = threads  # attention threads, for the message
        self._lock = threading.Lock()
        self._steps: deque[Watched] = deque()
        self._thread: threading.Thread | None = None

    def watch(self, begun: Event, num_bytes: int) -> Watched:
        """Watch a step of `num_bytes` of KV. `begun` completes when all earlier work has, which may be a long
        prompt's."""
        with self._lock:
            self._forget()
            self._steps.append(Watched(begun, _STALL_S + num_bytes / _SLOWEST_BYTES_PER_S))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="overspill-watchdog", daemon=True)
                self._thread.start()
            return self._steps[-1]

    def _forget(self) -> None:
        while self._steps and self._steps[0].is_over():
            self._steps.popleft()

    def _stalled(self) -> Watched | None:
        with self._lock:
            self._forget()
            if not self._steps:
                return None
            step = self._steps[0]
            if step.deadline is None and step.begun.query():
                step.deadline = time.monotonic() + step.seconds
            return step if step.deadline is not None and time.monotonic() >= step.deadline else None

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread is on the first GPU, and would create a context there
        while (step := self._stalled()) is None:
            time.sleep(_POLL_S)
        parts = f"still running: {', '.join(step.running())}" if step.over else "not queued as a whole"
        threads = f" Attention on the CPU: {self._threads.progress()}." if self._threads is not None else ""
        self.end(
            f"Overspill: a step with spilled KV has waited for more than {_STALL_S:.0f} s ({parts}): a copy or a CPU "
            f"thread was lost, and the engine exits.{threads}"
        )

    def end(self, reason: str) -> None:
        logger.error("%s", reason)
        try:
            faulthandler.dump_traceback()
        finally:
            # The model's thread waits inside the driver, where no exception reaches it.
            end_process(1)
