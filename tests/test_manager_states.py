"""Pure decisions of the manager: what to do next, and who must go."""

import itertools
import random

import pytest

from overspill.kv.sizes import GiB
from overspill.launch.machine import plan_for
from overspill.manager.messages import passed_back, passed_on
from overspill.manager.needs import NOTHING, Memory, Need, need_of, total
from overspill.manager.states import Decision, Seen, State, Step, Timing, Wanted, decide
from overspill.manager.swaps import Running, Verdict, choose

UP, PARKED, DOWN = Wanted.UP, Wanted.PARKED, Wanted.DOWN
# Wanted, seen: state and step; two of them where a process was launched for this wish, or the last one failed.
EXPECTED = {
    (UP, Seen.LOADING): Decision(State.STARTING, Step.WAIT),
    (UP, Seen.SERVING): Decision(State.READY, Step.WAIT),
    (UP, Seen.PARKED): Decision(State.STARTING, Step.WAKE),
    (UP, Seen.SILENT): Decision(State.STOPPING, Step.END),
    (UP, Seen.ENDING): Decision(State.STOPPING, Step.WAIT),
    (PARKED, Seen.LOADING): Decision(State.STARTING, Step.WAIT),
    (PARKED, Seen.SERVING): Decision(State.STOPPING, Step.PARK),
    (PARKED, Seen.PARKED): Decision(State.PARKED, Step.WAIT),
    (PARKED, Seen.SILENT): Decision(State.STOPPING, Step.END),
    (PARKED, Seen.ENDING): Decision(State.STOPPING, Step.WAIT),
    (DOWN, Seen.LOADING): Decision(State.STOPPING, Step.END),
    (DOWN, Seen.PARKED): Decision(State.STOPPING, Step.END),
    (DOWN, Seen.SERVING): Decision(State.STOPPING, Step.END),
    (DOWN, Seen.SILENT): Decision(State.STOPPING, Step.END),
    (DOWN, Seen.ENDING): Decision(State.STOPPING, Step.WAIT),
}
CASES = list(itertools.product(Wanted, Seen, (False, True), (False, True)))


@pytest.mark.parametrize(("wanted", "seen", "launched", "failed"), CASES)
def test_every_combination_decides_as_the_table_says(wanted: Wanted, seen: Seen, launched: bool, failed: bool) -> None:
    expected = EXPECTED.get((wanted, seen))
    if expected is None and wanted is UP:
        expected = Decision(State.STOPPING, Step.GIVE_UP) if launched else Decision(State.STARTING, Step.LAUNCH)
    if expected is None and wanted is PARKED and launched:
        expected = Decision(State.STOPPING, Step.GIVE_UP)
    if expected is None:
        expected = Decision(State.FAILED if failed else State.STOPPED, Step.WAIT)
    assert decide(wanted, seen, launched=launched, failed=failed) == expected


def test_only_absent_engines_not_launched_yet_are_launched() -> None:
    """Two processes of one engine would fight for the same memory."""
    launching = [case for case in CASES if decide(*case[:2], launched=case[2], failed=case[3]).step is Step.LAUNCH]
    assert {case[:3] for case in launching} == {(UP, Seen.ABSENT, False)}


def test_only_serving_engines_are_ready_only_absent_ones_stopped() -> None:
    for wanted, seen, launched, failed in CASES:
        state = decide(wanted, seen, launched=launched, failed=failed).state
        assert (state is not State.READY) or seen is Seen.SERVING
        assert (state not in (State.STOPPED, State.FAILED)) or seen is Seen.ABSENT


def ram(gib: float) -> Memory:
    return Memory(ram_bytes=int(gib * GiB))


def engine(name: str, gib: float, **more: object) -> Running:
    settings: dict[str, object] = {"in_flight": 0, "last_used": 0.0, "ready_since": 0.0, **more}
    return Running(name=name, holds=ram(gib), **settings)  # type: ignore[arg-type]


def decide_who(need: float, free: float, *running: Running, now: float = 100.0) -> tuple[Verdict, tuple[str, ...]]:
    choice = choose(ram(need), ram(free), running, now=now, least_service_s=10.0)
    return choice.verdict, choice.victims


def test_no_engine_is_evicted_where_there_is_room() -> None:
    assert decide_who(4, 4, engine("a", 8)) == (Verdict.FITS, ())


def test_the_least_recently_used_engine_is_evicted_first() -> None:
    assert decide_who(4, 0, engine("a", 4, last_used=9.0), engine("b", 4, last_used=3.0)) == (Verdict.EVICT, ("b",))


def test_one_large_engine_is_evicted_rather_than_two_small_ones() -> None:
    running = [engine("a", 2, last_used=1.0), engine("b", 2, last_used=2.0), engine("c", 4, last_used=3.0)]
    assert decide_who(4, 0, *running) == (Verdict.EVICT, ("c",))


def test_no_more_engines_are_evicted_than_needed() -> None:
    running = [engine("a", 2, last_used=1.0), engine("b", 2, last_used=2.0), engine("c", 2, last_used=3.0)]
    assert decide_who(4, 1, *running) == (Verdict.EVICT, ("a", "b"))


def test_several_idle_engines_are_evicted_before_a_busy_one() -> None:
    running = [engine("a", 2, last_used=1.0), engine("b", 2, last_used=2.0), engine("c", 4, in_flight=1)]
    assert decide_who(4, 0, *running) == (Verdict.EVICT, ("a", "b"))


def test_a_busy_engine_serves_for_a_while_before_eviction() -> None:
    busy = engine("a", 4, in_flight=3, ready_since=95.0)
    assert decide_who(4, 0, busy) == (Verdict.WAIT, ())
    assert decide_who(4, 0, busy, now=105.0) == (Verdict.EVICT, ("a",))


def test_an_idle_engine_is_evicted_at_once() -> None:
    assert decide_who(4, 0, engine("a", 4, ready_since=99.9)) == (Verdict.EVICT, ("a",))


def test_no_other_engine_is_evicted_while_one_is_leaving() -> None:
    assert decide_who(4, 0, engine("a", 4, is_leaving=True), engine("b", 4)) == (Verdict.WAIT, ())


def test_a_starting_engine_is_waited_for() -> None:
    assert decide_who(4, 0, engine("a", 4, ready_since=None)) == (Verdict.WAIT, ())


def test_an_unmanaged_engine_is_never_evicted() -> None:
    assert decide_who(4, 0, engine("a", 4, may_go=False)) == (Verdict.NEVER, ())


def test_a_model_that_would_not_fit_anyway_evicts_nothing() -> None:
    assert decide_who(9, 0, engine("a", 4), engine("b", 4)) == (Verdict.NEVER, ())


def test_memory_of_the_gpu_and_ram_must_both_be_enough() -> None:
    need = Memory(gpus=(4,), ram_bytes=4)
    ram_only = Running(name="a", holds=Memory(ram_bytes=8), in_flight=0, last_used=0, ready_since=0)
    gpu_only = Running(name="b", holds=Memory(gpus=(8,)), in_flight=0, last_used=1, ready_since=0)
    free = Memory(gpus=(0,), ram_bytes=4)
    assert choose(need, free, [ram_only, gpu_only], now=9, least_service_s=0).victims == ("b",)


def test_victims_always_free_enough_and_each_of_them_is_needed() -> None:
    verdicts = set()
    for seed in range(300):
        draw = random.Random(seed)
        running = [
            engine(str(i), draw.randint(1, 8), last_used=draw.random(), in_flight=draw.randint(0, 1),
                   may_go=draw.random() < 0.8, is_leaving=draw.random() < 0.1)
            for i in range(draw.randint(0, 9))
        ]  # fmt: skip
        free, need = ram(draw.randint(0, 4)), ram(draw.randint(1, 20))
        choice = choose(need, free, running, now=100.0, least_service_s=10.0)
        verdicts.add(choice.verdict)
        if choice.verdict is Verdict.EVICT:
            leaving = total([one.holds for one in running if one.is_leaving])
            freed = [one.holds for one in running if one.name in choice.victims]
            assert all(one.may_go and not one.is_leaving for one in running if one.name in choice.victims)
            assert (free + leaving + total(freed)).holds(need)
            for i in range(len(freed)):
                assert not (free + leaving + total(freed[:i] + freed[i + 1 :])).holds(need)
        if choice.verdict is Verdict.NEVER:
            movable = total([one.holds for one in running if one.may_go or one.is_leaving])
            assert not (free + movable).holds(need)
    assert verdicts == set(Verdict)


def test_many_engines_are_evicted_over_several_rounds() -> None:
    running = [engine(f"{i:02}", 1, last_used=float(i)) for i in range(30)]
    verdict, victims = decide_who(20, 0, *running)
    assert verdict is Verdict.EVICT and victims == tuple(f"{i:02}" for i in range(10))


def test_backoff_doubles_up_to_a_limit() -> None:
    """After good service the failure count is 0, and there is no backoff."""
    timing = Timing(back_off_s=10, most_back_off_s=60)
    assert [timing.back_off(n) for n in range(6)] == [0, 10, 20, 40, 60, 60]


def test_secrets_and_hop_by_hop_headers_are_not_forwarded() -> None:
    given = [
        (b"authorization", b"Bearer secret"), (b"cookie", b"session=1"), (b"host", b"manager"), (b"te", b"trailers"),
        (b"connection", b"keep-alive, X-Hop"), (b"x-hop", b"1"), (b"content-length", b"9"), (b"accept", b"*/*"),
        (b"x-request-id", b"7"),
    ]  # fmt: skip
    assert passed_on(given) == [(b"accept", b"*/*"), (b"x-request-id", b"7")]
    answer = [(b"transfer-encoding", b"chunked"), (b"content-type", b"text/plain"), (b"server", b"uvicorn")]
    assert passed_back(answer) == [(b"content-type", b"text/plain")]
    assert passed_back(answer, length=5) == [(b"content-type", b"text/plain"), (b"content-length", b"5")]


def test_without_a_memory_limit_a_model_needs_less_than_it_takes(llama: object) -> None:
    settings = {"gpu": "24GiB", "ram": 64 * GiB, "max_model_len": 4096}
    free = need_of(plan_for(str(llama), settings), settings)
    assert 0 < free.least.gpu_bytes < free.takes.gpu_bytes <= 24 * GiB
    limited = {**settings, "gpu_memory": 8 * GiB}
    need = need_of(plan_for(str(llama), limited), limited)
    assert need.least.gpu_bytes == need.takes.gpu_bytes == 8 * GiB


def test_on_a_cpu_everything_needed_is_ram(llama: object) -> None:
    settings = {"device": "cpu", "gpu_memory": GiB, "ram": 8 * GiB, "offload_ram": 0, "max_model_len": 4096}
    need = need_of(plan_for(str(llama), settings), settings)
    assert need.least.gpu_bytes == need.takes.gpu_bytes == 0 and need.least.ram_bytes > GiB


def test_a_model_that_cannot_fit_is_refused_in_the_plans_words(llama: object) -> None:
    settings = {"device": "cpu", "gpu_memory": 1 << 20, "ram": 4 * GiB}
    need = need_of(plan_for(str(llama), settings), settings)
    assert need == Need(refused=need.refused) and "does not fit" in need.refused and need.least == NOTHING
