"""How a long request shares steps with short ones: it sits some out, and nobody waits for nothing."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from overspill.kv.speeds import Speeds
from overspill.kv.spill.scheduler import Spilled
from overspill.kv.spill.vllm_scheduler import Pacing
from tests.engine import Answer, Engine, assert_same, engine, random_prompt, spilling

LONG = random_prompt(1, 900)
SHORT = [random_prompt(seed, 40) for seed in (2, 3)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    from tests.tiny_models import MODELS

    with engine(MODELS["llama"](tmp_path_factory.mktemp("sharing") / "llama"), blocks=400) as plain:
        return [plain.ask_one(LONG, 40), *(plain.ask_one(p, 40) for p in SHORT)]


def slow_link(spills: Engine) -> None:
    """The long request's step takes twenty plain ones."""
    blocks = 26
    geometry = spills.spill.geometry
    link = blocks * geometry.page_bytes * geometry.num_regions / 0.2
    # In place of the speeds that are measured while it runs.
    spills.spill.speeds = Speeds(plain_step_s=0.01, stream_bytes_per_s=link, prefill_tokens_per_s=5000)


def run(spills: Engine, *, long_first: bool) -> tuple[list[Answer], dict[str, list[int]]]:
    """Answers of the long and the short requests, and the steps in which each ran."""
    steps: dict[str, list[int]] = {}
    names = {}
    if long_first:
        names["long"] = spills.add(LONG, 40)
        for _ in range(2):
            spills.step()
    for i, prompt in enumerate(SHORT):
        names[f"short {i}"] = spills.add(prompt, 40)
    if not long_first:
        names["long"] = spills.add(LONG, 40)
    done: dict[str, Answer] = {}
    for step in range(2000):
        if not spills.llm.llm_engine.has_unfinished_requests():
            break
        before = {r.request_id: r.num_computed_tokens for r in spills.vllm_scheduler.running}
        done.update(spills.step())
        for request in spills.vllm_scheduler.running:
            if request.num_computed_tokens > before.get(request.request_id, 0):
                steps.setdefault(request.request_id.rsplit("-", 1)[0], []).append(step)
    else:
        raise AssertionError("a request never ends")
    return [done[name] for name in names.values()], {key: steps[name] for key, name in names.items()}


@pytest.mark.parametrize("long_first", [True, False])
def test_short_requests_keep_pace_and_the_long_one_gets_turns(
    llama: Path, expected: list[Answer], long_first: bool
) -> None:
    """Whichever came first: a short request that finds no GPU block left streams a little, and is not held."""
    with engine(llama, spilling(spill_share=0.5)) as spills:
        slow_link(spills)
        answers, steps = run(spills, long_first=long_first)
        assert spills.metric("spilled_steps") > 0
    in_order = expected if long_first else [*expected[1:], expected[0]]
    assert_same(answers, in_order)
    together = [step for step in steps["long"] if step <= max(steps["short 0"])]
    assert 2 <= len(together) <= len(steps["short 0"]) // 3, "the long one runs in too many of the steps, or in none"


def test_with_a_share_of_one_a_long_request_runs_in_every_step(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, spilling(spill_share=1)) as spills:
        slow_link(spills)
        answers, steps = run(spills, long_first=True)
    assert_same(answers, expected)
    assert {step for step in steps["short 0"] if step <= max(steps["long"])} <= set(steps["long"])


def test_a_long_request_stops_waiting_once_the_others_end(llama: Path) -> None:
    with engine(llama, spilling(spill_share=0.01)) as spills:
        slow_link(spills)
        _, steps = run(spills, long_first=True)
        assert spills.vllm_scheduler._pacing._held == {}
    alone = [step for step in steps["long"] if step > max(steps["short 1"])]
    assert alone and alone == list(range(alone[0], alone[0] + len(alone)))
    assert alone[0] <= max(steps["short 1"]) + 2


def test_a_long_request_alone_runs_in_every_step(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, spilling(spill_share=0.01)) as spills:
        slow_link(spills)
        name = spills.add(LONG, 40)
        answers, steps = {}, 0
        while spills.llm.llm_engine.has_unfinished_requests():
            answers.update(spills.step())
            steps += 1
    assert_same([answers[name]], expected[:1])
    assert steps <= 41


def test_short_requests_find_gpu_blocks_beside_a_long_one(llama: Path, expected: list[Answer]) -> None:
    """It has more than enough in RAM, and leaves the part of the GPU that caches what they computed a moment ago."""
    with engine(llama, spilling(resident=24, spill_share=0.5)) as spills:
        slow_link(spills)
        spills.ask(SHORT, 40)
        long = spills.add(LONG, 40)
        for _ in range(6):
            spills.step()
        short = [spills.add(prompt, 40) for prompt in SHORT]
        answers = spills.step()
        running = {r.request_id.rsplit("-", 1)[0]: r.request_id for r in spills.vllm_scheduler.running}
        assert {name: spills.spill.is_spilled(running[name]) for name in (long, *short)} == {
            long: True, short[0]: False, short[1]: False
        }  # fmt: skip
        while spills.llm.llm_engine.has_unfinished_requests():
            answers.update(spills.step())
        assert spills.metric("plain_steps") > 20
    assert_same([answers[name] for name in (long, *short)], expected)


def test_alone_a_long_request_takes_all_of_the_gpu(llama: Path) -> None:
    with engine(llama, spilling(resident=24)) as spills:
        spills.add(LONG, 40)
        for _ in range(6):
            spills.step()
        assert spills.spill.placement.queue.num_free_resident <= 1


def test_a_spilled_steps_own_time_does_not_count_as_waiting(llama: Path) -> None:
    """The wait began with the step's planning: the long request ran in every second step, whatever its share."""
    with engine(llama, spilling(spilled=80, spill_share=0.5)) as spills:
        slow_link(spills)
        spill = spills.spill
        spill._spilled, spill._in_step = {"a": Spilled(num_blocks=20)}, {"a"}
        streaming_s = 20 * spill.block_bytes / spill.link_bytes_per_s
        assert spill.spacing(["a", "short"]).seconds_apart == pytest.approx(2 * streaming_s)
        spill.share = 0.25
        assert spill.spacing(["a", "short"]).seconds_apart == pytest.approx(4 * streaming_s)
        spill._spilled, spill._in_step = {}, set()


def test_two_long_requests_do_not_wait_for_each_other(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, spilling(spilled=80, spill_share=0.01)) as spills:
        slow_link(spills)
        other = random_prompt(7, 800)
        name, second = spills.add(LONG, 40), spills.add(other, 40)
        answers, steps = {}, 0
        while spills.llm.llm_engine.has_unfinished_requests():
            answers.update(spills.step())
            steps += 1
    assert_same([answers[name]], expected[:1])
    assert second in answers and steps < 60


def test_heavy_requests_out_of_step_share_one_share_of_time(llama: Path) -> None:
    """Each of them, seen alone, would have got the whole share."""
    with engine(llama, spilling(spilled=80, spill_share=0.5)) as spills:
        slow_link(spills)
        spill = spills.spill
        spill._spilled = {"a": Spilled(num_blocks=20), "b": Spilled(num_blocks=20)}
        spill._in_step = {"a"}
        alone = spill.spacing(["a", "short"])
        both = spill.spacing(["a", "b", "short"])
        assert both.steps_apart > 1.8 * alone.steps_apart > 1
        assert both.seconds_apart == pytest.approx(2 * alone.seconds_apart)
        assert both.requests == {"a"}
        spill._spilled, spill._in_step = {}, set()


def test_a_held_request_is_released_at_its_deadline(llama: Path) -> None:
    """The steps it sits out may be prefills of seconds: their number alone says little."""
    pacing, waited = Pacing(), SimpleNamespace(request_id="a", status=RequestStatus.RUNNING)
    waited.next_decode_eligible_step = 200
    scheduler = SimpleNamespace(running=[waited, SimpleNamespace(request_id="b")], current_step=10)
    pacing._held["a"] = waited, time.monotonic() + 60  # type: ignore[assignment]
    pacing.release(scheduler)  # type: ignore[arg-type]
    assert waited.next_decode_eligible_step == 200
    pacing._held["a"] = waited, time.monotonic() - 1  # type: ignore[assignment]
    pacing.release(scheduler)  # type: ignore[arg-type]
    assert waited.next_decode_eligible_step == 0 and pacing._held == {}
