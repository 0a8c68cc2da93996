"""Where blocks lie in vLLM's KV buffer, in the layouts it has."""

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from overspill.kv.buffer import Region, block_regions, bytes_per_block
from overspill.kv.errors import OverspillError

BLOCKS, PAGE, LAYERS = 10, 256, 4
NAMES = [f"layer.{i}" for i in range(LAYERS)]


def config(*tensors: KVCacheTensor) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=list(tensors), kv_cache_groups=[])


def block_outermost(layers: list[str] = NAMES, offset: int = 0, page: int = PAGE) -> KVCacheTensor:
    stride = PAGE * LAYERS
    return KVCacheTensor(stride * BLOCKS, layers, layer_stride=page, block_stride=stride, offset=offset)


def layer_outermost(layers: list[str] = NAMES, page: int = PAGE, offset: int = 0) -> KVCacheTensor:
    return KVCacheTensor(
        page * BLOCKS * len(layers), layers, layer_stride=page * BLOCKS, block_stride=page, offset=offset
    )


def test_blocks_outermost_give_one_region_for_all_layers() -> None:
    assert block_regions(config(block_outermost())) == [Region(0, PAGE * LAYERS)]


def test_with_layers_outermost_every_layer_has_its_piece() -> None:
    regions = block_regions(config(layer_outermost()))
    assert regions == [Region(i * BLOCKS * PAGE, PAGE) for i in range(LAYERS)]
    assert bytes_per_block(config(layer_outermost())) == PAGE * LAYERS


def test_groups_that_lie_over_each_other_are_counted_once() -> None:
    both = config(block_outermost(NAMES[:2]), block_outermost(NAMES[2:]))
    assert block_regions(both) == [Region(0, PAGE * LAYERS)]
    over = config(layer_outermost(NAMES[:2]), layer_outermost(NAMES[2:]))
    assert block_regions(over) == [Region(0, PAGE), Region(BLOCKS * PAGE, PAGE)]


def test_groups_that_lie_side_by_side_in_a_block_are_one_piece() -> None:
    halves = config(block_outermost(NAMES[:2]), block_outermost(NAMES[2:], offset=2 * PAGE))
    assert block_regions(halves) == [Region(0, PAGE * LAYERS)]


def test_one_layer_is_one_piece() -> None:
    assert block_regions(config(layer_outermost(NAMES[:1]))) == [Region(0, PAGE)]


def test_pages_of_different_sizes_at_one_place_are_refused() -> None:
    with pytest.raises(OverspillError, match=r"different sizes \(256 and 512 bytes\).*cannot move"):
        block_regions(config(layer_outermost(NAMES[:2]), layer_outermost(NAMES[2:], page=2 * PAGE)))


def test_pieces_that_overlap_in_part_are_refused() -> None:
    with pytest.raises(OverspillError, match="overlap in part"):
        block_regions(config(layer_outermost(NAMES[:2]), layer_outermost(NAMES[2:], offset=PAGE)))


def test_every_byte_of_every_block_is_in_exactly_one_region() -> None:
    for tensors in ([block_outermost()], [layer_outermost()], [block_outermost(NAMES[:1]), block_outermost(NAMES[1:])]):
        covered = [
            byte
            for region in block_regions(config(*tensors))
            for block in range(BLOCKS)
            for byte in range(
                region.offset + block * region.block_bytes, region.offset + (block + 1) * region.block_bytes
            )
        ]
        assert sorted(covered) == list(range(BLOCKS * PAGE * LAYERS))
