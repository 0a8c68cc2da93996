"""What a step reads and writes of spilled blocks: pure, from block tables and positions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
# [first, last + 1) pairs of consecutive spilled blocks, counted from the first spilled one.
Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A cache group's spilled blocks in a step. No block is in two of `reads` and `writes`."""

    reads: Runs  # full, and nobody writes them: streamed in before the layer reads
    partial: Runs  # hold tokens and get more: streamed in before the layer *writes*
    writes: Runs  # written in this step, partial ones included: streamed out afterwards

    def num_blocks_in(self) -> int:
        return count(self.reads) + count(self.partial)


@dataclass(frozen=True, slots=True)
class SpillStep:
    """Only groups that touch a spilled block."""

    groups: dict[int, GroupStep] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a step in one cache group."""

    block_ids: Sequence[int] | Ids
    certain: int  # tokens whose KV is surely there
    computed: int  # tokens whose KV may be there: drafts of a step in flight may still be rejected
    end: int  # where this step's writes end


def group_step(spans: Iterable[Span], *, block_size: int, num_resident: int) -> GroupStep | None:
    """What the step does to a group's spilled blocks; None if it touches none.

    vLLM hashes a block when the step that fills it is scheduled, so another request may already hit a block that is
    written in this very step. Streaming RAM's old bytes over it would lose that, hence: what anybody writes is
    streamed in only where it holds tokens, before the writes.
    """
    reads, partial, writes = [], [], []
    for span in spans:
        ids = np.asarray(span.block_ids, np.int64)
        first_written = span.certain // block_size
        reads.append(ids[:first_written])
        partial.append(ids[first_written : _ceil(span.computed, block_size)])
        writes.append(ids[first_written : _ceil(span.end, block_size)])
    written = _spilled(writes, num_resident)
    read = np.setdiff1d(_spilled(reads, num_resident), written, assume_unique=True)
    if not len(written) and not len(read):
        return None
    return GroupStep(runs(read), runs(_spilled(partial, num_resident)), runs(written))


def _spilled(parts: Sequence[Ids], num_resident: int) -> Ids:
    """Each once, counted from the first spilled one. The null block is resident, so skipped places fall out."""
    ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return np.unique(ids[ids >= num_resident]) - num_resident


def _ceil(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def runs(ids: Ids) -> Runs:
    """Sorted ids as runs of neighbours."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    firsts = ids[np.concatenate(([0], breaks))]
    lasts = ids[np.concatenate((breaks - 1, [len(ids) - 1]))]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def count(runs: Runs) -> int:
    return sum(end - start for start, end in runs)
