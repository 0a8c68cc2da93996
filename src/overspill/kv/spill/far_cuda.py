"""Far attention on CUDA: the CPU attends beside FlashAttention, inside FULL CUDA graphs.

A layer copies its query into pinned memory and raises a flag there. While the GPU waits for the window and attends to
its part, the CPU attends to its own blocks, writes the result beside the query and raises a second flag. A third flag
marks when the GPU starts to wait for the result, which shows which side was late. All of this is captured once: the
division of blocks is in memory that each step fills before the replay.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

from overspill.kv.attention.pool import Attended, Job, Layout, Pool, Segments, Step
from overspill.kv.cuda import StreamFlags
from overspill.kv.host_memory import HostMemory
from overspill.kv.spill.far import FarAttention, SplitBuilder, far_attention
from overspill.kv.spill.geometry import Geometry
from overspill.kv.spill.window import Layer

if TYPE_CHECKING:
    from overspill.kv.spill.graphs import SpilledGraphs

# Steps that vLLM may have queued behind the one that ends next.
_STEPS_IN_FLIGHT = 3
_LATE_S = 10.0


def scales_of(module: Any) -> tuple[float, float, float]:
    """Scales of a layer's softmax, keys and values; a quantised query's scale is folded into the softmax's."""
    scale = module.impl.scale * (module._q_scale_float if module.query_quant is not None else 1.0)
    return scale, module._k_scale_float, module._v_scale_float


class SharedTensor:
    """Pinned memory with a CPU view and a GPU view."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._bytes = UvaBuffer((math.prod(shape) * dtype.itemsize,), torch.uint8)  # NumPy has no bf16
        self.cpu = self._bytes.cpu.view(dtype).view(*shape)
        self.gpu = self._bytes.uva().view(dtype).view(*shape)


class CudaFarAttention(FarAttention):
    """Hands queries to the CPU and takes back the results, inside CUDA graphs."""

    def __init__(
        self,
        layers: Sequence[Layer],
        geometry: Geometry,
        arena: HostMemory,
        pool: Pool,
        layout: Layout,
        scales: Sequence[tuple[float, float, float]],
        num_tokens: int,
    ) -> None:
        """`scales` holds `scales_of` each layer; `num_tokens` is the most tokens that a graph has."""
        super().__init__(layers, geometry, arena, pool)
        self._index = {layer.name: index for index, layer in enumerate(layers)}
        self._groups: dict[int, list[int]] = {}
        for index, layer in enumerate(layers):
            self._groups.setdefault(layer.group, []).append(index)
        heads = layout.kv_heads * layout.group
        shape = len(layers), num_tokens, heads, layout.head_size
        self._queries = SharedTensor(shape, getattr(torch, layout.query_type))
        self._outputs = SharedTensor(shape, torch.float32)
        self._lses = SharedTensor((len(layers), num_tokens * heads), torch.float32)
        # Three flags per layer, each in a cache line of its own: query ready, result due, result done.
        self._flags_memory = SharedTensor((3 * len(layers), 16), torch.int32)
        self._flags = StreamFlags(self._flags_memory.cpu)
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._submitted: deque[int] = deque()
        self._attended = Attended()
        self.graphs: SpilledGraphs | None = None  # the graphs that capture these layers
        self._jobs = Step(
            [
                Job(
                    layout=layout, segments=Segments([]), kv=arena.address + layer.region * arena.slot_stride,
                    query=self._queries.cpu[index].data_ptr(), output=self._outputs.cpu[index].data_ptr(),
                    lse=self._lses.cpu[index].data_ptr(), num_queries=0, scale=scale, key_scale=key_scale,
                    value_scale=value_scale, ready=self._flags.address(3 * index),
                    due=self._flags.address(3 * index + 1), done=self._flags.address(3 * index + 2),
                )
                for index, (layer, (scale, key_scale, value_scale)) in enumerate(zip(layers, scales, strict=True))
            ]
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return self._queries.cpu.shape[1]

    def handles(self, layer_name: str) -> bool:
        return layer_name in self._index

    def shares_pieces(self) -> bool:
        return False

    # Capture.

    def split(self, layer_name: str, common: Any, block_size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Tables and lengths, in the memory that graphs captured; graphs are captured with whole tables."""
        if self.graphs is None or not self.graphs.shares_attention or layer_name not in self._index:
            return None
        group, num_rows = self._layers[layer_name].group, common.seq_lens.shape[0]
        if group not in self._tables:
            width = common.block_table_tensor.shape[1]
            self._tables[group] = (
                common.block_table_tensor.new_zeros(self.num_tokens, width),
                common.seq_lens.new_zeros(self.num_tokens),
            )
        tables, lengths = (memory[:num_rows] for memory in self._tables[group])
        shorter = super().split(layer_name, common, block_size)
        whole = common.block_table_tensor, common.seq_lens
        for memory, content in zip((tables, lengths), shorter or whole, strict=True):
            memory.copy_(content[:num_rows])
        return tables, lengths

    @contextmanager
    def hand_over(self, layer_name: str, query: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Context of a layer's own attention; yields the memory that holds the CPU's result once the context ends."""
        assert self.graphs is not None
        index, num_tokens = self._index[layer_name], len(query)
        ready, due, done = range(3 * index, 3 * index + 3)
        hand(self._queries.gpu[index, :num_tokens], query)
        self.graphs.begin_attention(layer_name, before=self._flags.raised(ready))
        heads = query.shape[1]
        yield self._outputs.gpu[index, :num_tokens], self._lses.gpu[index, : num_tokens * heads]
        flags = self._flags
        self.graphs.end_attention(after=[*flags.raised(due), *flags.taken(done), *flags.lowered(due)])

    def measure(self, layout: Layout) -> None:
        super().measure(layout)
        self._attended = self.pool.attended

    # Steps.

    def submit(self, num_tokens: int) -> None:
        """Let the threads wait for the queries of the step that is replayed next, in a graph of `num_tokens` tokens."""
        segments = {group: Segments(self.rows[group].parts if group in self.rows else []) for group in self._groups}
        for group, layers in self._groups.items():
            self._jobs.attend_to(segments[group], num_tokens, layers)
        self._submitted.append(self.pool.submit(self._jobs))
        # Count what earlier steps have completed so far.
        before, self._attended = self._attended, self.pool.attended
        latest = self._attended.since(before)
        self._add(latest.num_bytes, latest.seconds)
        self.lateness.add(latest.jobs, latest.late)
        while len(self._submitted) > _STEPS_IN_FLIGHT:
            self.pool.wait(self._submitted.popleft(), _LATE_S)


class SplitMetadataBuilder(SplitBuilder, FlashAttentionMetadataBuilder):
    pass


class SplitFlashAttention(FlashAttentionImpl):
    overspill_merges = True

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        far = far_attention()
        if not getattr(attn_metadata, "overspill_split", False):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        assert isinstance(far, CudaFarAttention)
        num_tokens = attn_metadata.num_actual_tokens
        with far.hand_over(layer.layer_name, query[:num_tokens]) as (partial, partial_lse):
            near, near_lse = self._attend(layer, query[:num_tokens], kv_cache, attn_metadata)
        merge(output[:num_tokens], near, near_lse, partial, partial_lse)
        return output

    def _attend(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FlashAttentionImpl.forward for a decoder's layer, but also returning the log-sum-exps [head, query]."""
        keys, values = (
            canonicalize_singleton_dim_strides(part) for part in kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        )
        if query.dtype.itemsize == 1:
            keys, values = keys.view(query.dtype), values.view(query.dtype)
        starts = metadata.query_start_loc
        scales = starts.shape[0] - 1, self.num_kv_heads
        near = torch.empty(query.shape, dtype=layer.dtype, device=query.device)
        _, lse = flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=near,
            cu_seqlens_q=starts,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=metadata.causal,
            window_size=list(self.sliding_window),
            block_table=metadata.block_table,
            return_softmax_lse=True,
            scheduler_metadata=metadata.scheduler_metadata,
            fa_version=self.vllm_flash_attn_version,
            q_descale=layer._q_scale.expand(scales) if self.supports_quant_query_input else None,
            k_descale=layer._k_scale.expand(scales),
            v_descale=layer._v_scale.expand(scales),
            num_splits=metadata.max_num_splits,
        )
        return near, lse


@triton.jit  # type: ignore[untyped-decorator]
def _hand(target, query, token_stride, head_stride, SIZE: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, PADDED)
    value = tl.load(query + token * token_stride + head * head_stride + at, at < SIZE)
    tl.store(target + (token * heads + head) * SIZE + at, value.to(target.dtype.element_ty), at < SIZE)


def hand(target: torch.Tensor, query: torch.Tensor) -> None:
    """Copy a query [token, head, size] into RAM with a kernel: a copy takes a graph ten times as long."""
    num_tokens, heads, size = query.shape
    assert target.is_contiguous() and query.stride(2) == 1
    _hand[num_tokens, heads](
        target, query, query.stride(0), query.stride(1), SIZE=size, PADDED=triton.next_power_of_2(size)
    )


@triton.jit  # type: ignore[untyped-decorator]
def _merge(output, near, near_lse, far, far_lse, num_tokens, SIZE: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, PADDED)
    place = (token * heads + head) * SIZE + at
    first, second = tl.load(near_lse + head * num_tokens + token), tl.load(far_lse + head * num_tokens + token)
    # FlashAttention returns +inf for a row without keys.
    first = tl.where(first == float("inf"), -float("inf"), first)
    most = tl.maximum(first, second)
    a, b = tl.exp(first - most), tl.exp(second - most)
    merged = tl.load(near + place, at < SIZE).to(tl.float32) * a + tl.load(far + place, at < SIZE) * b
    merged = tl.where(most == -float("inf"), 0.0, merged / (a + b))
    tl.store(output + place, merged.to(output.dtype.element_ty), at < SIZE)


def merge(
    output: torch.Tensor, near: torch.Tensor, near_lse: torch.Tensor, far: torch.Tensor, far_lse: torch.Tensor
) -> None:
    """Merge both parts' results [token, head, size] into `output`, weighted by their log-sum-exps [head, token]."""
    num_tokens, heads, size = near.shape
    assert output.is_contiguous() and near.is_contiguous() and near_lse.is_contiguous()
    _merge[num_tokens, heads](
        output, near, near_lse, far, far_lse, num_tokens, SIZE=size, PADDED=triton.next_power_of_2(size)
    )


class SplitBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[SplitFlashAttention]:
        return SplitFlashAttention

    @staticmethod
    def get_builder_cls() -> type[SplitMetadataBuilder]:
        return SplitMetadataBuilder
