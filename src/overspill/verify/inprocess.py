"""vLLM's engine in this process, stepped by hand, with its blocks and Overspill's copies within reach.

Used by `overspill verify` and benchmarks. Importing this module loads vLLM, so only processes made for an engine do,
with VLLM_ENABLE_V1_MULTIPROCESSING=0 in their environment.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig, ModelConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser

from overspill.kv import plugin
from overspill.kv.connector import OverspillConnector
from overspill.kv.scheduler import OffloadScheduler
from overspill.kv.spill.scheduler import SpillScheduler
from overspill.kv.vllm_api import call_workers
from overspill.kv.worker import OffloadWorker
from overspill.verify.workload import Answer

# A request that still runs after this many steps is stuck.
_STEPS = 100_000


class Stuck(RuntimeError):
    """Requests or copies do not finish."""


class Engine:
    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._count = itertools.count(1)
        self._running: dict[str, Answer] = {}

    @classmethod
    def start(cls, model: Path | str, options: Mapping[str, Any] | None = None, **arguments: Any) -> Self:
        """Start vLLM, with Overspill if its `options` are given."""
        # If Overspill is on the path but not installed, vLLM does not find its plugin; hence the module path, too.
        plugin.register()
        transfer = None
        if options is not None:
            transfer = KVTransferConfig(
                kv_connector="OverspillConnector", kv_connector_module_path="overspill.kv.connector",
                kv_role="kv_both", kv_connector_extra_config=dict(options),
            )  # fmt: skip
        arguments = {"skip_tokenizer_init": True, "enable_prefix_caching": True, "disable_log_stats": False} | arguments
        return cls(LLM(model=str(model), kv_transfer_config=transfer, **arguments))

    # Parts of the engine.

    @property
    def _vllm(self) -> Any:
        return self.llm.llm_engine

    @property
    def core(self) -> Any:
        return self._vllm.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def _connector(self) -> OverspillConnector:
        connector = get_kv_transfer_group()
        assert isinstance(connector, OverspillConnector)
        return connector

    @property
    def has_offload(self) -> bool:
        connector = self.scheduler.connector
        return connector is not None and connector._scheduler is not None

    @property
    def offload_scheduler(self) -> OffloadScheduler:
        scheduler: OffloadScheduler = self.scheduler.connector.scheduler
        return scheduler

    @property
    def offload_worker(self) -> OffloadWorker:
        return self._connector.worker

    def on_workers(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a module's function on all ranks, with the worker as first argument; results are in rank order. A single
        rank's worker is in this process."""
        return call_workers(self.core, call, *arguments)

    @property
    def spill_scheduler(self) -> SpillScheduler | None:
        """The connector's scheduler of spilled KV; None without spill."""
        scheduler: SpillScheduler | None = getattr(self.scheduler.connector, "spill_scheduler", None)
        return scheduler

    # Requests.

    def add(self, prompt: Sequence[int], max_tokens: int, *, logprobs: int | None = None, name: str = "") -> Answer:
        """Add a request and return its answer, which grows with every step."""
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        key = f"request-{next(self._count)}"
        answer = Answer(name=name or key, prompt_tokens=len(prompt), alone=not self._running, began=time.perf_counter())
        for other in self._running.values():
            other.alone = False
        self._running[key] = answer
        answer.request = self._vllm.add_request(key, {"prompt_token_ids": list(prompt)}, parameters)
        return answer

    def step(self) -> list[Answer]:
        """Run a step and return the answers it finished. Tokens are timed when the step returns."""
        outputs = self._vllm.step()
        now = time.perf_counter()
        finished = []
        for output in outputs:
            if (answer := self._running.get(output.request_id)) is None:
                continue  # aborted
            choice = output.outputs[0]
            answer.cached_tokens = output.num_cached_tokens or answer.cached_tokens
            answer.spilled_bytes = (output.kv_transfer_params or {}).get("overspill", {}).get("spilled_bytes", 0)
            answer.arrivals += [now] * len(choice.token_ids)
            answer.tokens += choice.token_ids
            answer.logprobs += [{token: p.logprob for token, p in likely.items()} for likely in choice.logprobs or ()]
            answer.is_done = output.finished
            if answer.is_done:
                finished.append(self._running.pop(output.request_id))
        return finished

    @property
    def is_busy(self) -> bool:
        """Whether any request is still running."""
        return bool(self._running)

    def run(self, until: Callable[[], bool] | None = None, seconds: float = float("inf")) -> bool:
        """Step until the condition holds, or by default until every request is answered; False on timeout."""
        deadline = time.perf_counter() + seconds
        for _ in range(_STEPS):
            if until() if until is not None else not self.is_busy:
                return True
            if time.perf_counter() > deadline:
                return False
            if not self.is_busy:
                raise Stuck("no request runs, and the awaited condition does not hold")
            self.step()
        raise Stuck(f"requests are still unfinished after {_STEPS} steps")

    def abort(self, *answers: Answer) -> None:
        """Abort those of the answers that still run; all running ones if none is given."""
        keys = [key for key, answer in self._running.items() if not answers or answer in answers]
        for key in keys:
            del self._running[key]
        self._vllm.abort_request(keys)

    def drain(self) -> None:
        """Step until copies, and the step in flight, end after the last request, as a server's loop does."""
        for _ in range(_STEPS):
            if not self.scheduler.has_requests() and not self.core.batch_queue:
                return
            self._vllm.step()
        raise Stuck(f"copies are still under way after {_STEPS} steps")

    def counters(self) -> dict[str, int]:
        """Overspill's counters and vLLM's preemptions since the start, as a server exports them on /metrics."""
        found: dict[str, int] = {}
        for sample in (sample for metric in REGISTRY.collect() for sample in metric.samples):
            name = "preemptions" if sample.name == "vllm:num_preemptions_total" else sample.name
            if name == "preemptions" or (name.startswith("overspill_") and name.endswith("_total")):
                name = name.removeprefix("overspill_").removesuffix("_total")
                found[name] = found.get(name, 0) + int(sample.value)
        return found


def arguments_of(flags: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for LLM, read by vLLM's own parser so that flags mean what they mean to a server."""
    read = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(flags))
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")]
    return {name: getattr(read, name) for name in names}


# Random weights that make answers depend on the whole KV cache, for a model known only by its shape. vLLM's own dummy
# weights lie within ±0.001, norms included: attention vanishes beside the residual, answers depend on the last token
# alone, and comparing them would prove nothing.

LOAD_FORMAT = "overspill_random"
# Attention scores, as wide as this squared, pick out few tokens, so that a wrong block shows instead of averaging out.
# Wider ones amplify rounding in every layer: with 2, another kernel changed three of four tokens of a 16-layer model.
_QKV_GAIN = 1.4
# Normalised queries and keys give scores around 1 whatever the projections are, so the norm's weight sets their width.
_QUERY_NORM = 2.0
# Logits then reach 16 and more, as real models' do: the tolerance for rounding assumes numbers of that size.
_HEAD_GAIN = 4.0


@register_model_loader(LOAD_FORMAT)
class RandomWeights(DummyModelLoader):
    """Draws the same weights in every engine, before kernels repack them into layouts of their own, as on a CPU."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        redraw(model)


def redraw(model: torch.nn.Module, seed: int = 0, head_gain: float = _HEAD_GAIN) -> int:
    """Redraw weights and return the number of tensors drawn; packed ones, and those with a value of vLLM's, stay."""
    drawn = 0
    with torch.inference_mode():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            is_packed = not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2
            if is_packed or parameter.is_meta or hasattr(parameter, "dummy_weight_value"):
                continue
            if parameter.dim() == 1:
                norm = _QUERY_NORM if name.endswith("q_norm.weight") else 1.0
                parameter.fill_(0.0 if name.endswith("bias") else norm)
            else:
                is_head = name.endswith(("lm_head.weight", "embed_tokens.weight"))
                gain = _QKV_GAIN if "qkv" in name else head_gain if is_head else 1.0
                generator = torch.Generator(device=parameter.device).manual_seed(seed + number)
                parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)
            drawn += 1
    return drawn
