"""Measurements of one workload on one server: sends the script's requests and keeps the answers."""

import asyncio
import base64
import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from overspill.measure import CannotMeasure, MeasureError
from overspill.measure.conversations import conversation_script, tokenizer_of
from overspill.measure.memory import MemorySampler, Sample, peak, thinned
from overspill.measure.metrics import (
    SERVED,
    Counters,
    difference,
    phase_metrics,
    read_counters,
    request_columns,
    serving_metrics,
    total,
)
from overspill.measure.progress import Progress
from overspill.measure.target import Answer, Client, Refused, RequestFailed, Target, Unavailable, find_served
from overspill.measure.workload import (
    Chain,
    Piece,
    Script,
    Step,
    Vocabulary,
    Workload,
    find_vocabulary,
    ids_as_text,
    require_fit,
    write_script,
)

Tier = Literal["offload", "spill"]
TIERS: tuple[Tier, ...] = ("offload", "spill")
_WATCH_S = 0.1
_PROGRESS_S = 0.5
# The server counts a step some moments after sending its tokens.
_COUNTED_AFTER_S = 0.3
# For counters at the end of a stopped run, which somebody waits for, perhaps because the server hangs.
_PATIENCE_S = 3.0

# By tier: the metric that proves its use, and the Prometheus series behind it.
_PROOFS: dict[Tier, tuple[str, str]] = {
    "offload": ("tokens_from_ram", "vllm:external_prefix_cache_hits_total"),
    "spill": ("spill_in_bytes", "overspill_spill_in_bytes_total"),
}
_ADVICE: dict[Tier, str] = {
    "offload": "Send more tokens than the GPU's KV cache holds, then send them again; and serve with --offload-ram",
    "spill": "Send a request longer than the GPU's KV cache holds; and serve with a --max-model-len that needs --ram",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    metrics: dict[str, Any]
    """Values by the names of `vllm bench serve`, then Overspill's own; None where unknown."""
    is_complete: bool
    """Whether every request was answered."""
    problem: str | None = None
    """Reason why the measurement is incomplete."""
    answers: list[str]
    """Hash of each answer's tokens, in the order of the requests; empty for an unanswered one."""
    notes: tuple[str, ...] = ()
    """Caveats for a reader of the numbers."""
    part: dict[str, Any] | None = None
    """State from which `measure` resumes an incomplete measurement."""


def require_tier(outcome: Outcome, expects: Tier | None) -> str | None:
    """Complaint if the expected tier was not used, or if its use is unknown; else None."""
    if expects is None:
        return None
    name, what = _PROOFS[expects]
    counted = outcome.metrics.get(name)
    if counted is None:
        return f"whether {expects} was used is not known: the server did not count {what}"
    if not counted:
        return f"{expects} was not used: {what} did not grow. {_ADVICE[expects]}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    vocabulary: Vocabulary
    """Token ids that prompts are drawn from."""
    duration: float
    answers: Mapping[int, Answer]
    """Answers by request index."""
    counters: Mapping[str, int | float | None]
    samples: list[Sample]


def joined(earlier: Part, later: Part) -> Part:
    """Both parts as one, as if the later had followed without a break."""
    shift = earlier.duration
    moved = {index: replace(each, started_s=each.started_s + shift) for index, each in later.answers.items()}
    return Part(
        vocabulary=later.vocabulary,
        duration=shift + later.duration,
        answers={**earlier.answers, **moved},
        counters=total(earlier.counters, later.counters) if earlier.counters else later.counters,
        samples=[*earlier.samples, *(replace(each, t=round(each.t + shift, 2)) for each in later.samples)],
    )


def part_as_json(part: Part, script: Script) -> dict[str, Any]:
    """A part as JSON, packed: there may be a million inter-token times."""
    needed = _needed(script, part.answers)
    answers = {index: each if index in needed else replace(each, tokens=None) for index, each in part.answers.items()}
    packed = msgspec.msgpack.encode(replace(part, answers=answers, samples=thinned(part.samples)))
    return {"packed": base64.b64encode(zlib.compress(packed)).decode()}


def part_from_json(kept: Mapping[str, Any]) -> Part:
    try:
        return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(kept["packed"])), type=Part)
    except (KeyError, ValueError, zlib.error) as error:
        raise MeasureError(f"the stored first part cannot be read ({error!r:.80}); measure it anew") from error


def _needed(script: Script, answers: Mapping[int, Answer]) -> set[int]:
    """Indices of requests whose answers a prompt that is still to be sent may begin with."""
    unfinished = [
        chain for chain in script.chains if any(step.continues and step.index not in answers for step in chain.steps)
    ]
    return {step.index for chain in unfinished for step in chain.steps}


def measure(
    target: Target,
    workload: Workload,
    *,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    resume: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run a workload on a server; `resume` takes the `part` of an incomplete outcome.

    Raises `CannotMeasure` if stopped before anything could be measured.
    """
    stop = stop or threading.Event()
    served = find_served(target)
    script, drawn_notes = _script(target, workload, seed, served.max_model_len)
    nothing = Part(vocabulary=find_vocabulary(served.root), duration=0.0, answers={}, counters={}, samples=[])
    earlier = nothing if resume is None else part_from_json(resume)
    asyncio.run(_try(target, earlier.vocabulary, seed, stop))
    before = _counters(target)
    with MemorySampler(pid=target.pid, is_here=target.is_here) as memory:
        run = _Run(target, script, seed, earlier, memory, stop, on_progress)
        asyncio.run(run.run())
    after = None if run.is_server_gone else _counters(target, **({"timeout_s": _PATIENCE_S} if stop.is_set() else {}))
    if run.refusal is not None and not run.answers:
        raise CannotMeasure(f"the server at {target.url} refused the first request: {run.refusal}")
    part = run.part(before, after)
    found = find(target, script, part, run.problem, len(run.failures), is_resumed=resume is not None)
    return replace(found, notes=(*drawn_notes, *found.notes))


def _script(target: Target, workload: Workload, seed: int, max_model_len: int | None) -> tuple[Script, list[str]]:
    if not workload.file:
        require_fit(workload, seed, max_model_len)
        return write_script(workload, seed), []
    with tokenizer_of(target) as tokenize:
        return conversation_script(workload, seed, max_model_len, tokenize)


async def _try(target: Target, vocabulary: Vocabulary, seed: int, stop: threading.Event) -> None:
    """Send one short request, so that errors every request would hit appear before anything is measured."""
    with contextlib.closing(Client(target, began=time.perf_counter())) as client:
        # A request has no time limit, and the first one may compile kernels or hang: only `stop` can end it.
        asking = asyncio.create_task(client.ask(vocabulary.draw(Piece("try", 8), seed), 1))
        stopping = asyncio.create_task(_until_set(stop))
        try:
            await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise CannotMeasure(f"it was stopped before the server at {target.url} had answered a short request")
            asking.result()
        except RequestFailed as error:
            raise CannotMeasure(f"the server at {target.url} does not answer a short request: {error}") from error
        finally:
            await _cancelled(asking, stopping)


async def _until_set(stop: threading.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(_WATCH_S)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they end; the caller has read their results."""
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _counters(target: Target, **how: float) -> Counters | None:
    time.sleep(_COUNTED_AFTER_S)
    return read_counters(target, **how)


class _Run:
    """Measures one part, until all is answered, a stop is requested, or continuing makes no sense."""

    def __init__(
        self, target: Target, script: Script, seed: int, earlier: Part, memory: MemorySampler, stop: threading.Event,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self._target, self._script, self._seed, self._memory = target, script, seed, memory
        self._stop, self._on_progress = stop, on_progress
        self._first_part, self._earlier = earlier, earlier.answers
        self._num_requests = len(script.steps)
        left = [chain for chain in script.chains if any(step.index not in self._earlier for step in chain.steps)]
        self._chains = left
        self._first_start_s = min((chain.start_s for chain in left), default=0.0)
        # Drawn before the clock starts: drawing takes longer than sending.
        pieces = {piece for chain in left for step in chain.steps for piece in step.pieces}
        self._texts = {piece: earlier.vocabulary.draw(piece, seed) for piece in pieces}
        self._began = self.duration = 0.0
        self.answers: dict[int, Answer] = {}
        self.failures: dict[int, str] = {}
        self.problem: str | None = None
        self.refusal: str | None = None
        self.is_server_gone = False

    async def run(self) -> None:
        self._places = asyncio.Semaphore(self._script.concurrency or max(1, len(self._chains)))
        self._checking = asyncio.Lock()
        self._began = time.perf_counter()
        with contextlib.closing(Client(self._target, began=self._began)) as client:
            work: asyncio.Future[Any] = asyncio.gather(*(self._converse(client, chain) for chain in self._chains))
            watch: asyncio.Future[Any] = asyncio.create_task(self._watch())
            try:
                await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
                self.duration = time.perf_counter() - self._began
                if work.done() and not work.cancelled():
                    work.result()
                if watch.done():
                    watch.result()
            finally:
                await _cancelled(work, watch)
        self._report_progress()
        if self.problem is None and self.failures:
            left = self._num_requests - len(self._earlier) - len(self.answers) - len(self.failures)
            and_left = f", and {left} more were not sent" if left else ""
            first = next(iter(self.failures.values()))
            self.problem = f"{len(self.failures)} of {self._num_requests} requests failed{and_left}; the first: {first}"

    def part(self, before: Counters | None, after: Counters | None) -> Part:
        """Everything finished so far, the earlier part included."""
        now = Part(
            vocabulary=self._first_part.vocabulary, duration=self.duration, answers=self.answers,
            counters=difference(before, after), samples=self._memory.samples,
        )  # fmt: skip
        return joined(self._first_part, now)

    async def _converse(self, client: Client, chain: Chain) -> None:
        said = ""
        has_sent = False
        for step in chain.steps:
            texts = [said] if step.continues else []
            prompt = ",".join([*texts, *(self._texts[piece] for piece in step.pieces)])
            answer = self._earlier.get(step.index)
            if answer is None:
                # After a resume, a returning conversation skips its think time: the break was long enough.
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
        return self._first_part.vocabulary.draw(Piece(f"answer-{step.index}", step.output), self._seed)

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
        """Report progress and watch for a stop until the run is halted."""
        reported = time.monotonic()
        while self.problem is None:
            await asyncio.sleep(_WATCH_S)
            if self._stop.is_set():
                self._halt("it was stopped")
            now = time.monotonic()
            if now - reported >= _PROGRESS_S:
                reported = now
                self._report_progress()

    def _report_progress(self) -> None:
        if self._on_progress is None:
            return
        sample = self._memory.last
        at = Progress(
            done=len(self._earlier) + len(self.answers), total=self._num_requests, earlier=len(self._earlier),
            elapsed_s=time.perf_counter() - self._began, gpu_bytes=None if sample is None else sample.gpu_bytes,
            ram_bytes=None if sample is None else sample.ram_bytes,
        )  # fmt: skip
        self._on_progress(at)


def find(
    target: Target, script: Script, part: Part, problem: str | None, failed: int, *, is_resumed: bool = False
) -> Outcome:
    steps, answers = script.steps, part.answers
    in_order = [answers[step.index] for step in steps if step.index in answers]
    is_complete = len(answers) == len(steps)
    metrics: dict[str, Any] = serving_metrics(in_order, duration=part.duration, failed=failed)
    metrics |= phase_metrics(script, answers)
    metrics |= part.counters
    metrics |= {
        "peak_gpu_bytes": peak(each.gpu_bytes for each in part.samples),
        "peak_ram_bytes": peak(each.ram_bytes for each in part.samples),
        "peak_machine_ram_bytes": peak(each.machine_ram_bytes for each in part.samples),
        "ram_of": None if not part.samples else "server" if target.pid is not None else "machine",
        "samples": [each.as_json() for each in thinned(part.samples)],
    }
    metrics |= request_columns(script, answers)
    return Outcome(
        metrics=metrics,
        is_complete=is_complete,
        problem=None if is_complete else problem,
        answers=[answers[step.index].digest if step.index in answers else "" for step in steps],
        notes=tuple(_notes(script, part, metrics, is_resumed=is_resumed)),
        part=None if is_complete else part_as_json(part, script),
    )


def _notes(script: Script, part: Part, metrics: dict[str, Any], *, is_resumed: bool) -> list[str]:
    notes = []
    if is_resumed:
        notes.append("measured in parts: what the server held in its caches before the break may have been lost")
    unknown = [name for name in SERVED if metrics[name] is None]
    if len(unknown) == len(SERVED):
        notes.append("the server reports no counters (/metrics), so it is not known which tier served the tokens")
    elif "tokens_from_ram" not in unknown and "tokens_from_gpu_cache" not in unknown:
        served = metrics["tokens_from_ram"] + metrics["tokens_from_gpu_cache"]
        # A preempted request hits what it had computed itself.
        if served > script.known_tokens and not metrics["preemptions"]:
            notes.append(
                f"{served - script.known_tokens:,} tokens of new prompts were in the server's caches, from an earlier "
                "run with this seed; use another --seed, or start the server anew"
            )
    wanted = {step.index: step.output for step in script.steps}
    if others := sum(answer.output_tokens != wanted[index] for index, answer in part.answers.items()):
        notes.append(
            f"{others} of {len(part.answers)} answers do not have the length that was asked for: the server ignores "
            "ignore_eos, or reports no counts of tokens"
        )
    if any(answer.tokens is None for answer in part.answers.values()) and not is_resumed:
        notes.append(
            "the server reports no token ids: answers are compared by text, and conversations continue with random "
            "tokens in place of its answers"
        )
    if not part.samples:
        notes.append("the server is on another machine, so its memory is not known here")
    return notes
