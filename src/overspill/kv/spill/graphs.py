"""Decode steps with spilled KV inside FULL CUDA graphs.

vLLM's own FULL graphs know nothing of spill: replayed, they would read whatever the window holds. A second set is
captured here for small batches of decodes, with layers that wait for flags (see overspill.kv.spill.program). A step's
copies are queued beside its replay; steps without spilled KV keep vLLM's graphs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from overspill.kv.cuda import FlagOperation, FlagQueue, StreamFlags, queueing
from overspill.kv.errors import OverspillError
from overspill.kv.spill.program import (
    Flag,
    Kind,
    Operation,
    Raise,
    Save,
    Wait,
    after_attention,
    before_attention,
    before_writes,
    step_operations,
)
from overspill.kv.spill.steps import SpillStep
from overspill.kv.spill.streams import CudaStreams
from overspill.kv.spill.watchdog import Watchdog, Watched
from overspill.kv.spill.window import Window
from overspill.kv.vllm_api import capture_decode_graphs, is_full, with_graphs

if TYPE_CHECKING:
    from overspill.kv.spill.far_cuda import CudaFarAttention


# A stream that waits takes 1,020 operations, or copies in batches of 512 up to 24,064 (an H200); then the driver keeps
# the caller waiting. An operation counts as so many copies.
_MOST_COPIES_AHEAD, _COPIES_OF_ONE_OPERATION = 8192, 32


class SpilledGraphs:
    """Graph manager for steps with spilled KV: dispatches to its own FULL graphs, or to vLLM's piecewise ones."""

    def __init__(
        self, window: Window, streams: CudaStreams, most_tokens: int, far: "CudaFarAttention | None" = None
    ) -> None:
        self._window, self._streams, self._most_tokens = window, streams, most_tokens
        self._names = [access.layer.name for access in window.accesses]
        self._flags = StreamFlags(torch.zeros(len(Kind) * len(self._names), dtype=torch.int32, device=streams.device))
        self._queue_flags = FlagQueue()
        self._watchdog = Watchdog(streams.device, far.pool if far is not None else None)
        self._watched: Watched | None = None
        self._copies: Iterator[None] = iter(())  # queues the step's copies; asked once, before its graph is replayed
        self._plain: Any = None
        self._full: Any = None
        self._shared: Any = None  # graphs with a part of the attention on the CPU
        self._far = far
        self._captured_layers = 0
        self.is_capturing = False
        # State of the current step, or of the set of graphs being captured.
        self.is_chosen = False
        self.shares_attention = False

    # Capture.

    def capture(self, runner: Any) -> None:
        def model(**inputs: Any) -> Any:
            self.begin_model()
            output = runner.model(**inputs)
            if self._is_recorded() and self._captured_layers != len(self._names):
                raise OverspillError(
                    f"a graph has {self._captured_layers} of the {len(self._names)} layers with spilled KV"
                )
            return output

        self._plain = runner.cudagraph_manager
        self.is_capturing = True
        try:
            self._full = capture_decode_graphs(runner, model, self._most_tokens)
            if self._far is not None:
                self._far.graphs, self.shares_attention = self, True
                self._shared = capture_decode_graphs(runner, model, self._most_tokens)
        finally:
            self.is_capturing = self.shares_attention = False

    def begin_model(self) -> None:
        self._captured_layers = 0
        self._capture(self._flags_of(before_writes(0, len(self._names))))

    def before_layer(self, name: str) -> None:
        if name in self._names and not self._is_shared(name):
            self.begin_attention(name)

    def begin_attention(self, name: str, before: Sequence[FlagOperation] = ()) -> None:
        """Capture the layer's wait for the window, preceded by the flag operations in `before`."""
        if self._is_recorded() and name != self._names[self._captured_layers]:
            raise OverspillError(f"{name} runs where {self._names[self._captured_layers]} was expected")
        self._capture([*before, *self._flags_of(before_attention(self._captured_layers))])

    def end_attention(self, after: Sequence[FlagOperation]) -> None:
        """Capture that the layer has read the window, the flag operations in `after`, and the next layer's wait until
        it may write: one node of the graph, since each costs as much as a kernel."""
        index, following = self._captured_layers, before_writes(self._captured_layers + 1, len(self._names))
        self._capture([*self._flags_of(after_attention(index)), *after, *self._flags_of(following)])
        self._captured_layers += self._is_recorded()

    def after_layer(self, name: str) -> None:
        if name in self._names and not self._is_shared(name):
            self.end_attention([])

    def _is_shared(self, name: str) -> bool:
        """Whether the layer itself hands its query to the CPU before it waits for the window."""
        return self.shares_attention and self._far is not None and self._far.handles(name)

    def _is_recorded(self) -> bool:
        """Whether the model is being recorded; before that, vLLM runs it once to warm up."""
        return torch.cuda.is_current_stream_capturing()

    def _capture(self, operations: Sequence[FlagOperation]) -> None:
        if self._is_recorded():
            self._queue_flags(operations, torch.cuda.current_stream())

    # Steps.

    @contextmanager
    def step(self, runner: Any) -> Iterator[None]:
        """Context of a step with spilled KV, whose batch is dispatched to these graphs."""
        try:
            with queueing, with_graphs(runner, self):
                yield
        finally:
            # Steps without spilled KV are dispatched by vLLM's manager, and must not share their attention.
            self.is_chosen = self.shares_attention = False

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> Any:
        self.shares_attention = self._far is not None and self._far.is_active()
        graphs = self._shared if self.shares_attention else self._full
        chosen = graphs.dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches
        )
        self.is_chosen = is_full(chosen)
        if self.is_chosen:
            self._num_tokens = chosen.num_tokens
            return chosen
        self.shares_attention = False
        # Without these two arguments no batch counts as decodes, and FULL graphs are for decodes only (see the plugin).
        return self._plain.dispatch(num_reqs, num_tokens, None, num_active_loras, None, num_ubatches)

    def run_fullgraph(self, chosen: Any) -> Any:
        output = (self._shared if self.shares_attention else self._full).run_fullgraph(chosen)
        self.end()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def begin(self, step: SpillStep) -> None:
        """Queue the step's copies, as many as the stream takes for certain; its graph is replayed next."""
        self._watched = self._watchdog.watch(self._streams.compute_event(), step.num_bytes)
        if self.shares_attention:
            assert self._far is not None
            self._far.submit(self._num_tokens)
        self._window.begin_graphed()
        self._copies = self._queue(step)
        next(self._copies, None)

    def end(self) -> None:
        """Queue what is left of the step's copies, now that its graph was replayed."""
        for _ in self._copies:
            pass
        self._window.end_graphed()
        assert self._watched is not None
        self._watched.over = {"copies": self._streams.fill_event(), "graph": self._streams.compute_event()}

    def _queue(self, step: SpillStep) -> Iterator[None]:
        """Queue the step's copies and flags; yields before it queues what the caller might have to wait for."""
        flags: list[FlagOperation] = []
        is_first, num_ahead = True, 0
        for operation in step_operations(self._window.accesses, step, with_far=not self.shares_attention):
            if isinstance(operation, Wait | Raise):
                flags += self._flag_operations(operation)
                continue
            num_ahead += max(len(operation.runs), _COPIES_OF_ONE_OPERATION)
            if num_ahead > _MOST_COPIES_AHEAD:
                yield
            self._queue_flags(flags, self._streams.inbound)
            flags = []
            if isinstance(operation, Save):
                self._streams.save_behind_fills(operation.region, operation.runs)
                continue
            with self._window.timed(operation.runs) if is_first else nullcontext():
                self._streams.fill(operation.region, operation.runs)
            is_first = False
        self._queue_flags(flags, self._streams.inbound)

    def _flags_of(self, operations: Sequence[Operation]) -> list[FlagOperation]:
        return [one for operation in operations for one in self._flag_operations(operation)]

    def _flag_operations(self, operation: Operation) -> list[FlagOperation]:
        match operation:
            case Wait(flag):
                return self._flags.taken(self._index(flag))
            case Raise(flags):
                return [one for flag in flags for one in self._flags.raised(self._index(flag))]
        raise AssertionError(f"a graph cannot copy: {operation}")

    def _index(self, flag: Flag) -> int:
        return flag.kind.value * len(self._names) + flag.access
