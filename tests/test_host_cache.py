"""Lookups in RAM: the short way for plain models finds what vLLM's own coordinator finds."""

import random

import pytest

from overspill.kv.host_cache import Stored
from tests.simulated_copies import Setup
from tests.simulated_engine import Engine

SIZE = 4


@pytest.mark.parametrize("seed", range(20))
def test_the_short_lookup_finds_what_the_coordinator_finds(seed: int) -> None:
    draw = random.Random(seed)
    simulated = Engine(Setup(groups=((SIZE, 0),), gpu_blocks=60, host_slots=draw.choice([6, 30]), seed=seed))
    prompts = [[draw.randrange(50) for _ in range(40)] for _ in range(3)]
    for _ in range(4):
        simulated.add(draw.choice(prompts)[: draw.randrange(8, 40)], 2)
        for _ in range(12):
            simulated.step()
    host = simulated.offload.host
    assert host._is_plain
    found = 0
    for prompt in prompts:
        request = simulated.requests[simulated.add(prompt, 1)]
        for local in range(0, len(prompt), SIZE):
            for most in (len(prompt) - 1, len(prompt) // 2, local + 1):
                short = host._lookup_plain(request.block_hashes, local, most)
                full = host._lookup_any(request.block_hashes, local, most)
                if full[1] > local:
                    assert short == full
                    found += 1
                else:
                    assert short[1] <= local
    assert found, "nothing was in RAM, so nothing was compared"


def test_a_store_of_content_read_meanwhile_is_released() -> None:
    simulated = Engine(Setup(groups=((SIZE, 0),), gpu_blocks=60, host_slots=30, longest_flight=5))
    simulated.add(list(range(2 * SIZE + 1)), 1)
    stores, host = simulated.offload.stores, simulated.offload.host
    while not stores.in_flight:
        simulated.step()
    ((job_id, store),) = stores.in_flight.items()
    first = store.origins[0]
    (read,) = host.allocate(1)
    host.insert([Stored(read, first.key, SIZE, first.parent)])
    stores.report(job_id, 1, failed=False)
    assert [block for block in host.pool.blocks if block.block_hash == first.key] == [read]
    assert host.num_cached == len(store.origins)
    assert host.pool.get_num_free_blocks() == 30
