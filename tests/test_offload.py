"""Offload on the real engine: every answer equals one computed without it, and bytes really came from RAM."""

import itertools
from pathlib import Path

import pytest

from overspill.kv.copies import PlainCopier
from tests.engine import BLOCK, Answer, Engine, assert_same, engine, overspill, random_prompt

MODES = [{"store": s, "eviction": e} for s, e in itertools.product(("eager", "lazy"), ("lru", "arc"))]


def converse(running: Engine, *, conversations: int, turns: int, first: int = 200, more: int = 70) -> list[Answer]:
    """Conversations take turns, so that each comes back after the others have pushed it off the GPU."""
    histories = [random_prompt(100 + i, first) for i in range(conversations)]
    answers = []
    for turn in range(turns):
        for i, history in enumerate(histories):
            answer = running.ask_one(history)
            answers.append(answer)
            histories[i] = history + list(answer.tokens) + random_prompt(1000 * turn + i, more)
    return answers


@pytest.fixture(scope="module")
def conversation_answers(llama: Path) -> list[Answer]:
    with engine(llama) as plain:
        return converse(plain, conversations=6, turns=3)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: f"{m['store']}-{m['eviction']}")
def test_returning_conversations_come_from_ram(
    llama: Path, conversation_answers: list[Answer], mode: dict[str, str]
) -> None:
    with engine(llama, overspill(**mode)) as spilling:
        answers = converse(spilling, conversations=6, turns=3)
        assert_same(answers, conversation_answers)
        # Turn two returns with 224 tokens of history, 223 of them computed; turn three with 318. Whole blocks count.
        assert [a.num_cached for a in answers[6:12]] == [192] * 6
        assert [a.num_cached for a in answers[12:]] == [288] * 6
        assert spilling.metric("hit_tokens") >= 6 * (192 + 288) * 0.6
        assert spilling.metric("load_bytes") > 0 and spilling.metric("store_bytes") > 0
        spilling.assert_nothing_is_held()


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a_shared_prefix_is_loaded_once_it_is_gone_from_the_gpu(llama: Path, store: str) -> None:
    prefix = random_prompt(1, 10 * BLOCK)
    prompts = [prefix + random_prompt(10 + i, 40) for i in range(5)]
    with engine(llama) as plain:
        expected = [plain.ask_one(p) for p in prompts]
    with engine(llama, overspill(store=store)) as spilling:
        first, second = spilling.ask_one(prompts[0]), spilling.ask_one(prompts[1])
        assert second.num_cached == len(prefix)
        spilling.forget_gpu()
        rest = [spilling.ask_one(p) for p in prompts[2:]]
        assert_same([first, second, *rest], expected)
        # In lazy mode too: the second use showed that the prefix is worth a copy.
        assert spilling.metric("hit_tokens") == len(prefix)
        assert all(a.num_cached == len(prefix) for a in rest)


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_a_pool_below_the_working_set_evicts_tails_before_heads(llama: Path, eviction: str) -> None:
    prompts = [random_prompt(i, 320) for i in range(4)]
    order = [0, 1, 2, 3, 0, 2, 1, 0, 3, 3, 1]
    with engine(llama) as plain:
        expected = [plain.ask_one(prompts[i]) for i in order]
    # Each prompt and its answer fill ten blocks. The fourth takes the last four slots and some of the first's.
    with engine(llama, overspill(host_bytes=34 * slot_bytes(llama), eviction=eviction), blocks=13) as spilling:
        answers = [spilling.ask_one(prompts[i]) for i in order]
        assert_same(answers, expected)
        assert 4 * BLOCK <= answers[4].num_cached < 10 * BLOCK
        assert spilling.metric("evicted_blocks") > 0
        assert spilling.metric("hit_tokens") >= 4 * BLOCK
        spilling.assert_nothing_is_held()


def test_a_prompt_longer_than_the_pool_keeps_its_head_in_ram(llama: Path) -> None:
    prompt = random_prompt(5, 30 * BLOCK + 5)
    with engine(llama) as plain:
        expected = plain.ask_one(prompt)
    with engine(llama, overspill(host_bytes=12 * slot_bytes(llama)), max_num_batched_tokens=256) as spilling:
        spilling.ask_one(prompt)
        spilling.forget_gpu()
        again = spilling.ask_one(prompt)
        assert_same([again], [expected])
        assert again.num_cached == 12 * BLOCK


def test_preempted_requests_resume_from_ram(llama: Path) -> None:
    prompts = [random_prompt(i, 180) for i in range(6)]
    with engine(llama, blocks=100) as roomy:
        expected = roomy.ask(prompts, max_tokens=120)
        assert roomy.preemptions() == 0
    with engine(llama, overspill(), blocks=31) as spilling:
        answers = spilling.ask(prompts, max_tokens=120)
        assert spilling.preemptions() > 0
        assert_same(answers, expected)
        assert spilling.metric("hit_tokens") > 0
        spilling.assert_nothing_is_held()
        assert spilling.metric("miss_tokens") >= 6 * 180  # every prompt was nowhere at first


def test_abort_during_a_load_neither_leaks_nor_frees_early(llama: Path, open_gate: None) -> None:
    prompt, other = random_prompt(1, 600), random_prompt(2, 300)
    with engine(llama) as plain:
        expected = [plain.ask_one(prompt), plain.ask_one(other)]
    with engine(llama, overspill()) as spilling:
        spilling.ask_one(prompt)
        spilling.forget_gpu()
        PlainCopier.gate.clear()
        request = spilling.add(prompt)
        for _ in range(3):
            spilling.step()
        (load,) = spilling.scheduler.loads.in_flight.values()
        spilling.llm.llm_engine.abort_request([request])
        spilling.step()
        assert all(block.ref_cnt > 0 for block in load.gpu_blocks + load.host_blocks), "freed in flight"
        PlainCopier.gate.set()
        spilling.drain()
        assert not spilling.scheduler.loads.in_flight
        assert_same([spilling.ask_one(prompt), spilling.ask_one(other)], expected)
        spilling.assert_nothing_is_held()


def test_abort_during_a_store_leaks_nothing_and_keeps_the_copy(llama: Path, open_gate: None) -> None:
    prompt, other = random_prompt(1, 600), random_prompt(2, 500)
    with engine(llama) as plain:
        expected = [plain.ask_one(other), plain.ask_one(prompt)]
    with engine(llama, overspill()) as spilling:
        PlainCopier.gate.clear()
        request = spilling.add(prompt)
        for _ in range(20):
            spilling.step()
        stores = list(spilling.scheduler.stores.in_flight.values())
        assert stores, "nothing was being stored"
        spilling.llm.llm_engine.abort_request([request])
        # The blocks being copied must not be handed to the next request.
        held = {block.block_id for store in stores for block in store.gpu_blocks}
        second = spilling.add(other, max_tokens=2)
        spilling.step()
        internal = next(iter(spilling.vllm_scheduler.requests))
        (taken,) = spilling.vllm_scheduler.kv_cache_manager.get_block_ids(internal)
        assert not held & set(taken)
        PlainCopier.gate.set()
        spilling.run()
        assert second
        spilling.forget_gpu()
        answers = [spilling.ask_one(other), spilling.ask_one(prompt)]
        assert_same(answers, expected)
        assert answers[1].num_cached >= 576
        spilling.assert_nothing_is_held()


def test_reset_forgets_ram_and_what_was_being_stored(llama: Path, open_gate: None) -> None:
    prompt = random_prompt(1, 600)
    with engine(llama, overspill()) as spilling:
        before = spilling.ask_one(prompt)
        assert spilling.llm.reset_prefix_cache(reset_connector=True)
        assert spilling.scheduler.host.num_cached == 0
        assert spilling.ask_one(prompt).num_cached == 0
        PlainCopier.gate.clear()
        spilling.add(random_prompt(3, 600))
        for _ in range(12):
            spilling.step()
        spilling.scheduler.reset()
        PlainCopier.gate.set()
        spilling.run()
        spilling.drain()
        spilling.forget_gpu()
        assert spilling.ask_one(random_prompt(3, 600)).num_cached == 0
        assert_same([spilling.ask_one(prompt)], [before])
        spilling.assert_nothing_is_held()


def test_reset_during_a_load_says_no(llama: Path, open_gate: None) -> None:
    prompt = random_prompt(1, 600)
    with engine(llama, overspill()) as spilling:
        before = spilling.ask_one(prompt)
        spilling.forget_gpu()
        PlainCopier.gate.clear()
        spilling.add(prompt, request_id="loading")
        for _ in range(3):
            spilling.step()
        assert spilling.vllm_scheduler.connector.reset_cache() is False
        PlainCopier.gate.set()
        assert_same([spilling.run()["loading"]], [before])
        assert spilling.vllm_scheduler.connector.reset_cache() is True
        spilling.assert_nothing_is_held()


def test_two_requests_for_the_same_prefix_load_it_once(llama: Path) -> None:
    prompt = random_prompt(1, 600)
    with engine(llama, overspill(), blocks=60) as spilling:
        expected = spilling.ask_one(prompt)
        spilling.forget_gpu()
        loaded = spilling.metric("load_bytes")
        answers = spilling.ask([prompt] * 3)
        assert_same(answers, [expected] * 3)
        assert spilling.metric("load_bytes") - loaded == 18 * spilling.worker.memory.slot_bytes
        assert all(a.num_cached == 576 for a in answers)


def test_hits_slower_to_load_than_to_recompute_are_skipped(llama: Path) -> None:
    prompt = random_prompt(1, 600)
    with engine(llama, overspill(load="auto")) as spilling:
        before = spilling.ask_one(prompt)
        spilling.forget_gpu()
        spilling.scheduler.speeds.load_bytes_per_s = 1e3  # a link like a modem's
        spilling.scheduler.speeds.prefill_tokens_per_s = 1e6
        again = spilling.ask_one(prompt)
        assert_same([again], [before])
        assert again.num_cached == 0
        assert spilling.metric("loads_skipped_tokens") == 576
        assert spilling.metric("load_bytes") == 0


def test_a_skipped_load_counts_once_while_its_request_waits(llama: Path) -> None:
    prompt = random_prompt(1, 600)
    with engine(llama, overspill(load="auto"), blocks=30) as spilling:
        before = spilling.ask_one(prompt)
        spilling.forget_gpu()
        running = spilling.add(random_prompt(2, 500), 40)
        for _ in range(3):
            spilling.step()
        spilling.scheduler.speeds.load_bytes_per_s = 1e3
        spilling.scheduler.speeds.prefill_tokens_per_s = 1e6
        waiting = spilling.add(prompt)
        for _ in range(5):
            assert waiting not in spilling.step()
        assert spilling.metric("loads_skipped_tokens") == 0
        done = spilling.run()
        assert running in done
        assert_same([done[waiting]], [before])
        assert spilling.metric("loads_skipped_tokens") == 576


def test_one_unlucky_measurement_does_not_end_all_loads(llama: Path) -> None:
    prompt = random_prompt(1, 600)
    with engine(llama, overspill(load="auto")) as spilling:
        spilling.scheduler.loads.probe_after = 4
        before = spilling.ask_one(prompt)
        cached = []
        for _ in range(6):
            spilling.forget_gpu()
            spilling.scheduler.speeds.prefill_tokens_per_s = 1e5
            if not cached:
                spilling.scheduler.speeds.load_bytes_per_s = 1e3
            again = spilling.ask_one(prompt)
            assert_same([again], [before])
            cached.append(again.num_cached)
        assert cached[:5] == [0, 0, 0, 0, 576]
        assert spilling.scheduler.speeds.load_bytes_per_s > 1e6


def test_prefill_and_link_speed_are_measured(llama: Path) -> None:
    prompt = random_prompt(1, 600)
    with engine(llama, overspill()) as spilling:
        spilling.ask_one(prompt)
        spilling.forget_gpu()
        spilling.ask_one(prompt)
        assert spilling.scheduler.speeds.prefill_tokens_per_s > 0
        assert spilling.scheduler.speeds.load_bytes_per_s > 0


def slot_bytes(model: Path) -> int:
    """Bytes of a block of the tiny llama: 4 layers, 2 heads of 32, K and V, float32."""
    return 4 * BLOCK * 2 * 32 * 2 * 4


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_preemption_in_its_own_pass_leaves_no_stale_hash(llama: Path, store: str) -> None:
    """With priorities vLLM preempts requests that are already part of a pass; it went on to find their blocks, which
    were never computed."""
    victim, urgent = random_prompt(1, 9 * BLOCK), random_prompt(2, 2 * BLOCK)
    with engine(llama, blocks=40) as plain:
        expected = plain.ask([victim, urgent])
    scheduling = {
        "scheduling_policy": "priority", "max_num_batched_tokens": 4 * BLOCK, "long_prefill_token_threshold": 2 * BLOCK,
    }  # fmt: skip
    with engine(llama, overspill(store=store), blocks=11, max_model_len=10 * BLOCK, **scheduling) as spilling:
        names = [spilling.add(victim, priority=1)]
        spilling.step()
        names.append(spilling.add(urgent, priority=0))
        answers = spilling.run()
        assert spilling.preemptions() > 0
        assert_same([answers[name] for name in names], expected)
