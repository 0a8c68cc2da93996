"""How a device's memory and RAM are divided between KV that is resident, spilled, and the window between them."""

from dataclasses import dataclass

from overspill.kv.spill.geometry import least_spilled_blocks, num_resident_blocks, window_bytes
from overspill.model.kv import KVGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSplit:
    """One rank's KV: what is resident, what the window takes, and what lies in RAM."""

    resident_bytes: int
    window_bytes: int
    spilled_bytes: int
    table_bytes: int = 0
    """Block tables, which spill takes off the memory vLLM found (overspill.kv.spill.memory_budget)."""

    @property
    def device_bytes(self) -> int:
        return self.resident_bytes + self.window_bytes + self.table_bytes


def split_kv(
    geometry: KVGeometry,
    max_model_len: int,
    available_bytes: int,
    *,
    spill: bool,
    granularity: int,
    max_num_seqs: int,
    at_once: int = 1,
    doubt_bytes: int = 0,
) -> KvSplit | None:
    """KV for requests of `max_model_len` in so much device memory, with the least in RAM; None if there is no way.

    Should there be less device memory, by up to `doubt_bytes`, they still fit: RAM makes up for it.
    """
    block_bytes = geometry.bytes_per_block
    need = at_once * geometry.blocks_per_request(max_model_len) + 1  # and vLLM's null block
    if need * block_bytes <= available_bytes - doubt_bytes:
        return KvSplit(resident_bytes=available_bytes // block_bytes * block_bytes, window_bytes=0, spilled_bytes=0)
    tables = table_bytes(geometry, max_model_len, max_num_seqs)
    room = available_bytes - tables
    if not spill or room <= doubt_bytes:
        return None
    page, regions = geometry.page_size_bytes, geometry.num_regions
    spilled = least_spilled_blocks(need, room - doubt_bytes, page, regions, granularity)
    if not spilled:
        return None
    resident = num_resident_blocks(room, spilled, page, regions, granularity)
    if resident <= at_once * geometry.states_per_request:
        return None  # recurrent states do not spill
    return KvSplit(
        resident_bytes=resident * block_bytes,
        window_bytes=window_bytes(spilled, page, regions),
        spilled_bytes=spilled * block_bytes,
        table_bytes=tables,
    )


def table_bytes(geometry: KVGeometry, max_model_len: int, max_num_seqs: int) -> int:
    """Two copies of 32-bit block ids, for every request that may run."""
    entries = sum(-(-max_model_len // group.block_size) for group in geometry.groups)
    return 2 * 4 * max_num_seqs * entries
