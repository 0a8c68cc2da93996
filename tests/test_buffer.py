"""The memory under vLLM's KV buffer comes and goes while its addresses stay."""

import mmap
import os
import signal

import pytest
import torch

from overspill.kv import buffer
from overspill.kv.buffer import HostBuffer, KvBuffer, Piece, pieces_of, plain_pieces, spill_pieces
from overspill.kv.errors import OverspillError
from overspill.kv.spill.geometry import Geometry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform's memory")

PAGE = mmap.PAGESIZE
GEOMETRY = Geometry(num_blocks=24, num_spilled=16, num_regions=5, page_bytes=PAGE)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "PIECE_BYTES", 3 * PAGE)


def plain(num_bytes: int = 10 * PAGE) -> HostBuffer:
    return HostBuffer(num_bytes, plain_pieces(num_bytes), "park")


def test_pieces_cover_the_buffer_once() -> None:
    for pieces in (plain_pieces(10 * PAGE - 5), spill_pieces(GEOMETRY)):
        places = sorted((offset, piece.num_bytes) for piece in pieces for offset in piece.offsets)
        end = 0
        for offset, length in places:
            assert offset == end and 0 < length <= 3 * PAGE
            end = offset + length
        assert end in (10 * PAGE, GEOMETRY.buffer_bytes)


def test_spilled_ranges_of_one_half_are_the_same_memory() -> None:
    mapped = HostBuffer(GEOMETRY.buffer_bytes, spill_pieces(GEOMETRY), "spill_bytes")
    bytes_of = mapped.tensor()
    places = [bytes_of[GEOMETRY.spilled_offset(region) :][: GEOMETRY.half_bytes] for region in range(5)]
    places[0].fill_(3)
    places[1].fill_(4)
    assert [int(place.float().mean()) for place in places] == [3, 4, 3, 4, 3]
    bytes_of[: GEOMETRY.resident_bytes].fill_(5)
    assert int(bytes_of[GEOMETRY.region_bytes :][: GEOMETRY.resident_bytes].max()) == 0
    mapped.close()


def test_memory_is_gone_and_comes_back_as_zeroes() -> None:
    mapped = plain(2**24)
    contents = mapped.tensor()
    contents.fill_(7)
    address = contents.data_ptr()
    held = resident_bytes(address)
    assert held == mapped.mapped_bytes == 2**24
    mapped.unmap()
    assert mapped.mapped_bytes == 0 == resident_bytes(address)
    mapped.map()
    assert contents.data_ptr() == address and int(contents.max()) == 0
    contents.fill_(8)
    mapped.close()


def resident_bytes(address: int) -> int:
    """RAM behind the mappings from this address on, up to the first gap."""
    found, end = 0, address
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                low, high = (int(part, 16) for part in words[0].split("-"))
                inside = low <= end < high if end == address else low == end and high <= address + 2**24
                end = high if inside else end
            elif words[0] == "Rss:" and inside:
                found += int(words[1]) * 1024
    return found


@pytest.mark.parametrize("window", [False, True])
def test_a_touch_while_unmapped_ends_the_process(window: bool) -> None:
    mapped: KvBuffer = plain()
    if window:
        mapped = HostBuffer(GEOMETRY.buffer_bytes, spill_pieces(GEOMETRY), "spill_bytes")
    contents = mapped.tensor()
    mapped.unmap()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        int(contents[GEOMETRY.resident_bytes])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    mapped.close()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


def test_a_refused_piece_leaves_nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = plain()
    mapped.unmap()
    attach, asked = HostBuffer._map, []

    def refuse(self: HostBuffer, piece: Piece) -> None:
        asked.append(piece)
        if len(asked) == 3:
            raise OverspillError("no memory")
        attach(self, piece)

    monkeypatch.setattr(HostBuffer, "_map", refuse)
    with pytest.raises(OverspillError, match="no memory"):
        mapped.map()
    assert mapped.mapped_bytes == 0
    mapped.map()
    assert mapped.mapped_bytes == 10 * PAGE
    mapped.close()


def test_pieces_are_at_most_as_large_as_asked() -> None:
    assert [piece.num_bytes for piece in pieces_of(7 * PAGE, 0, 100 * PAGE)] == [3 * PAGE, 3 * PAGE, PAGE]
    assert pieces_of(7 * PAGE, 0, 100 * PAGE)[2].offsets == (6 * PAGE, 106 * PAGE)
