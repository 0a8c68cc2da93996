"""Which loads a step announces: those that have completed, or will soon."""

import pytest

from overspill.kv.copies import Transfer
from overspill.kv.host_memory import Verdict
from overspill.kv.jobs import LoadJob, StepJobs
from overspill.kv.worker import OffloadWorker
from tests.simulated_copies import Setup
from tests.simulated_engine import Engine

MB = 10**6
BUSY, IDLE = StepJobs(num_tokens=3), StepJobs()


class Scripted(Transfer):
    """Queued, with so many bytes left."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(1000 * MB)
        self._queued.set()
        self.left = num_bytes

    def done(self) -> bool:
        return self.left == 0

    def remaining_bytes(self) -> int:
        return self.left


def worker(*left: int, link: float = 50e9, asynchronous: bool = False) -> tuple[OffloadWorker, list[Scripted]]:
    """With a load for each number of bytes that are left of one."""
    made = Engine(Setup(asynchronous=asynchronous)).workers[0]
    transfers = [Scripted(num_bytes) for num_bytes in left]
    pending = iter(transfers)
    made._copier.load = lambda slots, blocks: next(pending)  # type: ignore[union-attr,method-assign,assignment]
    made.checksums.check = lambda slots: Verdict()  # type: ignore[union-attr,method-assign,assignment]
    made.load_bytes_per_s = link
    made.begin_step(StepJobs(loads=[LoadJob(i, "abc"[i], [i], [i]) for i in range(len(left))]))
    return made, transfers


@pytest.mark.parametrize(
    ("jobs", "ahead"), [(BUSY, 500 * MB), (IDLE, 5000 * MB)], ids=["10 ms if busy", "100 ms if idle"]
)
def test_a_load_is_announced_ahead(jobs: StepJobs, ahead: int) -> None:
    made, (transfer,) = worker(ahead + 1)
    made.idle_wait_s = 0.01
    assert made.results(jobs).finished_recving == set()
    transfer.left = ahead
    assert made.results(jobs).finished_recving == {"a"}
    assert made.results(jobs).finished_recving == set(), "it is announced once"


def test_loads_come_one_after_the_other() -> None:
    made, _ = worker(300 * MB, 300 * MB, 0)
    assert made.results(BUSY).finished_recving == {"a", "c"}


def test_an_idle_engine_waits_for_one_load_and_for_what_comes_soon_after() -> None:
    made, _ = worker(3000 * MB, 500 * MB, 1)
    assert made.results(IDLE).finished_recving == {"a", "b"}
    made, _ = worker(6000 * MB, 0)
    assert made.results(IDLE).finished_recving == {"b"}, "it has completed; the first would take too long"


def test_on_a_link_not_yet_measured_a_load_ends_first() -> None:
    made, (transfer,) = worker(1, link=0.0)
    assert made.results(BUSY).finished_recving == set()
    transfer.left, transfer.seconds = 0, 0.5
    assert made.results(BUSY).finished_recving == {"a"}
    assert made.load_bytes_per_s == 2000 * MB


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_idle_step_after_an_announcement_does_not_wait(asynchronous: bool) -> None:
    """Between two idle steps in flight vLLM has not scheduled what the first of them announced."""
    made, _ = worker(0, 6000 * MB, asynchronous=asynchronous)
    made.idle_wait_s = 0.2
    waited = 0
    wait = made._wait_for_a_load

    def counted() -> None:
        nonlocal waited
        waited += 1
        wait()

    made._wait_for_a_load = counted  # type: ignore[method-assign]
    assert made.results(IDLE).finished_recving == {"a"}
    assert made.results(IDLE).finished_recving == set()
    assert waited == (1 if asynchronous else 2)
