"""Spill of models with recurrent layers: attention KV goes to RAM, states stay on the GPU."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.output import SchedulerOutput

from overspill.kv.ledger import Ledger
from overspill.kv.spill.capacity import is_state
from tests.engine import (
    BLOCK,
    Answer,
    Engine,
    assert_same,
    assert_same_but_for_ties,
    engine,
    overspill_config,
    random_prompt,
    stock,
)
from tests.test_elastic import Grown
from tests.test_hybrids import NAMES, SETTINGS

Models = Callable[[str], Path]

RECURRENT = [name for name in NAMES if "hybrid" in str(name.values[0])]
# With 12 layers, every third of them attention: four regions.
REGIONS = 4
# KV of the tiny models: K and V of 2 heads, by numbers in a head and bytes of a number. vLLM makes the blocks of gated
# delta nets three times as long, so that a state in float32 fits into one.
PAGES = {"mamba-hybrid": BLOCK * 2 * 2 * 32 * 4, "gdn-hybrid": 3 * BLOCK * 2 * 2 * 64 * 2}
# A third of the longest prompt's, states included.
RESIDENT = {"mamba-hybrid": 13, "gdn-hybrid": 7}


def page_of(running: Engine) -> int:
    return int(running.vllm_scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)


def spilling(page: int, *, resident: int, spilled: int, **extra: Any) -> KVTransferConfig:
    return overspill_config(
        {
            "spill_bytes": spilled * REGIONS * page,
            "resident_bytes": resident * REGIONS * page + 2 * spilled * page,
            "reserve_bytes": 0,
            "spill_lends": False,
            **extra,
        }
    )


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {"max_model_len": 1500, **SETTINGS[name], **more}


@cache
def same_together(model: Path, name: str) -> Callable[[Sequence[Answer], Sequence[Answer]], None]:
    """The comparison of requests that share steps with others than in stock vLLM: up to rounding where stock vLLM's own
    answers depend on what else a step computes, as in bf16 on CPUs with AMX."""
    prompts = [random_prompt(seed, length) for seed, length in enumerate((700, 60, 400))]
    with engine(model, blocks=600, **settings(name)) as plain:
        alone = [plain.ask_one(prompt) for prompt in prompts]
        plain.evict_gpu()
        return assert_same if plain.ask(prompts) == alone else assert_same_but_for_ties


def watch_states(running: Engine) -> dict[str, int]:
    """The largest block id that a state group, and that attention, has had in any step."""
    groups = running.vllm_scheduler.kv_cache_config.kv_cache_groups
    seen = {"state": 0, "attention": 0}
    schedule = running.vllm_scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> SchedulerOutput:
        output: SchedulerOutput = schedule(*args, **kwargs)
        for request_id in output.num_scheduled_tokens:
            tables = running.vllm_scheduler.kv_cache_manager.get_block_ids(request_id)
            for group, ids in zip(groups, tables, strict=True):
                kind = "state" if is_state(group.kv_cache_spec) else "attention"
                seen[kind] = max(seen[kind], *ids)
        return output

    running.vllm_scheduler.schedule = watched
    return seen


@pytest.mark.parametrize("name", RECURRENT)
def test_attention_spills_and_states_stay(deep: Models, schedule: None, name: str) -> None:
    """The longest prompt takes three times the GPU's blocks, states included."""
    prompts = [random_prompt(seed, length) for seed, length in enumerate((1250, 60, 400))]
    expected = stock(deep(name), prompts, 24, **settings(name))
    longer = prompts[0] + list(expected[0].tokens) + random_prompt(7, 90)
    # With a hit, too: a state that was kept rounds differently from one that is computed in passing.
    *_, expected_longer, expected_damaged = stock(
        deep(name), [*prompts, longer, random_prompt(3, 1000)], 24, **settings(name)
    )
    page, resident, assert_same_together = PAGES[name], RESIDENT[name], same_together(deep(name), name)
    with engine(deep(name), spilling(page, resident=resident, spilled=60), **settings(name)) as spills:
        geometry = spills.spill.geometry
        assert (geometry.num_resident, geometry.num_regions) == (resident, REGIONS)
        seen = watch_states(spills)
        assert page_of(spills) == page
        assert_same([spills.ask_one(prompts[0], 24)], expected[:1])
        assert_same_together(spills.ask(prompts, 24), expected)
        assert_same([spills.ask_one(longer, 24)], [expected_longer])
        assert seen["state"] < resident < seen["attention"]
        assert spills.metric("spill_in_bytes") > 0 and spills.metric("spill_out_bytes") > 0
        # The model reads what is in RAM, so the comparison means something.
        asked = spills.add(random_prompt(3, 1000), 24)
        for _ in range(1000 // settings(name).get("max_num_batched_tokens", 2048) + 4):
            spills.step()
        arena = spills.spill_worker.arena
        assert arena is not None
        arena.slots ^= 0x04
        assert spills.run()[asked].differs_from(expected_damaged)


@pytest.mark.parametrize("name", RECURRENT)
def test_many_requests_share_few_places_for_states(deep: Models, name: str) -> None:
    """States of three requests do not fit beside each other: requests wait, or start again, and none for ever."""
    prompts = [random_prompt(seed % 4, 300) + random_prompt(seed, 90 + 40 * seed) for seed in range(7)]
    with engine(deep(name), blocks=600, **settings(name)) as plain:
        plain.num_logprobs = 5  # more than two tokens may be about as likely
        expected = plain.ask(prompts, 24)
    assert_same_together = same_together(deep(name), name)
    with engine(deep(name), spilling(PAGES[name], resident=13, spilled=100), **settings(name)) as spills:
        spills.num_logprobs = 5
        seen = watch_states(spills)
        assert_same_together(spills.ask(prompts, 24), expected)
        assert seen["state"] < 13 < seen["attention"]
        assert spills.metric("spill_in_bytes") > 0


@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("name", RECURRENT)
def test_spilled_hybrids_return_from_ram(deep: Models, name: str, store: str) -> None:
    prompts = [random_prompt(seed, 600) for seed in range(3)]
    expected = stock(deep(name), prompts, 12, **settings(name))
    config = spilling(
        PAGES[name], resident=13, spilled=45, host_bytes="64MiB", load="always", store=store, verify="all"
    )
    with engine(deep(name), config, **settings(name)) as both:
        seen = watch_states(both)
        for prompt, answer in zip(prompts, expected, strict=True):
            assert_same([both.ask_one(prompt, 12)], [answer])
        if store == "lazy":
            both.ask([random_prompt(50 + i, 900) for i in range(4)], 2)
        both.forget_gpu()
        loaded = both.metric("hit_tokens")
        again = [both.ask_one(p, 12) for p in prompts]
        assert_same(again, expected)
        assert both.metric("hit_tokens") - loaded == sum(a.num_cached for a in again) > 0
        assert both.metric("spill_in_bytes") > 0 and seen["state"] < 13
        both.assert_nothing_is_held()


@pytest.mark.parametrize("name", RECURRENT)
def test_hybrids_that_return_together_do_not_wait_for_each_other(deep: Models, schedule: None, name: str) -> None:
    """vLLM let each of them load while there were blocks in RAM, until none had a place on the GPU for the states that
    it needed to go on."""
    prompts = [random_prompt(seed, 300 + 30 * seed) for seed in range(6)]
    expected = stock(deep(name), prompts, 12, **settings(name))
    assert_same_together = same_together(deep(name), name)
    config = spilling(PAGES[name], resident=13, spilled=120, host_bytes="64MiB", load="always")
    with engine(deep(name), config, **settings(name)) as both:
        for prompt, answer in zip(prompts, expected, strict=True):
            assert_same([both.ask_one(prompt, 12)], [answer])
        both.forget_gpu()
        again = both.ask(prompts, 12)
        assert_same_together(again, expected)
        assert both.metric("standstills") > 0 and sum(answer.num_cached for answer in again) > 0
        both.assert_nothing_is_held()


@pytest.mark.parametrize("name", RECURRENT)
def test_the_least_memory_of_an_engine_has_room_for_states(deep: Models, ledger: Ledger, name: str) -> None:
    prompt = random_prompt(1, 400)
    expected = stock(deep(name), [prompt], 24, **settings(name))
    config = spilling(PAGES[name], resident=64, spilled=120, host_bytes="64MiB", ledger=str(ledger.path))
    with engine(deep(name), config, **settings(name)) as running:
        grown = Grown(running, ledger)
        ledger.write(grown.row, granted=grown.account.floor)
        grown.settle()
        assert grown.account.held == grown.account.floor
        assert_same([running.ask_one(prompt, 24)], expected)


def test_a_returning_prompt_finds_room_in_the_least_memory(deep: Models, ledger: Ledger) -> None:
    """What it hit and the states that it needed had no room on the GPU together, and nothing else would have left."""
    name = "mamba-hybrid"
    known = random_prompt(1, 100)
    prompt = [*known, *random_prompt(9, 40)]
    expected = stock(deep(name), [prompt], 4, **settings(name))
    config = spilling(PAGES[name], resident=64, spilled=120, host_bytes="64MiB", load="always", ledger=str(ledger.path))
    with engine(deep(name), config, **settings(name)) as running:
        grown = Grown(running, ledger)
        running.ask_one(known, 4)
        ledger.write(grown.row, granted=grown.account.floor)
        grown.settle()
        running.add(prompt, 4)
        assert_same(list(running.run(limit=1500).values()), expected)
        assert running.metric("hits_given_up_blocks") > 0


def test_a_gpu_without_room_for_states_is_refused(deep: Models) -> None:
    page = PAGES["mamba-hybrid"]
    with (
        pytest.raises(Exception, match=r", and .* for a request's recurrent states; .* is free for KV") as refused,
        engine(deep("mamba-hybrid"), spilling(page, resident=4, spilled=60), **settings("mamba-hybrid")),
    ):
        pass
    advised = str(refused.value).split('"spill_bytes": "')[1].split('"', maxsplit=1)[0]
    config = overspill_config(
        {"spill_bytes": advised, "resident_bytes": 4 * REGIONS * page + 2 * 60 * page, "reserve_bytes": 0}
    )
    with engine(deep("mamba-hybrid"), config, **settings("mamba-hybrid", max_model_len=64)) as spills:
        assert spills.ask_one(random_prompt(1, 50), 4).tokens
