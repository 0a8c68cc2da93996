"""Far attention: the CPU attends to a part of the spilled blocks, which stay in RAM.

In a decode step a request leaves a stretch of its block table to the CPU (`SpillStep.far`). vLLM's attention backend
gets tables and lengths without the stretch, the CPU attends to it in the arena, and both results are merged by their
log-sum-exps. Keys are stored rotated, and all queries of a decode step come after the stretch, so no mask changes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from overspill.kv.attention.pool import Job, Layout, Pool, Segments
from overspill.kv.host_memory import HostMemory
from overspill.kv.jobs import Lateness, Sample
from overspill.kv.sizes import MiB
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.steps import SpillStep
from overspill.kv.spill.window import Layer
from overspill.kv.vllm_api import get_kv_transfer_group, has_kv_transfer_group

Ids = npt.NDArray[Any]
_MEASURED_BYTES = 256 * MiB

Part = tuple[Ids, list[int]]  # blocks, and the query tokens that attend to them


def shared_parts(parts: Sequence[Part]) -> list[Part]:
    """Parts in which blocks that several requests start with appear once, so that they are read once."""
    found: list[Part] = []
    for _, group in groupby(sorted(parts, key=_first_block), key=_first_block):
        alike = list(group)
        length = min(len(blocks) for blocks, _ in alike)
        columns = np.stack([blocks[:length] for blocks, _ in alike])
        differing = np.flatnonzero((columns != columns[0]).any(axis=0))
        length = int(differing[0]) if len(differing) else length
        found.append((alike[0][0][:length], sorted(query for _, queries in alike for query in queries)))
        found += shared_parts([(blocks[length:], queries) for blocks, queries in alike if len(blocks) > length])
    return found


def _first_block(part: Part) -> int:
    return int(part[0][0])


@dataclass(frozen=True, slots=True)
class Rows:
    """Stretches left to the CPU, by row of the batch; a row without a stretch has a count of zero."""

    first: Ids
    count: Ids
    parts: list[Part]

    def shortened(self, tables: torch.Tensor, lengths: torch.Tensor, block_size: int) -> tuple[Any, Any]:
        """Block tables and sequence lengths without the stretches."""
        columns = torch.from_numpy(np.stack([self.first, self.count]))
        if tables.is_cuda:
            columns = columns.pin_memory()  # a copy from pageable memory would wait for all earlier steps
        first, count = columns.to(tables.device, non_blocking=True)[:, :, None]
        places = torch.arange(tables.shape[1], device=tables.device)[None]
        index = torch.where(places >= first, places + count, places).clamp_(max=tables.shape[1] - 1)
        rows = len(self.count)
        shorter_tables, shorter_lengths = tables.clone(), lengths.clone()
        shorter_tables[:rows] = tables[:rows].gather(1, index)
        shorter_lengths[:rows] -= (count[:, 0] * block_size).to(lengths.dtype)
        return shorter_tables, shorter_lengths


def attends_plainly(impl: Any) -> bool:
    """Whether a layer's backend can merge the CPU's part (vLLM may have chosen another backend), and computes the same
    as the CPU's kernel: a plain softmax over all tokens before a query."""
    return (
        getattr(impl, "overspill_merges", False)
        and not impl.logits_soft_cap
        and impl.alibi_slopes is None
        and impl.sinks is None
        and impl.sliding_window in (None, -1, (-1, -1))
        and impl.kv_sharing_target_layer_name is None
    )


def layout_of(module: Any, spec: Any, geometry: Geometry) -> Layout:
    """Layout of a layer's spilled blocks, as the GPU's backends write them: [token][head][K | V]."""
    fp8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    return Layout.packed(
        num_blocks=geometry.num_spilled, block_size=spec.block_size, kv_heads=spec.num_kv_heads,
        group=module.num_heads // module.num_kv_heads, head_size=spec.head_size,
        kv_type=fp8.get(module.impl.kv_cache_dtype, type_name(spec.dtype)), query_type=type_name(module.dtype),
    )  # fmt: skip


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FarAttention:
    """A rank's attention threads, and the stretches of the current step."""

    def __init__(self, layers: Sequence[Layer], geometry: Geometry, arena: HostMemory, pool: Pool) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._geometry, self._arena = geometry, arena
        self.pool = pool
        self.speed = Sample()
        self.lateness = Lateness()
        self.num_bytes = 0  # KV attended to in steps since the last report
        self._step: SpillStep | None = None
        self._order: Callable[[], Sequence[str]] = list
        self.rows: dict[int, Rows] = {}  # of the current step, by group

    @contextmanager
    def step(self, step: SpillStep | None, order: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Context of a step's forward. `order` returns the requests of its batch, row by row."""
        self._step, self._order = step, order
        self.rows.clear()
        try:
            yield
        finally:
            self._step = None

    def is_active(self) -> bool:
        return self._step is not None and bool(self._step.far)

    def shares_pieces(self) -> bool:
        """Whether a step that runs outside FULL graphs leaves its stretches in RAM."""
        return self.is_active()

    def rows_of(self, layer_name: str) -> Rows:
        return self.rows[self._layers[layer_name].group]

    def split(self, layer_name: str, common: Any, block_size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Block tables and sequence lengths for the backend, or None unless the layer's group leaves blocks to the CPU.
        `common` is vLLM's CommonAttentionMetadata, as passed to metadata builders."""
        rows = self._find_rows(layer_name, common.query_start_loc_cpu.tolist())
        return rows.shortened(common.block_table_tensor, common.seq_lens, block_size) if rows is not None else None

    def _find_rows(self, layer_name: str, query_starts: Sequence[int]) -> Rows | None:
        """Find the group's rows, and remember them in `rows`; the query tokens of row n start at `query_starts[n]`."""
        layer = self._layers.get(layer_name)
        if self._step is None or layer is None or not (stretches := self._step.far.get(layer.group)):
            return None
        order = self._order()
        first, count = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
        parts: list[Part] = []
        for row, request_id in enumerate(order):
            if (stretch := stretches.get(request_id)) is not None:
                first[row], count[row] = stretch.first, len(stretch.blocks)
                parts.append((stretch.blocks, list(range(query_starts[row], query_starts[row + 1]))))
        rows = self.rows[layer.group] = Rows(first, count, shared_parts(parts))
        return rows

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, rows: Rows, layout: Layout, scale: float
    ) -> tuple[Any, Any]:
        """Run a layer's attention now, and wait; return outputs [query, head, size] and log-sum-exps [head, query]."""
        began = time.perf_counter()
        output = torch.empty(query.shape, dtype=torch.float32)
        lse = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32)
        job = Job(
            layout=layout, segments=Segments(rows.parts), kv=kv.data_ptr(), query=query.data_ptr(),
            output=output.data_ptr(), lse=lse.data_ptr(), num_queries=len(query), scale=scale,
        )  # fmt: skip
        self.pool.attend(job)
        num_blocks = sum(len(blocks) for blocks, _ in rows.parts)
        self._add(num_blocks * self._geometry.page_bytes, time.perf_counter() - began)
        return output, lse

    def _add(self, num_bytes: int, seconds: float) -> None:
        self.speed.add(num_bytes, seconds)
        self.num_bytes += num_bytes

    def spilled_blocks(self, layer_name: str, kv_cache: torch.Tensor) -> torch.Tensor:
        """The layer's part of the arena, in the shape of its KV cache."""
        region = torch.from_numpy(self._arena.slots[self._layers[layer_name].region])
        return region.view(kv_cache.dtype).view(self._geometry.num_spilled, *kv_cache.shape[1:])

    def measure(self, layout: Layout) -> None:
        """Measure the speed by attending to spilled blocks, whatever they contain."""
        num_blocks = min(self._geometry.num_spilled, max(1, _MEASURED_BYTES // self._geometry.page_bytes))
        query = torch.zeros(
            1, layout.kv_heads * layout.group, layout.head_size, dtype=getattr(torch, layout.query_type)
        )
        rows = Rows(np.zeros(1, np.int64), np.full(1, num_blocks), [(np.arange(num_blocks), [0])])
        kv = torch.from_numpy(self._arena.slots[0])
        for _ in range(2):  # the first wakes the threads and faults pages in
            self.speed = Sample()
            self.attend(query, kv, rows, layout, 1.0)
        self.num_bytes = 0

    def close(self) -> None:
        self.pool.close()


def far_attention() -> FarAttention | None:
    """This process's far attention; None in an engine without Overspill, or before its connector exists."""
    spill = getattr(get_kv_transfer_group(), "spill_worker", None) if has_kv_transfer_group() else None
    return getattr(spill, "far", None)


class SplitBuilder:
    """Mixin placed before a backend's metadata builder: removes the CPU's blocks from the metadata."""

    layer_names: list[str]
    kv_cache_spec: Any

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        far, common = far_attention(), common_attn_metadata
        split = far.split(self.layer_names[0], common, self.kv_cache_spec.block_size) if far is not None else None
        if split is not None:
            common = replace(common, block_table_tensor=split[0], seq_lens=split[1])
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        metadata.overspill_split = split is not None
        return metadata
