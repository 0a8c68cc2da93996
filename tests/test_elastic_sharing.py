"""Two real engines under a manager share one card: memory follows requests, and no answer changes."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from overspill.kv.ledger import Account, Ledger
from overspill.kv.sizes import MiB
from overspill.manager.grants import committed
from overspill.processes import family, processes
from tests.chat_model import make_chat_model
from tests.engine import random_prompt, stock
from tests.managed import Managed, managed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="starts engines of vLLM's CPU build")

# Of 24 MiB, weights take 2.75; a request of the full length takes 2 MiB of KV, and eight of them most of the rest.
CARD = 22 * MiB
SETTINGS: dict[str, Any] = {
    "max_model_len": 1024, "gpu_memory": "24MiB", "ram": "5GiB", "offload_ram": "64MiB", "dtype": "float32",
    "max_num_seqs": 8, "enforce_eager": True, "elastic": True, "kv_options": "load=always,verify=all",
}  # fmt: skip
PROMPTS = [random_prompt(seed, 800 + 10 * seed) for seed in range(8)]
MAX_TOKENS = 32
GRANTS = int(os.environ.get("SOAK_GRANTS", "500"))


class Sharing:
    def __init__(self, manager: Managed, ledger: Ledger) -> None:
        self.manager, self.ledger = manager, ledger
        self.expected: dict[str, list[list[int]]] = {}
        self.most_committed = self.grants = 0
        self.worst: list[Account] = []
        self.refused = ""
        self._end = threading.Event()

    def add(self, name: str, seed: int) -> None:
        source = make_chat_model(self.manager.models / name, seed=seed)
        answers = stock(source, PROMPTS, MAX_TOKENS)
        self.expected[name] = [list(answer.tokens) for answer in answers]
        with self.manager.client() as client:
            added = client.post("/api/models", json={"name": name, "source": str(source), **SETTINGS})
            assert added.status_code == 201, added.text

    def watch(self) -> None:
        """Rows are read one after the other, and memory may move meanwhile: what two readings agree on was so."""
        seen = list(self.ledger.accounts().values())
        while not self._end.wait(0.005):
            before, seen = seen, list(self.ledger.accounts().values())
            known = {one.pid: one.granted for one in before}
            self.grants += sum(one.granted != known.get(one.pid, one.granted) for one in seen)  # not of a start
            if memory(before) == memory(seen) and (now := committed(seen)) > self.most_committed:
                self.most_committed, self.worst = now, seen

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self.watch)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()
        assert 0 < self.most_committed <= CARD, self.worst

    def ask(self, name: str, number: int) -> bool:
        """Whether it was answered; the answer is what an engine alone gives."""
        asked = {
            "model": name, "prompt": PROMPTS[number], "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        try:
            with self.manager.client() as client:
                answer = client.post("/v1/completions", json=asked)
        except httpx.TransportError:
            return False
        if answer.status_code != 200:
            self.refused = answer.text
            return False
        assert answer.json()["choices"][0]["token_ids"] == self.expected[name][number], (name, number)
        return True

    def burst(self, name: str, numbers: list[int]) -> list[bool]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda number: self.ask(name, number), numbers))

    def account(self, name: str) -> Account:
        """Waits until the engine is there, and the manager knows it."""
        found: list[Account] = []

        def is_there() -> bool:
            with self.manager.client() as client:
                pid = client.get(f"/api/engines/{name}").json()["pid"]
            below = family(pid, list(processes())) if pid else []
            found[:] = [one for one in self.ledger.accounts().values() if one.pid in below]
            return bool(found)

        until(is_there)
        return found[0]

    def busy(self, name: str, other: str) -> None:
        """Requests for one of them until it has most of the card, and the other what it cannot do without."""
        while self.account(name).held < 0.7 * CARD or self.account(other).held > 0.3 * CARD:
            assert all(self.burst(name, list(range(8)) * 2))


def until(is_so: Any) -> None:
    deadline = time.monotonic() + 240
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextlib.contextmanager
def sharing(folder: Path) -> Iterator[Sharing]:
    ledger = Ledger(folder / "state/overspill/ledgers/cpu.ledger")
    with managed(folder, "--gpu-memory", f"{CARD}B") as manager:
        both = Sharing(manager, ledger)
        for seed, name in enumerate(("a", "b")):
            both.add(name, seed)
        with both.watching():
            yield both
    ledger.close()


@pytest.mark.timeout(900)
def test_memory_moves_between_real_engines_and_no_answer_changes(tmp_path: Path) -> None:
    with sharing(tmp_path) as both:
        assert both.ask("a", 0)
        alone = both.account("a")
        assert alone.most > 0.9 * CARD
        until(lambda: both.account("a").held == alone.most)
        assert both.ask("b", 0), "for which the first one shrank"
        assert both.account("a").pid == alone.pid
        both.busy("a", "b")
        both.busy("b", "a")
        both.manager.process.kill()
        both.manager.process.wait()
        before = [account.granted for account in by_age(both.ledger)]
        time.sleep(1)
        assert [account.granted for account in by_age(both.ledger)] == before and all(before)
        both.manager.kill_and_start_again()
        both.busy("a", "b")
        os.kill(both.account("a").pid, signal.SIGKILL)
        until(lambda: len(both.ledger.accounts()) == 1)
        until(lambda: both.account("b").held == both.account("b").most)
        assert all(both.burst("b", list(range(8))))
        until(lambda: both.ask("a", 1))
        assert "Traceback" not in both.manager.out.read_text()


def memory(accounts: list[Account]) -> list[tuple[int, int, int]]:
    return [(one.pid, one.granted, one.held) for one in accounts]


def by_age(ledger: Ledger) -> list[Account]:
    return sorted(ledger.accounts().values(), key=lambda one: one.started)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_bursts_and_kills_lose_nothing_but_the_killed_engines_requests(tmp_path: Path) -> None:
    draw = random.Random(7)
    with sharing(tmp_path) as both:
        while both.grants < GRANTS:
            names = draw.choice([("a",), ("b",), ("a", "b")])
            victim = draw.choice(["", "", "", "", "manager", "a", "b"])
            numbers = [draw.randrange(8) for _ in range(draw.randrange(4, 24))]
            with ThreadPoolExecutor(2) as pool:
                bursts = {name: pool.submit(both.burst, name, numbers) for name in names}
                time.sleep(draw.random() * 2)
                if victim == "manager":
                    both.manager.kill_and_start_again()
                elif victim:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(both.account(victim).pid, signal.SIGKILL)
                for name, burst in bursts.items():
                    assert all(burst.result()) or victim in ("manager", name), (victim, name, both.refused)
            # One that was killed soon after its start is not started again at once.
            for name in {*names, victim} & {"a", "b"}:
                until(lambda name=name: both.ask(name, 0))
