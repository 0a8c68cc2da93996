"""vLLM's KV buffer: where a block's bytes lie, and the memory that spill, park and elastic KV map under it."""

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from vllm.platforms import current_platform

from overspill.kv.cuda import AddressRange, PhysicalMemory, mapping_granularity
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import (
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_NORESERVE,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_NONE,
    map_memory,
    unmap_memory,
)
from overspill.kv.sizes import MiB, format_size
from overspill.kv.spill.geometry import CUDA_GRANULARITY, Geometry, LentUnits, block_step
from overspill.kv.vllm_api import (
    KVCacheConfig,
)

# Block-outermost: a block's KV of all layers is contiguous, one copy. vLLM's default has layers outermost.
BLOCK_OUTERMOST = "BLNHC"
# Layer-outermost: a layer's blocks are one contiguous range, which spill maps and streams.
LAYER_OUTERMOST = "LBNHC"

PIECE_BYTES = 64 * MiB
_RESERVED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE


@dataclass(frozen=True, slots=True)
class Region:
    """A range of the buffer in which block b occupies [offset + b * block_bytes, offset + (b + 1) * block_bytes)."""

    offset: int
    block_bytes: int


def block_regions(kv_cache_config: KVCacheConfig) -> list[Region]:
    """Regions that together hold every block: one if blocks are outermost, otherwise one per layer.

    Cache groups overlap: a block id belongs to one group at a time, so the same bytes serve all groups.
    """
    num_blocks = kv_cache_config.num_blocks
    found: dict[int, Region] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        span = num_blocks * tensor.block_stride
        if tensor.layer_stride >= span:
            offsets: Iterable[int] = range(
                tensor.offset, tensor.offset + len(tensor.layers) * tensor.layer_stride, span
            )
        else:
            offsets = [0]
        for offset in offsets:
            region = found.setdefault(offset, Region(offset, tensor.block_stride))
            if region.block_bytes != tensor.block_stride:
                raise OverspillError(
                    f"this model's cache groups have pages of different sizes ({region.block_bytes} and "
                    f"{tensor.block_stride} bytes) at the same place; Overspill cannot move it"
                )
    regions = sorted(found.values(), key=lambda region: region.offset)
    for left, right in pairwise(regions):
        if left.offset + num_blocks * left.block_bytes > right.offset:
            raise OverspillError("this model's KV cache regions overlap in part; Overspill cannot move it")
    return regions


def bytes_per_block(kv_cache_config: KVCacheConfig) -> int:
    return sum(region.block_bytes for region in block_regions(kv_cache_config))


def kv_buffer(kv_caches: dict[str, Any]) -> torch.Tensor:
    """vLLM's whole KV cache as bytes: the tensors of all layers are views of one buffer."""
    first = next(iter(kv_caches.values()))
    tensor: torch.Tensor = first[0] if isinstance(first, list | tuple) else first
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class KvAllocation(TorchFunctionMode):
    """Context in which the one `torch.zeros` call for vLLM's KV buffer returns `make()` instead.

    vLLM enters the connector's memory-pool context for this allocation alone. A `torch.cuda.MemPool` could serve it
    too, but needs a compiled allocator.
    """

    def __init__(self, num_bytes: int, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._num_bytes = num_bytes
        self._make = make
        self._answered = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._num_bytes,) and kwargs.get("dtype") is torch.int8:
            self._answered += 1
            return self._make()
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and self._answered != 1:
            raise OverspillError(
                f"vLLM allocated its KV buffer of {self._num_bytes} bytes {self._answered} times where it was expected "
                "once; spill, park and elastic KV work with vLLM 0.32.0 only"
            )


def granularity() -> int:
    """Granularity of mappings. Fixed for CUDA, as the scheduler has no GPU to query; workers check that theirs fits."""
    return mmap.PAGESIZE if current_platform.is_cpu() else CUDA_GRANULARITY


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of physical memory, and the offsets in the buffer at which it is mapped."""

    num_bytes: int
    offsets: tuple[int, ...]
    unit: int | None = None
    """Stretch of blocks that gains and loses this memory on its own; None if `keep_units` never releases it."""


def pieces_of(num_bytes: int, *places: int) -> list[Piece]:
    """Pieces of `num_bytes` of memory that lies at all `places`, to be mapped and unmapped one by one. Mapping takes
    the driver a fixed time per piece, whatever its size; larger pieces would be too coarse to lend."""
    return [
        Piece(min(PIECE_BYTES, num_bytes - start), tuple(place + start for place in places))
        for start in range(0, num_bytes, PIECE_BYTES)
    ]


def plain_pieces(num_bytes: int) -> list[Piece]:
    """Pieces of a buffer whose blocks all have memory of their own."""
    return pieces_of(-(-num_bytes // granularity()) * granularity(), 0)


@dataclass(frozen=True, slots=True)
class Units:
    """Equal stretches of blocks (the last may be shorter), each of which gains and loses its memory as a whole."""

    num_blocks: int
    blocks_per_unit: int
    block_bytes: int

    @property
    def count(self) -> int:
        return -(-self.num_blocks // self.blocks_per_unit)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def unit_bytes(self) -> int:
        return self.blocks_per_unit * self.block_bytes

    def blocks(self, unit: int) -> range:
        first = unit * self.blocks_per_unit
        return range(first, min(first + self.blocks_per_unit, self.num_blocks))

    @classmethod
    def of(cls, num_blocks: int, page_bytes: int, num_regions: int) -> Self:
        """The largest units within PIECE_BYTES per region, but at least 16 units where the granularity allows."""
        step = block_step(page_bytes, granularity())
        wanted = min(PIECE_BYTES, num_blocks * page_bytes // 16) // page_bytes
        return cls(num_blocks, max(step, wanted // step * step), num_regions * page_bytes)


def unit_pieces(units: Units, page_bytes: int, *regions: int) -> list[Piece]:
    """Pieces of the units' memory in regions that begin at these offsets."""
    step, stretches = granularity(), [units.blocks(unit) for unit in range(units.count)]
    return [
        Piece(-(-len(blocks) * page_bytes // step) * step, (region + blocks.start * page_bytes,), unit)
        for region in regions
        for unit, blocks in enumerate(stretches)
    ]


def spill_pieces(geometry: Geometry, units: Units | None = None) -> list[Piece]:
    """Pieces of a buffer in which two window halves lie under all spilled ranges."""
    starts = _starts(geometry)
    if units is not None:
        resident = unit_pieces(units, geometry.page_bytes, *starts)
    else:
        resident = [piece for start in starts for piece in pieces_of(geometry.resident_bytes, start)]
    halves = [piece for places in _halves(geometry) for piece in pieces_of(geometry.half_bytes, *places)]
    return [*resident, *halves]


def lent_pieces(units: LentUnits) -> list[Piece]:
    """Pieces of a spill buffer whose GPU blocks and window share memory; window units are numbered after the others."""
    geometry, page = units.geometry, units.geometry.page_bytes
    fixed = [piece for start in _starts(geometry) for piece in pieces_of(units.num_fixed * page, start)]
    resident = [
        Piece(units.num_blocks * page, (start + units.blocks(unit).start * page,), unit)
        for start in _starts(geometry)
        for unit in range(units.count)
    ]
    window = [
        Piece(
            len(spilled) * page, tuple(place + (spilled.start - geometry.num_resident) * page for place in places), unit
        )
        for places in _halves(geometry)
        for unit, spilled in enumerate(map(units.spilled, range(units.window_count)), units.count)
    ]
    return [*fixed, *resident, *window]


def _starts(geometry: Geometry) -> list[int]:
    return [region * geometry.region_bytes for region in range(geometry.num_regions)]


def _halves(geometry: Geometry) -> list[list[int]]:
    """Offsets of each window half: one per region that uses the half."""
    regions = range(geometry.num_regions)
    return [
        [geometry.spilled_offset(region) for region in regions if geometry.half_of(region) == half]
        for half in range(geometry.num_halves)
    ]


class KvBuffer(ABC):
    """vLLM's KV buffer: its addresses stay, while the memory under them may be released and mapped again."""

    def __init__(self, num_bytes: int, pieces: Sequence[Piece], units: Collection[int] | None = None) -> None:
        self.num_bytes = num_bytes
        self._pieces = pieces
        self._mapped: dict[Piece, None] = {}
        self._units = units  # units that have memory or get it in `map`; None means all

    @property
    def reserved_bytes(self) -> int:
        return max(offset + piece.num_bytes for piece in self._pieces for offset in piece.offsets)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of physical memory under the buffer."""
        return sum(piece.num_bytes for piece in self._mapped)

    def map(self) -> None:
        """Map zeroed memory under all kept units; if there is not enough, unmap everything and raise."""
        try:
            self._map_all()
        except BaseException:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Release all memory; no kernel or copy may still be using the buffer."""
        self._unmap_all(list(self._mapped))

    def keep_units(self, units: Collection[int]) -> None:
        """Release the memory of all other units and map missing units; if that fails, these stay without memory."""
        before, self._units = self._units, frozenset(units)
        missing = [piece for piece in self._pieces if self._is_kept(piece) and piece not in self._mapped]
        self._unmap_all([piece for piece in self._mapped if not self._is_kept(piece)])
        try:
            self._map_all()
        except BaseException:
            self._unmap_all([piece for piece in missing if piece in self._mapped])
            self._units = frozenset(units) & (frozenset(units) if before is None else frozenset(before))
            raise

    def _is_kept(self, piece: Piece) -> bool:
        return self._units is None or piece.unit is None or piece.unit in self._units

    def _map_all(self) -> None:
        added = [piece for piece in self._pieces if self._is_kept(piece) and piece not in self._mapped]
        for piece in added:
            self._map(piece)
            self._mapped[piece] = None
        self._zero(added)

    def _unmap_all(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._unmap(piece)
            del self._mapped[piece]

    @abstractmethod
    def _map(self, piece: Piece) -> None:
        """Map one piece; after a failure no part of the piece is mapped."""

    @abstractmethod
    def _unmap(self, piece: Piece) -> None: ...

    @abstractmethod
    def _zero(self, pieces: Sequence[Piece]) -> None: ...

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The buffer as int8; must not be used while unmapped, nor after `close`."""

    @abstractmethod
    def close(self) -> None: ...


class HostBuffer(KvBuffer):
    """The KV buffer on the CPU platform. Unmapped parts are inaccessible: a stray access ends the process instead of
    reading whatever lies there."""

    def __init__(
        self, num_bytes: int, pieces: Sequence[Piece], option: str, units: Collection[int] | None = None
    ) -> None:
        super().__init__(num_bytes, pieces, units)
        self._option = option
        self._address = map_memory(self.reserved_bytes, _RESERVED, option, protection=PROT_NONE)
        try:
            self.map()
        except BaseException:
            self.close()
            raise

    def _map(self, piece: Piece) -> None:
        if len(piece.offsets) == 1:
            address = self._address + piece.offsets[0]
            map_memory(piece.num_bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, self._option, address=address)
            return
        file = os.memfd_create("overspill-window")
        try:
            os.ftruncate(file, piece.num_bytes)
            for offset in piece.offsets:
                address = self._address + offset
                map_memory(piece.num_bytes, MAP_SHARED | MAP_FIXED, self._option, address=address, descriptor=file)
        except BaseException:
            self._unmap(piece)
            raise
        finally:
            os.close(file)  # the mappings keep the memory

    def _unmap(self, piece: Piece) -> None:
        for offset in piece.offsets:
            address = self._address + offset
            map_memory(piece.num_bytes, _RESERVED | MAP_FIXED, self._option, address=address, protection=PROT_NONE)

    def _zero(self, pieces: Sequence[Piece]) -> None:
        """No-op: new pages are zeroed."""

    def tensor(self) -> torch.Tensor:
        memory = (ctypes.c_int8 * self.num_bytes).from_address(self._address)
        return torch.frombuffer(memory, dtype=torch.int8)

    def close(self) -> None:
        if self._address:
            unmap_memory(self._address, self.reserved_bytes)
            self._address = 0
            self._mapped.clear()


class CudaBuffer(KvBuffer):
    """The KV buffer on a GPU."""

    def __init__(
        self, num_bytes: int, pieces: Sequence[Piece], device: torch.device, units: Collection[int] | None = None
    ) -> None:
        super().__init__(num_bytes, pieces, units)
        found = mapping_granularity(device.index)
        if granularity() % found:
            raise OverspillError(
                f"this GPU maps memory in pieces of {format_size(found)}, and its KV cache was planned for "
                f"{format_size(granularity())}. Remove spill_bytes, park and ledger"
            )
        self._device = device
        self._range = AddressRange(device.index, self.reserved_bytes)
        try:
            self.map()
        except BaseException:
            self._range.close()
            raise

    def _map(self, piece: Piece) -> None:
        memory = PhysicalMemory(self._device.index, piece.num_bytes)
        mapped = []
        try:
            for offset in piece.offsets:
                self._range.map(offset, memory)
                mapped.append(offset)
        except BaseException:
            for offset in mapped:
                self._range.unmap(offset)
            raise
        finally:
            memory.release()  # the mappings keep the memory

    def _unmap(self, piece: Piece) -> None:
        for offset in piece.offsets:
            self._range.unmap(offset)

    def _zero(self, pieces: Sequence[Piece]) -> None:
        """Zero new memory: an earlier process may have left NaN. A separate stream lets steps in flight continue."""
        stream = torch.cuda.Stream(self._device)
        whole = self._range.tensor()
        with torch.cuda.stream(stream):
            for piece in pieces:
                whole[piece.offsets[0] : piece.offsets[0] + piece.num_bytes].zero_()
        stream.synchronize()

    def tensor(self) -> torch.Tensor:
        return self._range.tensor(self.num_bytes)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._mapped.clear()
        self._range.close()


def map_buffer(num_bytes: int, pieces: Sequence[Piece], option: str, units: Collection[int] | None = None) -> KvBuffer:
    """Map a buffer for this platform, with memory under `units` only. `option` is the setting that requires it."""
    if current_platform.is_cpu():
        return HostBuffer(num_bytes, pieces, option, units)
    return CudaBuffer(num_bytes, pieces, torch.device("cuda", torch.cuda.current_device()), units)
