"""Spilled blocks that a step reads and writes, as pure functions of block tables and positions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
# Ranges [first, end) of consecutive spilled blocks, counted from the first spilled one.
Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A cache group's spilled blocks in a step. No block is in both `reads` and `writes`."""

    reads: Runs  # full, and not written in this step: streamed in before the layer reads
    partial: Runs  # hold tokens and get more: streamed in before the layer *writes*
    writes: Runs  # written in this step, partial ones included: streamed out afterwards
    # Like `reads`, but left in RAM in steps that let the CPU attend to them.
    far: Runs = field(default_factory=list)

    def num_blocks_in(self) -> int:
        return count(self.reads) + count(self.partial) + count(self.far)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive places in a request's block table whose blocks the CPU attends to."""

    first: int
    blocks: Ids  # spilled blocks, counted from the first spilled one

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


@dataclass(frozen=True, slots=True)
class SpillStep:
    """A step's spilled blocks, by group; groups that touch none are left out."""

    groups: dict[int, GroupStep] = field(default_factory=dict)
    far: dict[int, dict[str, Stretch]] = field(default_factory=dict)  # by group and request
    num_bytes: int = 0  # KV in RAM of all the step's requests


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a step in one cache group."""

    block_ids: Sequence[int] | Ids
    certain: int  # tokens whose KV is certainly computed
    computed: int  # tokens whose KV may be computed: drafts of a step in flight may still be rejected
    end: int  # end of this step's writes
    far: Stretch | None = None


def group_step(spans: Iterable[Span], *, block_size: int, num_resident: int) -> GroupStep | None:
    """Reads and writes of a group's spilled blocks in a step; None if the step touches none.

    vLLM hashes a block when the step that fills it is scheduled, so another request may already hit a block that is
    written in this very step. Streaming the old bytes from RAM would overwrite it, so a written block is streamed
    in only if it holds tokens, and before the writes.
    """
    reads, far, partial, writes = [], [], [], []
    for span in spans:
        ids = np.asarray(span.block_ids, np.int64)
        first_written = span.certain // block_size
        first, end = (span.far.first, span.far.end) if span.far is not None else (0, 0)
        reads += [ids[:first], ids[end:first_written]]
        far.append(ids[first:end])
        partial.append(ids[first_written : _ceil(span.computed, block_size)])
        writes.append(written_blocks(span, block_size))
    written = _spilled(writes, num_resident)
    read = np.setdiff1d(_spilled(reads, num_resident), written, assume_unique=True)
    # A block that one request leaves to the CPU may be read on the GPU by another.
    only_far = np.setdiff1d(_spilled(far, num_resident), np.union1d(read, written), assume_unique=True)
    if not len(written) and not len(read) and not len(only_far):
        return None
    return GroupStep(runs(read), runs(_spilled(partial, num_resident)), runs(written), runs(only_far))


def written_blocks(span: Span, block_size: int) -> Ids:
    """Blocks that the span's request may write in the step."""
    return np.asarray(span.block_ids, np.int64)[span.certain // block_size : _ceil(span.end, block_size)]


def longest_stretch(block_ids: Ids, num_full: int, num_resident: int) -> tuple[int, int]:
    """Longest run of places among the first `num_full` whose blocks are all spilled, as first and end."""
    spilled = np.concatenate(([False], block_ids[:num_full] >= num_resident, [False]))
    edges = np.flatnonzero(np.diff(spilled))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest])


def far_stretch(block_ids: Ids, num_full: int, num_resident: int, share: float) -> tuple[int, int]:
    """Places that the CPU attends to, as first and end: one stretch with a share of all spilled full blocks.

    The stretch starts at the front: the end of a table grows, and may be written again after a rejected draft.
    """
    num_spilled = int(np.count_nonzero(block_ids[:num_full] >= num_resident))
    first, end = longest_stretch(block_ids, num_full, num_resident)
    return first, min(end, first + int(num_spilled * share))


def _spilled(parts: Sequence[Ids], num_resident: int) -> Ids:
    """Unique spilled blocks, counted from the first spilled one. The null block is resident, so holes drop out."""
    ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return np.unique(ids[ids >= num_resident]) - num_resident


def _ceil(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def runs(ids: Ids) -> Runs:
    """Runs of consecutive ids; `ids` are sorted."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    firsts = ids[np.concatenate(([0], breaks))]
    lasts = ids[np.concatenate((breaks - 1, [len(ids) - 1]))]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def count(runs: Runs) -> int:
    return sum(end - start for start, end in runs)
