"""A real vLLM engine in this process, with and without Overspill, and answers that can be compared."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

from overspill.kv import plugin
from overspill.kv.connector import OverspillConnector
from overspill.kv.scheduler import OffloadScheduler
from overspill.kv.spill.scheduler import SpillScheduler
from overspill.kv.spill.worker import SpillWorker
from overspill.kv.worker import OffloadWorker
from tests.engine_cost import collect, inspect_models_here, keep_kernels, skip_chat_warmup, without_collections

plugin.register()  # as vLLM does where Overspill is installed as a package
keep_kernels()
inspect_models_here()
skip_chat_warmup()

BLOCK = 32
VOCAB = 512
# Rounding alone moves logprobs by about 1e-4 when a prompt is computed in other pieces.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    num_cached: int

    def differs_from(self, other: "Answer") -> str:
        """Why not the same, or an empty string."""
        if self.tokens != other.tokens:
            return f"tokens {self.tokens} != {other.tokens}"
        for position, (mine, theirs) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            worst = max(abs(mine[t] - theirs[t]) if t in theirs else 1.0 for t in mine)
            if worst > ROUNDING:
                return f"logprobs at {position} differ by {worst}"
        return ""


def random_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def sampling(max_tokens: int, logprobs: int = 2) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, detokenize=False)


def overspill(**extra: Any) -> KVTransferConfig:
    """Every hit is loaded: a tiny model is often faster to recompute, and these tests are about loads."""
    return overspill_config({"host_bytes": "64MiB", "load": "always", "reserve_bytes": 0, **extra})


def overspill_config(settings: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="OverspillConnector",
        kv_connector_module_path="overspill.kv.connector",
        kv_role="kv_both",
        kv_connector_extra_config=settings,
    )


# Enough for every test; as the size is given, vLLM neither profiles nor fills the GPU, and tests may share one.
GPU_MEMORY: dict[str, Any] = (
    {"kv_cache_memory_bytes": 6 << 30, "gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {}
)
PAGE = BLOCK * 2 * 2 * 32 * 4  # of the tiny models: K and V, 2 heads of 32 numbers, 4 bytes each


def spilling(*, resident: int = 10, spilled: int = 60, regions: int = 4, **extra: Any) -> KVTransferConfig:
    """So many blocks on the GPU and so many in RAM, of a model whose KV takes so many regions. The window keeps its
    memory unless `spill_lends` is given."""
    window = min(2, regions) * spilled * PAGE
    settings: dict[str, Any] = {
        "spill_lends": False,
        "spill_bytes": spilled * regions * PAGE,
        "resident_bytes": resident * regions * PAGE + window,
        "reserve_bytes": 0,
        **extra,
    }
    return overspill_config(settings)


class Engine:
    num_logprobs = 2

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._count = 0

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def vllm_scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def gpu_pool(self) -> Any:
        return self.vllm_scheduler.kv_cache_manager.block_pool

    @property
    def spill(self) -> SpillScheduler:
        spill = self.vllm_scheduler.connector.spill_scheduler
        assert spill is not None
        return spill

    @property
    def spill_worker(self) -> SpillWorker:
        worker = get_kv_transfer_group().spill_worker
        assert worker is not None
        return worker

    @property
    def scheduler(self) -> OffloadScheduler:
        connector = self.vllm_scheduler.connector
        if not isinstance(connector, OverspillConnector):  # MultiConnector
            connector = next(c for c in connector._connectors if isinstance(c, OverspillConnector))
        return connector.scheduler

    @property
    def worker(self) -> OffloadWorker:
        connector = get_kv_transfer_group()
        if not isinstance(connector, OverspillConnector):
            connector = next(c for c in connector._connectors if isinstance(c, OverspillConnector))
        return connector.worker

    def add(
        self, prompt: Sequence[int], max_tokens: int = 24, request_id: str | None = None, *, priority: int = 0
    ) -> str:
        self._count += 1
        name = request_id or f"request-{self._count}"
        tokens = {"prompt_token_ids": list(prompt)}
        self.llm.llm_engine.add_request(name, tokens, sampling(max_tokens, self.num_logprobs), priority=priority)
        return name

    def step(self) -> dict[str, Answer]:
        return {o.request_id: _answer(o) for o in self.llm.llm_engine.step() if o.finished}

    def run(self, *, limit: int = 20_000) -> dict[str, Answer]:
        """Step until nothing is left to do."""
        done: dict[str, Answer] = {}
        for _ in range(limit):
            if not self.llm.llm_engine.has_unfinished_requests():
                return done
            done.update(self.step())
        raise AssertionError(f"requests still unfinished after {limit} steps")

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 24) -> list[Answer]:
        """All prompts at once."""
        ids = [self.add(prompt, max_tokens) for prompt in prompts]
        done = self.run()
        return [done[i] for i in ids]

    def ask_one(self, prompt: Sequence[int], max_tokens: int = 24) -> Answer:
        return self.ask([prompt], max_tokens)[0]

    def drain(self, *, limit: int = 10_000) -> None:
        """Let copies end after the last request is gone, as a server's engine loop does."""
        for _ in range(limit):
            if not self.vllm_scheduler.has_requests():
                return
            self.llm.llm_engine.step()
        raise AssertionError(f"the connector still has work after {limit} steps")

    def forget_gpu(self) -> None:
        """Empty the GPU's prefix cache, but not RAM, and put other numbers where its KV was."""
        self.drain()
        self.evict_gpu()
        dtype = self.llm.llm_engine.vllm_config.model_config.dtype
        buffer = self.worker.buffer
        assert buffer is not None
        buffer.view(dtype).fill_(7.0)
        if buffer.is_cuda:
            torch.cuda.synchronize()  # loads wait for steps, and this is none
        if getattr(get_kv_transfer_group(), "spill_worker", None) is not None:
            arena = self.spill_worker.arena
            assert arena is not None
            arena.slots.view(np.float32)[:] = 7.0

    def evict_gpu(self) -> None:
        """Empty the GPU's prefix cache. Not by a reset, which empties RAM too."""
        self.drain()
        num_blocks = self.gpu_pool.num_gpu_blocks  # less those without memory
        assert self.gpu_pool.get_num_free_blocks() == num_blocks - 1, "blocks are still held on the GPU"
        self.gpu_pool.evict_blocks(set(range(1, len(self.gpu_pool.blocks))))

    def preemptions(self) -> float:
        return REGISTRY.get_sample_value("vllm:num_preemptions_total", self._labels()) or 0

    def metric(self, name: str) -> float:
        """A series of ours, summed over engines (there is one)."""
        names = {f"overspill_{name}", f"overspill_{name}_total"}
        return sum(s.value for m in REGISTRY.collect() for s in m.samples if s.name in names)

    def _labels(self) -> dict[str, str]:
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name == "vllm:num_preemptions_total":
                    return sample.labels
        return {}

    def assert_nothing_is_held(self) -> None:
        """Nothing leaked on either side, and nothing is under way."""
        self.drain()
        assert self.gpu_pool.get_num_free_blocks() == len(self.gpu_pool.blocks) - 1
        host = self.scheduler.host
        assert host.pool.get_num_free_blocks() == host.num_slots
        assert all(block.ref_cnt == 0 for block in host.pool.blocks[1:])


def _answer(output: Any) -> Answer:
    choice = output.outputs[0]
    logprobs = tuple({t: p.logprob for t, p in step.items()} for step in choice.logprobs)
    return Answer(tuple(choice.token_ids), logprobs, output.num_cached_tokens or 0)


@contextmanager
def engine(
    model: Path, transfer: KVTransferConfig | None = None, *, blocks: int = 40, **settings: Any
) -> Iterator[Engine]:
    spills = transfer is not None and "spill_bytes" in transfer.kv_connector_extra_config
    arguments: dict[str, Any] = {
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "max_model_len": 1200 if spills else min(1200, (blocks - 1) * BLOCK),
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": None if spills else blocks,
        **GPU_MEMORY,
        **settings,
    }
    with without_collections():
        try:
            llm = LLM(
                model=str(model),
                skip_tokenizer_init=arguments.pop("skip_tokenizer_init", True),
                enforce_eager=arguments.pop("enforce_eager", True),
                enable_prefix_caching=arguments.pop("enable_prefix_caching", True),
                disable_log_stats=False,
                kv_transfer_config=transfer,
                **arguments,
            )
        except BaseException:
            stop_engines()  # what was started of it would serve the next engine
            raise
        running = Engine(llm)
        try:
            yield running
        finally:
            llm.llm_engine.engine_core.shutdown()
            del running.llm, llm
            stop_engines(everything=False)


_stock: dict[str, list[Answer]] = {}


def stock(
    model: Path, prompts: Sequence[Sequence[int]], max_tokens: int = 24, *, blocks: int = 400, **settings: Any
) -> list[Answer]:
    """Answers of vLLM without Overspill, one prompt after the other; computed once for all tests."""
    asked = repr((model, prompts, max_tokens, blocks, sorted(settings.items())))
    if asked not in _stock:
        with engine(model, blocks=blocks, **settings) as plain:
            _stock[asked] = [plain.ask_one(prompt, max_tokens) for prompt in prompts]
    return _stock[asked]


def stop_engines(*, everything: bool = True) -> None:
    collect(everything=everything)
    with without_collections():
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def assert_same(got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    assert len(got) == len(expected)
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        reason = mine.differs_from(theirs)
        assert not reason, f"answer {i}: {reason}"


def assert_identical(got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Bit by bit, for requests that were computed in the same pieces."""
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine.tokens == theirs.tokens, f"answer {i}"
        for position, (here, there) in enumerate(zip(mine.logprobs, theirs.logprobs, strict=True)):
            assert here == there, f"answer {i}: {here} and {there} at {position}"


def apart(mine: Answer, theirs: Answer) -> float:
    """How far log-probabilities of two answers' tokens are apart, up to the first token that differs. Infinitely, where
    one of an answer's tokens is not even among the likely ones of the other."""
    worst = 0.0
    for position, (token, other) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)):
        here, there = mine.logprobs[position], theirs.logprobs[position]
        both = {token, other}
        if not both <= here.keys() & there.keys():
            return math.inf
        worst = max(worst, *(abs(here[one] - there[one]) for one in both))
        if token != other:
            break
    return worst


def assert_same_but_for_ties(got: Sequence[Answer], expected: Sequence[Answer], *, rounding: float = 0.6) -> None:
    """For requests computed in other pieces, in bf16: a logit near 40, as the tiny models have, has steps of 1/4.

    Where another token is as likely but for that, what follows may differ.
    """
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        distance = apart(mine, theirs)
        assert distance <= rounding, f"answer {i}, {distance} apart: {mine} and {theirs}"
