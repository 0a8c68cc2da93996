"""Many requests with random reuse, lengths and aborts on an engine with little GPU, with and without offload."""

from pathlib import Path
from typing import Any

import pytest

from overspill.kv.spill import worker as spill_worker
from tests.engine import engine, spilling
from tests.late_streams import LateStreams
from tests.test_soak import answer_all, asks, mismatch

OFFLOAD = {"host_bytes": 70 * (64 << 10), "load": "always", "verify": "all"}


def run(model: Path, *, count: int, seed: int, **options: Any) -> None:
    wanted = asks(count, seed)
    with engine(model, blocks=300) as plain:
        expected = answer_all(plain, wanted, seed)
    # Room for some of the eight requests at a time: blocks change tiers, requests are preempted.
    with engine(model, spilling(resident=28, spilled=28, **options), max_model_len=700) as spills:
        answers = answer_all(spills, wanted, seed)
        compared = sorted(answers.keys() & expected.keys())
        assert len(compared) > 0.8 * count
        wrong = {n: reason for n in compared if (reason := mismatch(answers[n], expected[n]))}
        assert not wrong, f"{len(wrong)} of {len(compared)}: {dict(list(wrong.items())[:3])}"
        assert spills.metric("spilled_steps") > count / 2 and spills.metric("plain_steps") > 0
        assert spills.preemptions() > 0
        spills.drain()
        assert spills.gpu_pool.get_num_free_blocks() == len(spills.gpu_pool.blocks) - 1, "blocks leaked"


@pytest.mark.parametrize("options", [{}, {**OFFLOAD, "store": "eager"}], ids=["alone", "with offload"])
def test_random_requests_on_a_small_gpu_match_plain_answers(
    llama: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(spill_worker, "HostStreams", LateStreams)
    run(llama, count=80, seed=3, **options)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("schedule", ["eager", "late"])
@pytest.mark.parametrize(
    "options",
    [{}, {"spill_share": 0.1}, {**OFFLOAD, "store": "eager"}, {**OFFLOAD, "store": "lazy"}],
    ids=["alone", "small share", "with eager offload", "with lazy offload"],
)
def test_soak(llama: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], schedule: str) -> None:
    if schedule == "late":
        monkeypatch.setattr(spill_worker, "HostStreams", LateStreams)
    run(llama, count=400, seed=11, **options)
