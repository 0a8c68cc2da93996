"""vLLM's engine in this process, where its blocks and Overspill's copies can be reached. Runs in a child only."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from overspill.kv import plugin
from overspill.kv.connector import OverspillConnector
from overspill.kv.scheduler import OffloadScheduler
from overspill.kv.worker import OffloadWorker
from overspill.verify.answers import Answer, Ask
from overspill.verify.engine_life import EngineLife
from overspill.verify.weights import LOAD_FORMAT

_LOGPROBS = 5
# As a number it is not 0 in any dtype, so what is read where nothing was written changes the answer.
_SCRAMBLED = 0x41
# A request that is this many steps without an end has none.
_STEPS = 100_000


class Stuck(RuntimeError):
    """Requests, or copies, that do not come to an end."""


class Engine:
    def __init__(self, life: EngineLife) -> None:
        # Where Overspill is only on the path, vLLM finds no plugin of it.
        plugin.register()
        load = {"load_format": LOAD_FORMAT} if life.random_weights else {}
        self._llm = LLM(
            model=life.model, skip_tokenizer_init=True, enable_prefix_caching=True, disable_log_stats=False,
            kv_transfer_config=_transfer(life), **load, **_arguments(life.flags),
        )  # fmt: skip
        self._held: list[Any] = []
        self._count = self._aborted = 0
        self._names: dict[str, str] = {}
        self.answers: list[Answer] = []
        self.faults: dict[str, int] = {}
        if life.keep_blocks is not None:
            self.seize(max(0, self._pool.get_num_free_blocks() - life.keep_blocks))

    # Its parts.

    @property
    def _vllm(self) -> Any:
        return self._llm.llm_engine

    @property
    def _scheduler(self) -> Any:
        return self._vllm.engine_core.engine_core.scheduler

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    @property
    def _connector(self) -> OverspillConnector:
        connector = get_kv_transfer_group()
        assert isinstance(connector, OverspillConnector)
        return connector

    @property
    def offload_scheduler(self) -> OffloadScheduler:
        scheduler: OffloadScheduler = self._scheduler.connector.scheduler
        return scheduler

    @property
    def offload_worker(self) -> OffloadWorker:
        return self._connector.worker

    @property
    def has_offload(self) -> bool:
        connector = self._scheduler.connector
        return connector is not None and connector._scheduler is not None

    def count(self, name: str, amount: int = 1) -> None:
        self.faults[name] = self.faults.get(name, 0) + amount

    # Requests.

    def add(self, ask: Ask) -> str:
        self._count += 1
        # vLLM appends to it, so no name may begin with another.
        name = f"{ask.name}#{self._count:06d}"
        self._names[name] = ask.name
        parameters = SamplingParams(
            temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=_LOGPROBS, detokenize=False
        )
        self._vllm.add_request(name, {"prompt_token_ids": list(ask.prompt)}, parameters)
        return name

    def step(self, *, alone: bool = False) -> set[str]:
        """The requests that are finished with it; their answers are kept."""
        finished = [output for output in self._vllm.step() if output.finished]
        self.answers += [_answer(self._names[output.request_id], output, alone=alone) for output in finished]
        return {output.request_id for output in finished}

    @property
    def is_busy(self) -> bool:
        """Whether a request has no answer yet."""
        return bool(self._vllm.has_unfinished_requests())

    def run(self, *, alone: bool = False) -> None:
        """Step until every request has its answer."""
        for _ in range(_STEPS):
            if not self.is_busy:
                return
            self.step(alone=alone)
        raise Stuck(f"requests are still unfinished after {_STEPS} steps")

    def ask(self, *asks: Ask) -> None:
        """All at once."""
        for ask in asks:
            self.add(ask)
        self.run(alone=len(asks) == 1)

    def abort(self, request: str) -> None:
        self._aborted += 1
        self._vllm.abort_request([request])

    @property
    def awaited(self) -> int:
        """Requests that must have an answer: all that were not aborted."""
        return self._count - self._aborted

    def drain(self) -> None:
        """Let copies end after the last request is gone, as a server's loop does."""
        for _ in range(_STEPS):
            if not self._scheduler.has_requests():
                return
            self._vllm.step()
        raise Stuck(f"copies are still under way after {_STEPS} steps")

    # Blocks.

    def seize(self, count: int) -> None:
        """Take KV blocks away, as other requests would."""
        self._held += self._pool.get_new_blocks(count) if count else []

    @contextmanager
    def pressure(self) -> Iterator[Callable[[], None]]:
        """No free block; nor later, where what it gives is called again."""
        taken: list[Any] = []

        def press() -> None:
            taken.extend(self._pool.get_new_blocks(self._pool.get_num_free_blocks()))

        press()
        try:
            yield press
        finally:
            self._pool.free_blocks(taken)

    def evict(self) -> None:
        """Everything that no running request uses leaves the GPU."""
        with self.pressure():
            pass

    def forget(self) -> None:
        """Empty the GPU's KV cache, but not RAM, and put other numbers where KV was."""
        self.drain()
        self.evict()
        buffer = self.offload_worker.buffer
        assert buffer is not None
        buffer.view(torch.uint8).fill_(_SCRAMBLED)
        if buffer.is_cuda:
            torch.cuda.synchronize()  # loads run on streams of their own, and must not be overwritten
        spill = self._connector.spill_worker
        if spill is not None and spill.arena is not None:
            spill.arena.slots[:] = _SCRAMBLED

    def left_behind(self) -> str:
        """What is still held although nothing runs; empty if nothing is."""
        self.drain()
        self._pool.free_blocks(self._held)
        self._held = []
        lost = len(self._pool.blocks) - 1 - self._pool.get_num_free_blocks()
        found = [f"{lost} KV block(s) on the GPU"] if lost else []
        if self.has_offload:
            host = self.offload_scheduler.host
            held = sum(block.ref_cnt != 0 for block in host.pool.blocks[1:])
            found += [f"{held} block(s) in RAM"] if held else []
        return " and ".join(found)

    def figures(self) -> dict[str, int]:
        """What Overspill and vLLM count, since the start."""
        figures: dict[str, int] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name.startswith("overspill_") and sample.name.endswith("_total"):
                    figures[sample.name.removeprefix("overspill_").removesuffix("_total")] = int(sample.value)
                elif sample.name == "vllm:num_preemptions_total":
                    figures["preemptions"] = figures.get("preemptions", 0) + int(sample.value)
        return figures


def _transfer(life: EngineLife) -> Any:
    from vllm.config import KVTransferConfig

    if life.options is None:
        return None
    return KVTransferConfig(
        kv_connector="OverspillConnector",
        # For a vLLM that is not told of the plugin, where Overspill is only on the path.
        kv_connector_module_path="overspill.kv.connector",
        kv_role="kv_both",
        kv_connector_extra_config=dict(life.options),
    )


def _arguments(flags: Sequence[str]) -> dict[str, Any]:
    """By vLLM's own parser, so that they mean what they mean to a server."""
    read = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(flags))
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")]
    return {name: getattr(read, name) for name in names}


def _answer(name: str, output: Any, *, alone: bool) -> Answer:
    choice = output.outputs[0]
    told = (output.kv_transfer_params or {}).get("overspill", {})
    return Answer(
        name=name,
        tokens=tuple(choice.token_ids),
        logprobs=tuple({token: p.logprob for token, p in position.items()} for position in choice.logprobs),
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens or 0,
        spilled_bytes=told.get("spilled_bytes", 0),
        alone=alone,
    )
