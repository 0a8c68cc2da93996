"""Which spilled blocks a step reads, continues and writes."""

import numpy as np

from overspill.kv.spill.steps import GroupStep, Span, count, group_step, runs

# Blocks of four tokens; ten of them, 0 to 9, are on the GPU, and 0 is vLLM's null block.


def step(*spans: Span) -> GroupStep | None:
    return group_step(spans, block_size=4, num_resident=10)


def decode(block_ids: list[int], computed: int, certain: int | None = None, new: int = 1) -> Span:
    return Span(block_ids, computed if certain is None else certain, computed, computed + new)


def test_ids_become_runs() -> None:
    assert runs(np.array([3, 4, 5, 9, 11, 12])) == [(3, 6), (9, 10), (11, 13)]
    assert runs(np.array([], np.int64)) == []
    assert count([(3, 6), (9, 10)]) == 4


def test_a_request_on_the_gpu_streams_nothing() -> None:
    assert step(decode([1, 2, 3], 9)) is None


def test_full_blocks_are_read_and_the_last_is_continued() -> None:
    assert step(decode([1, 10, 11, 12], 13)) == GroupStep(reads=[(0, 2)], partial=[(2, 3)], writes=[(2, 3)])


def test_a_new_block_holds_nothing_worth_streaming() -> None:
    assert step(decode([1, 10, 11, 12], 12)) == GroupStep(reads=[(0, 2)], partial=[], writes=[(2, 3)])


def test_a_prefill_chunk_writes_many_blocks() -> None:
    prefill = Span([1, 10, 11, 12, 13], 6, 6, 19)
    assert step(prefill) == GroupStep(reads=[], partial=[(0, 1)], writes=[(0, 4)])


def test_blocks_that_are_not_written_yet_are_left_alone() -> None:
    lookahead = Span([10, 11, 12, 13], 4, 4, 6)
    assert step(lookahead) == GroupStep(reads=[(0, 1)], partial=[], writes=[(1, 2)])


def test_a_shared_block_is_streamed_once() -> None:
    assert step(decode([10, 11, 1], 9), decode([10, 11, 2], 9)) == GroupStep(reads=[(0, 2)], partial=[], writes=[])


def test_a_hit_on_a_block_written_in_its_step_streams_nothing() -> None:
    writer = Span([10, 11], 0, 0, 8)
    reader = decode([10, 11, 1], 8)
    assert step(writer, reader) == GroupStep(reads=[], partial=[], writes=[(0, 2)])


def test_a_hit_on_a_block_filled_in_its_step_streams_it_first() -> None:
    writer = decode([10, 11], 7)
    reader = decode([10, 11, 1], 8)
    assert step(writer, reader) == GroupStep(reads=[(0, 1)], partial=[(1, 2)], writes=[(1, 2)])


def test_optimistic_positions_start_where_it_is_certain() -> None:
    """Three drafts of the step in flight may be rejected: the next token may go before them, into block 11."""
    found = step(decode([10, 11, 12], 9, certain=6, new=4))
    assert found == GroupStep(reads=[(0, 1)], partial=[(1, 3)], writes=[(1, 3)])


def test_places_that_a_window_has_left_are_not_streamed() -> None:
    """vLLM puts its null block there, which is on the GPU."""
    assert step(decode([0, 0, 12, 13], 14)) == GroupStep(reads=[(2, 3)], partial=[(3, 4)], writes=[(3, 4)])
