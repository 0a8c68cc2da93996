"""When requests that return get their first tokens, beside one that decodes and on an idle engine, in virtual time."""

import pytest

from tests.simulated_copies import BLOCK_BYTES
from tests.virtual_engine import LOAD_BYTES_PER_S, PREFILL_TOKENS_PER_S, SMALL_STEP_S, Asked, VirtualEngine

NEW = 16
PREFILL_S = NEW / PREFILL_TOKENS_PER_S
LOAD_S = 10 * BLOCK_BYTES / LOAD_BYTES_PER_S
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["one step at a time", "two in flight"])


def conversation(number: int, length: int) -> list[int]:
    return [100 * number + i for i in range(length)]


def returning(
    monkeypatch: pytest.MonkeyPatch,
    offsets: list[float],
    *,
    asynchronous: bool,
    busy: bool,
    length: int = 40,
    new: int = NEW,
) -> tuple[list[Asked], Asked | None]:
    """Conversations in RAM return at these times. Another request decodes, or none."""
    engine = VirtualEngine(monkeypatch, asynchronous=asynchronous)
    for number in range(len(offsets)):
        engine.ask(conversation(number + 1, length), 1)
        engine.run()
    engine.run(until=engine.clock.now + 1)
    engine.forget_gpu()
    other = engine.ask([3, 4, 5, 6], 50) if busy else None
    start = engine.clock.now + (20 * SMALL_STEP_S if busy else 1.0)
    answers = []
    for number, offset in enumerate(offsets):
        engine.run(until=start + offset)
        answers.append(engine.ask(conversation(number + 1, length) + [7 * number + i for i in range(new)], 2))
    engine.run()
    assert engine._worker.stats.data["load_bytes"] >= len(offsets) * length // 4 * BLOCK_BYTES, "not all came from RAM"
    return answers, other


def only_when_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is without any of this."""
    for name in ("_ANNOUNCE_AHEAD_S", "_IDLE_AHEAD_S"):
        monkeypatch.setattr(f"overspill.kv.worker.{name}", 0.0)


@MODES
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_early_announcement_gives_an_earlier_first_token(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool, busy: bool
) -> None:
    (ahead,), other = returning(monkeypatch, [0.0], asynchronous=asynchronous, busy=busy)
    only_when_over(monkeypatch)
    (late,), other_then = returning(monkeypatch, [0.0], asynchronous=asynchronous, busy=busy)
    assert LOAD_S + PREFILL_S < ahead.first_token_s <= late.first_token_s
    if asynchronous or not busy:  # else what a step hides is less than the time to the next look
        assert ahead.first_token_s < late.first_token_s
    if other is not None and other_then is not None:
        assert other.longest_pause_s <= other_then.longest_pause_s + SMALL_STEP_S, "the other one was kept waiting"


@MODES
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("offsets", [[0.0, 0.0, 0.0], [0.0, 0.013, 0.029]], ids=["at once", "soon after"])
def test_each_returning_request_gets_its_token_once_computed(
    monkeypatch: pytest.MonkeyPatch, offsets: list[float], asynchronous: bool, busy: bool
) -> None:
    answers, _ = returning(monkeypatch, offsets, asynchronous=asynchronous, busy=busy)
    begin = answers[0].at
    firsts = [answer.tokens_at[0] - begin for answer in answers]
    # A load, then the computations, and for each some small steps until it is known and scheduled.
    assert firsts[0] < LOAD_S + PREFILL_S + 6 * SMALL_STEP_S
    assert max(firsts) < LOAD_S + 3 * PREFILL_S + 14 * SMALL_STEP_S


@MODES
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_small_returning_requests_are_computed_together(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool, busy: bool
) -> None:
    answers, _ = returning(monkeypatch, [0.0] * 6, asynchronous=asynchronous, busy=busy, length=8, new=1)
    assert len({answer.tokens_at[0] for answer in answers}) <= 4
