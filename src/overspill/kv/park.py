"""Park and wake in the engine core: the order in which requests, KV and weights leave the GPU and come back.

A parked engine keeps its process, its graphs and everything in RAM, and computes nothing. Every step before GPU memory
is released can be undone; a failure after that either restores all memory or ends the engine.
"""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from vllm.logger import init_logger

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.kv.vllm_api import (
    add_engine_method,
    call_workers,
    connectors_of,
    end_engine,
    freeze_engine,
    has_steps_to_run,
    is_paused,
    pause,
    release_waiting,
    resume,
    run_step,
    thaw_engine,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# Storing a whole GPU's KV over a slow link takes seconds; copies that take longer than this are stuck.
_MOST_SECONDS_TO_SETTLE = 120.0


class ParkState(StrEnum):
    RUNNING = "running"
    PARKED = "parked"
    FAILED = "failed"


class Parking:
    """Parks and wakes one engine core."""

    def __init__(self, core: Any) -> None:
        self._core = core
        (self._connector,) = connectors_of(core, "weights_version")
        self.state = ParkState.RUNNING
        self._figures: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        """The state, with the seconds and bytes of the last park or wake."""
        return {"state": str(self.state), **self._figures}

    def park(self) -> dict[str, Any]:
        if self.state is not ParkState.RUNNING:
            self._require(ParkState.PARKED)
            return self.describe()
        core, began = self._core, time.monotonic()
        if is_paused(core):
            raise OverspillError("this engine is paused, and cannot be parked before it is resumed")
        pause(core)
        try:
            self._settle()
            self._connector.store_all()
            self._settle()
            release_waiting(core.scheduler)
            with self._connector.parking():
                core.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
        except BaseException:
            if self.state is ParkState.RUNNING:
                resume(core)
            raise
        stored = time.monotonic()
        self._give_back(began, stored)
        return self.describe()

    def _settle(self) -> None:
        """Run the engine until no steps or copies are in flight."""
        deadline = time.monotonic() + _MOST_SECONDS_TO_SETTLE
        while has_steps_to_run(self._core):
            if time.monotonic() > deadline:
                raise OverspillError(
                    f"copies of KV were still in flight after {_MOST_SECONDS_TO_SETTLE:.0f} s: the engine keeps "
                    "running, and is not parked"
                )
            try:
                run_step(self._core)
            except BaseException as error:
                # vLLM's own loop would end the engine, too: the step's requests would wait for its tokens for ever.
                self._fail(f"a step failed before parking: {error}")
                raise

    def _give_back(self, began: float, stored: float) -> None:
        core = self._core
        try:
            ranks = call_workers(core, "overspill_park", self._connector.weights_version)
        except BaseException as error:
            self._undo(error)
            raise
        freeze_engine(core)
        self.state = ParkState.PARKED
        now = time.monotonic()
        self._figures = {
            "seconds": now - began, "store_seconds": stored - began, **_together(ranks)
        }  # fmt: skip
        logger.info(
            "Overspill: parked in %.2f s, %.2f s of it for KV; %s of weights are in RAM, %s of GPU memory is free for "
            "others",
            now - began, stored - began, format_size(self._figures["weights_bytes"]),
            format_size(self._figures["freed_bytes"]),
        )  # fmt: skip

    def _undo(self, error: BaseException) -> None:
        """Restore memory on all ranks, as some may have released theirs; if that fails, end the engine."""
        try:
            call_workers(self._core, "overspill_wake")
        except BaseException as second:
            self._fail(f"parking failed ({error}), and so did waking ({second})")
        else:
            resume(self._core)

    def wake(self) -> dict[str, Any]:
        if self.state is not ParkState.PARKED:
            self._require(ParkState.RUNNING)
            return self.describe()
        core, began = self._core, time.monotonic()
        thaw_engine(core)
        try:
            ranks = call_workers(core, "overspill_wake")
        except BaseException as error:
            self._stay_parked(error)
            raise
        self.state = ParkState.RUNNING
        resume(core)
        seconds = time.monotonic() - began
        self._figures = {"seconds": seconds, **_together(ranks)}
        logger.info("Overspill: awake after %.2f s", seconds)
        return self.describe()

    def _stay_parked(self, error: BaseException) -> None:
        """Park again after a failed wake, mostly for lack of GPU memory: ranks that restored theirs release it."""
        try:
            call_workers(self._core, "overspill_park", self._connector.weights_version)
        except BaseException as second:
            self._fail(f"waking failed ({error}), and so did parking again ({second})")
        else:
            freeze_engine(self._core)
            logger.warning("Overspill: the engine stays parked: %s", error)

    def _require(self, state: ParkState) -> None:
        if self.state is not state:
            raise OverspillError(f"this engine is {self.state}, and must be restarted")

    def _fail(self, reason: str) -> None:
        """End the engine: a step was lost, or parts of the model have no memory, so nothing may run until a restart."""
        self.state = ParkState.FAILED
        logger.error("Overspill: the engine ends: %s", reason)
        end_engine(self._core, OverspillError(f"the engine ends: {reason}"))


def _together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum of all ranks' bytes, and the slowest rank's seconds, since ranks work in parallel."""
    return {
        name: (max if name.endswith("seconds") else sum)(rank[name] for rank in ranks) for name in (ranks or [{}])[0]
    }


def add_parking() -> None:
    """Let front ends call park, wake and state on the engine core."""

    def method(change: Callable[[Parking], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
        def called(core: Any) -> dict[str, Any]:
            if not hasattr(core, "overspill_parking"):
                core.overspill_parking = Parking(core)
            return change(core.overspill_parking)

        return called

    add_engine_method("overspill_park", method(Parking.park))
    add_engine_method("overspill_wake", method(Parking.wake))
    add_engine_method("overspill_state", method(Parking.describe))
