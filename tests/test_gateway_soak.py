"""OpenAI's client through the gateway of a real manager, to two real engines of which one fits at a time."""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from overspill.kv.sizes import GiB, MiB
from tests.chat_model import make_chat_model
from tests.engine import ROUNDING
from tests.managed import SETTINGS, Managed, managed

NAMES = ("first", "second")
NUM_CLIENTS, NUM_REQUESTS, NUM_PROMPTS, LONGEST_ANSWER = 16, 13, 10, 24
LOAD_S = 900.0


@dataclass(frozen=True)
class Expected:
    """What an engine says that nobody else asks."""

    words: tuple[str, ...]
    tied: tuple[bool, ...]
    """Where rounding alone decides between the two best, so that what follows may differ."""

    def mismatch(self, got: list[str], wanted: int) -> str:
        for position, (mine, theirs, is_tied) in enumerate(zip(got, self.words, self.tied, strict=False)):
            if mine != theirs:
                return "" if is_tied else f"token {position}: {mine} != {theirs}"
        return "" if len(got) == wanted else f"{len(got)} tokens instead of {wanted}"


def prompt(number: int) -> str:
    draw = random.Random(number)
    return " ".join(f"t{draw.randrange(3, 512)}" for _ in range(draw.randrange(20, 600)))


def asked(num_tokens: int) -> dict[str, Any]:
    return {
        "max_tokens": num_tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "skip_special_tokens": False},
    }


async def expect(client: openai.AsyncOpenAI, model: str, number: int) -> Expected:
    answer = await client.completions.create(model=model, prompt=prompt(number), logprobs=2, **asked(LONGEST_ANSWER))
    told: Any = answer.choices[0].logprobs
    tops = [sorted(top.values(), reverse=True) for top in told.top_logprobs]
    return Expected(tuple(answer.choices[0].text.split()), tuple(best - next_ < ROUNDING for best, next_, *_ in tops))


class Client:
    """One of those that ask at once: each thing in turn, of either model."""

    def __init__(self, client: openai.AsyncOpenAI, expected: dict[tuple[str, int], Expected], seed: int) -> None:
        self.client, self.expected, self.draw = client, expected, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def live(self) -> None:
        for _ in range(NUM_REQUESTS):
            model, number = self.draw.choice(NAMES), self.draw.randrange(NUM_PROMPTS)
            kind = self.draw.choice(("whole", "stream", "chat", "chat stream", "cancelled", "left"))
            await getattr(self, f"_{kind.replace(' ', '_')}")(model, number, self.draw.randint(1, LONGEST_ANSWER))
            self.outcomes[kind] += 1

    async def _whole(self, model: str, number: int, num_tokens: int) -> None:
        made = await self.client.completions.create(model=model, prompt=prompt(number), **asked(num_tokens))
        self._compare(model, number, num_tokens, made.choices[0].text)

    async def _stream(self, model: str, number: int, num_tokens: int) -> None:
        stream = await self.client.completions.create(
            model=model, prompt=prompt(number), stream=True, **asked(num_tokens)
        )
        texts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
        self._compare(model, number, num_tokens, "".join(texts))

    async def _chat(self, model: str, number: int, num_tokens: int) -> None:
        messages: Any = [{"role": "user", "content": prompt(number)}]
        made = await self.client.chat.completions.create(model=model, messages=messages, **asked(num_tokens))
        self._compare(model, number, num_tokens, made.choices[0].message.content or "")

    async def _chat_stream(self, model: str, number: int, num_tokens: int) -> None:
        messages: Any = [{"role": "user", "content": prompt(number)}]
        stream = await self.client.chat.completions.create(
            model=model, messages=messages, stream=True, **asked(num_tokens)
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        self._compare(model, number, num_tokens, "".join(texts))

    async def _cancelled(self, model: str, number: int, num_tokens: int) -> None:
        """While it waits for its model, or for its answer."""
        asking = asyncio.create_task(self.client.completions.create(model=model, prompt=prompt(number), **asked(3000)))
        await asyncio.sleep(self.draw.random() * 5)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking

    async def _left(self, model: str, number: int, num_tokens: int) -> None:
        """In the middle of a stream."""
        stream = await self.client.completions.create(model=model, prompt=prompt(number), stream=True, **asked(3000))
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == num_tokens:
                break
        await stream.close()

    def _compare(self, model: str, number: int, num_tokens: int, text: str) -> None:
        if problem := self.expected[model, number].mismatch(text.split(), num_tokens):
            self.wrong.append(f"{model}, prompt {number}: {problem}")


def states(manager: Managed) -> dict[str, dict[str, Any]]:
    with manager.client() as client:
        return {one["name"]: one for one in client.get("/api/engines").json()}


def in_memory() -> set[str]:
    """Files that live there: what an engine that ends must not leave."""
    return set(os.listdir("/dev/shm"))


@pytest.mark.soak
def test_two_hundred_mixed_requests_while_two_real_engines_swap(tmp_path: Path) -> None:
    shared_before = in_memory()
    # An engine holds 3 GiB for itself, so there is room for one.
    with managed(tmp_path, "--ram", "5GiB") as manager:
        for seed, name in enumerate(NAMES):
            make_chat_model(manager.models / name, seed=seed)
            settings = {**SETTINGS, "ttl": 8}
            with manager.client() as client:
                made = client.post("/api/models", json={"name": name, "source": str(manager.models / name), **settings})
                assert made.status_code in (200, 201), made.text
        own = psutil.Process(manager.process.pid)

        async def run() -> tuple[int, list[Client]]:
            connect = openai.AsyncOpenAI(base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=LOAD_S)
            async with connect as client:
                expected = {
                    (name, number): await expect(client, name, number)
                    for name in NAMES
                    for number in range(NUM_PROMPTS)
                }
                assert len({one.words for one in expected.values()}) == len(expected), "models that say the same"
                rss = own.memory_info().rss
                clients = [Client(client, expected, seed) for seed in range(NUM_CLIENTS)]
                async with asyncio.timeout(3000), asyncio.TaskGroup() as group:
                    for one in clients:
                        group.create_task(one.live())
                return rss, clients

        available = psutil.virtual_memory().available
        rss, clients = asyncio.run(run())
        assert not {problem for one in clients for problem in one.wrong}
        outcomes = sum((one.outcomes for one in clients), Counter[str]())
        assert outcomes.total() == NUM_CLIENTS * NUM_REQUESTS and min(outcomes.values()) > 10, outcomes
        with manager.client() as client:
            starts = Counter(run["model"] for run in client.get("/api/runs", params={"limit": 500}).json())
        assert min(starts[name] for name in NAMES) >= 3, f"hardly a swap: {starts}"
        print(f"answers {dict(outcomes)}, starts {dict(starts)}")

        # Its TTL passes, and nothing is left of either.
        deadline = time.monotonic() + 120
        while manager.others() or {one["state"] for one in states(manager).values()} != {"stopped"}:
            assert time.monotonic() < deadline, states(manager)
            time.sleep(0.5)
        assert in_memory() <= shared_before
        assert own.memory_info().rss < rss + 64 * MiB
        while psutil.virtual_memory().available < available - GiB // 2:
            assert time.monotonic() < deadline, "what the engines held is not free again"
            time.sleep(0.5)
        assert manager.end() == 0
