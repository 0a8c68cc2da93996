"""Runs a workload against a server: sends what the script says, and keeps what is answered."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from overspill.bench.client import Answer, Client, Refused, RequestFailed, Unavailable
from overspill.bench.counters import Counters, difference, read_counters
from overspill.bench.errors import CannotBench
from overspill.bench.findings import find
from overspill.bench.memory import MemorySampler
from overspill.bench.outcome import Outcome
from overspill.bench.part import Part, joined, part_as_json, part_from_json
from overspill.bench.progress import Progress, progress_of
from overspill.bench.prompts import Vocabulary, find_vocabulary, ids_as_text
from overspill.bench.script import Chain, Piece, Script, Step, require_fit, write_script
from overspill.bench.target import Target, find_served
from overspill.bench.workload import Workload

_WATCH_S = 0.1
_PROGRESS_S = 0.5
_SAVE_S = 10.0
# The server counts a step some moments after it has sent its tokens.
_COUNTED_AFTER_S = 0.3

Save = Callable[[dict[str, Any]], None]


def measure(
    target: Target,
    workload: Workload,
    *,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    save: Save | None = None,
    resume: Mapping[str, Any] | None = None,
) -> Outcome:
    """`save` gets what is finished every ten seconds; that, and the `part` of an outcome, can be given as `resume`.

    Raises `CannotBench` if it is stopped before anything could be measured.
    """
    served = find_served(target)
    require_fit(workload, seed, served.max_model_len)
    script = write_script(workload, seed)
    earlier = None if resume is None else part_from_json(resume)
    vocabulary = find_vocabulary(served.root) if earlier is None else earlier.vocabulary
    asyncio.run(_try(target, vocabulary, seed, stop))
    before = _counters(target)
    with MemorySampler(pid=target.pid, is_here=target.is_here) as memory:
        run = _Run(target, script, vocabulary, seed, earlier, memory)
        run.save, run.on_progress, run.stop = save, on_progress, stop
        asyncio.run(run.run())
    after = None if run.is_server_gone else _counters(target)
    if run.refusal is not None and not run.answers:
        raise CannotBench(f"the server at {target.url} refused the first request: {run.refusal}")
    part = run.part(before, after)
    if earlier is not None:
        part = joined(earlier, part)
    return find(target, script, part, run.problem, len(run.failures), is_resumed=earlier is not None)


async def _try(target: Target, vocabulary: Vocabulary, seed: int, stop: threading.Event | None) -> None:
    """One short request, so that what every request would meet is met before anything is measured."""
    async with Client(target, began=time.perf_counter()) as client:
        # A request has no time limit, and the first one may compile kernels or hang: only `stop` can end it.
        asking = asyncio.create_task(client.ask(vocabulary.draw(Piece("try", 8), seed), 1))
        stopping = asyncio.create_task(_until_set(stop))
        try:
            await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise CannotBench(f"it was stopped before the server at {target.url} had answered a short request")
            asking.result()
        except RequestFailed as error:
            raise CannotBench(f"the server at {target.url} does not answer a short request: {error}") from error
        finally:
            await _cancelled(asking, stopping)


async def _until_set(stop: threading.Event | None) -> None:
    while stop is None or not stop.is_set():
        await asyncio.sleep(_WATCH_S)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Ended for certain; what they came to was looked at before."""
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _counters(target: Target) -> Counters | None:
    time.sleep(_COUNTED_AFTER_S)
    return read_counters(target)


class _Run:
    """One part. Ends when all is answered, when it is stopped, or when going on makes no sense."""

    save: Save | None
    on_progress: Callable[[Progress], None] | None
    stop: threading.Event | None

    def __init__(
        self, target: Target, script: Script, vocabulary: Vocabulary, seed: int, earlier: Part | None,
        memory: MemorySampler,
    ) -> None:  # fmt: skip
        self._target, self._script, self._vocabulary, self._memory = target, script, vocabulary, memory
        self._first_part = earlier
        self._earlier: Mapping[int, Answer] = {} if earlier is None else earlier.answers
        self._num_requests = len(script.steps)
        left = [chain for chain in script.chains if any(step.index not in self._earlier for step in chain.steps)]
        self._chains = left
        self._first_start_s = min((chain.start_s for chain in left), default=0.0)
        # Before anything is timed: drawing takes longer than sending.
        self._texts = {
            piece: vocabulary.draw(piece, seed) for chain in left for step in chain.steps for piece in step.pieces
        }
        self._seed = seed
        self._began = 0.0
        self.answers: dict[int, Answer] = {}
        self.failures: dict[int, str] = {}
        self.problem: str | None = None
        self.refusal: str | None = None
        self.is_server_gone = False
        self.duration = 0.0

    async def run(self) -> None:
        self._places = asyncio.Semaphore(self._script.concurrency or max(1, len(self._chains)))
        self._checking = asyncio.Lock()
        self._began = time.perf_counter()
        async with Client(self._target, began=self._began) as client:
            work = asyncio.create_task(self._all(client))
            watch = asyncio.create_task(self._watch())
            try:
                await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
                self.duration = time.perf_counter() - self._began
                if work.done() and not work.cancelled():
                    work.result()
                if watch.done():
                    watch.result()
            finally:
                await _cancelled(work, watch)
        self._tell_progress()
        if self.problem is None and self.failures:
            left = self._num_requests - len(self._earlier) - len(self.answers) - len(self.failures)
            and_left = f", and {left} that would have followed were not sent" if left else ""
            first = next(iter(self.failures.values()))
            self.problem = f"{len(self.failures)} of {self._num_requests} requests failed{and_left}; the first: {first}"

    async def _all(self, client: Client) -> None:
        await asyncio.gather(*(self._converse(client, chain) for chain in self._chains))

    def part(self, before: Counters | None, after: Counters | None) -> Part:
        return Part(
            vocabulary=self._vocabulary, duration=self.duration, answers=self.answers,
            counters=difference(before, after), samples=self._memory.samples,
        )  # fmt: skip

    async def _converse(self, client: Client, chain: Chain) -> None:
        said = ""
        has_sent = False
        for step in chain.steps:
            texts = [said] if step.continues else []
            prompt = ",".join([*texts, *(self._texts[piece] for piece in step.pieces)])
            answer = self._earlier.get(step.index)
            if answer is None:
                # Of what is resumed, nobody waits for a conversation to return that has waited long enough.
                await asyncio.sleep(step.wait_s if has_sent else self._until(chain.start_s))
                async with self._places:
                    answer = await self._ask(client, step, prompt)
                has_sent = True
            if answer is None:
                return
            said = f"{prompt},{self._answer_text(step, answer)}"

    def _until(self, start_s: float) -> float:
        return max(0.0, self._began + start_s - self._first_start_s - time.perf_counter())

    def _answer_text(self, step: Step, answer: Answer) -> str:
        if answer.tokens:
            return ids_as_text(answer.tokens)
        return self._vocabulary.draw(Piece(f"answer-{step.index}", step.output), self._seed)

    async def _ask(self, client: Client, step: Step, prompt: str) -> Answer | None:
        try:
            self.answers[step.index] = answer = await client.ask(prompt, step.output)
            return answer
        except Refused as error:
            self.refusal = str(error)
            self._halt(f"the server refused a request: {error}")
        except Unavailable as error:
            async with self._checking:
                if self.problem is None and not await client.is_well():
                    self.is_server_gone = True
                    self._halt(f"the server at {self._target.url} is gone: {error}")
            if not self.is_server_gone:
                self.failures[step.index] = str(error)
        except RequestFailed as error:
            self.failures[step.index] = str(error)
        return None

    def _halt(self, why: str) -> None:
        if self.problem is None:
            done = len(self._earlier) + len(self.answers)
            self.problem = f"{why}; {done} of {self._num_requests} requests were answered"

    async def _watch(self) -> None:
        """Until it is halted."""
        told = saved = time.monotonic()
        while self.problem is None:
            await asyncio.sleep(_WATCH_S)
            if self.stop is not None and self.stop.is_set():
                self._halt("it was stopped")
            now = time.monotonic()
            if now - told >= _PROGRESS_S:
                told = now
                self._tell_progress()
            if self.save is not None and now - saved >= _SAVE_S:
                saved = now
                self.duration = time.perf_counter() - self._began
                part = self.part(None, None)
                whole = part if self._first_part is None else joined(self._first_part, part)
                self.save(part_as_json(whole, self._script))

    def _tell_progress(self) -> None:
        if self.on_progress is None:
            return
        sample = self._memory.last
        self.on_progress(
            progress_of(
                done=len(self._earlier) + len(self.answers), total=self._num_requests, earlier=len(self._earlier),
                elapsed_s=time.perf_counter() - self._began, gpu_bytes=None if sample is None else sample.gpu_bytes,
                ram_bytes=None if sample is None else sample.ram_bytes,
            )
        )  # fmt: skip
