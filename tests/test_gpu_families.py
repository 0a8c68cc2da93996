"""Each kind of model that people serve, in stock vLLM and with Overspill: the same answers, and bytes that moved.

Run with `pytest -m gpu`. With OVERSPILL_FAMILIES_OUT=<file> the outcomes are written there, in the form of the results
under benchmarks/results. On a CPU the families that vLLM's CPU engine can run do run, and the others are skipped with
vLLM's reason.
"""

import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from vllm.v1.core.kv_cache_utils import _max_memory_usage_bytes_from_groups, _pool_bytes_per_block

import record
from overspill.kv.buffer import granularity
from overspill.kv.errors import OverspillError
from overspill.kv.spill.geometry import block_step, window_bytes
from tests.engine import (
    ROUNDING,
    Answer,
    Engine,
    assert_same_but_for_ties,
    engine,
    overspill,
    overspill_config,
    random_prompt,
    sampling,
)
from tests.families import FAMILIES, Request

pytestmark = pytest.mark.gpu

CUDA = torch.cuda.is_available()
HOST_BYTES = "2GiB" if CUDA else "1GiB"  # states of linear layers, saved on the way, take more than the prompt's KV
# What is refused by design: (family, feature) -> the reason, as a regular expression.
EXPECTED_REFUSALS: dict[tuple[str, str], str] = {}
NAMES = list(FAMILIES)
FEATURES = ("offload eager", "offload lazy", "spill", "spill and offload", "CUDA graphs")
MOVED = ("store_bytes", "load_bytes", "hit_tokens", "spill_in_bytes", "spill_out_bytes", "spilled_steps")
each_family = pytest.mark.parametrize("name", NAMES, scope="module")  # one family after the other


@cache
def head() -> dict[str, Any]:
    return record.header("families", {"features": list(FEATURES)}) | {"command": ["pytest", *sys.argv[1:]]}


def keep(name: str, feature: str, figures: dict[str, Any]) -> None:
    """Written each time: a run that is killed loses nothing. `-k` may divide the families between processes."""
    path = os.environ.get("OVERSPILL_FAMILIES_OUT")
    if not path:
        return
    family = FAMILIES[name]
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = record.read(Path(path)) if Path(path).exists() else {**head(), "resumed": [], "families": {}}
        if all(run["command"] != head()["command"] for run in (result, *result["resumed"])):
            result = record.resumed(Path(path), head())
        families = result["families"]
        entry = families.setdefault(name, {"architecture": family.config["architectures"][0], "notes": family.notes})
        entry["settings"] = family.settings(cuda=CUDA)
        entry.setdefault("features", {})[feature] = figures
        order = {one: families[one] for one in NAMES if one in families}
        record.write(Path(path), {**result, "families": order})


@contextmanager
def outcome(name: str, feature: str) -> Iterator[dict[str, Any]]:
    """Keeps what became of a feature with a family, with the figures that the test adds."""
    figures: dict[str, Any] = {}
    began = time.monotonic()
    refusal = EXPECTED_REFUSALS.get((name, feature))
    try:
        if refusal is None:
            yield figures
            # After a tie, what follows is not compared.
            assert figures["tokens"] >= 6 * figures["answers"], "answers part too early to have been compared"
            figures = {"outcome": "proven", **figures}
        else:
            # vLLM makes a ValueError of what is refused while it completes its configuration.
            with pytest.raises((OverspillError, ValueError), match=refusal) as refused:
                yield figures
            figures = {"outcome": "refused", "reason": str(refused.value)}
    except pytest.skip.Exception:
        raise
    except BaseException as error:
        figures = {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"[:2000], **figures}
        raise
    finally:
        if "outcome" in figures:
            keep(name, feature, {**figures, "seconds": time.monotonic() - began})


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What stock vLLM answers, and how its KV lies."""

    folder: Path
    block_bytes: int
    num_regions: int
    resident: int
    """Blocks that spill may keep on the GPU: a third of what the long prompt needs in its layers with attention."""
    prompts: list[Request]
    first: list[Answer]
    again: list[Answer]
    """From the GPU's own prefix cache: the same computation as after a return from RAM."""
    held_blocks: int
    """What one of the prompts takes of the GPU."""
    needed_blocks: int
    """What vLLM insists on for contexts as long as the prompts and their answers."""
    long: Request
    turn: Request
    """The long prompt, its answer and more."""
    long_answers: list[Answer]
    """Computed, from the cache, and of the turn."""
    long_blocks: int

    def spilling(self, **extra: Any) -> Any:
        page = self.block_bytes // self.num_regions
        step = block_step(page, granularity())
        spilled = -(-(3 * self.long_blocks // 2 + 16 - self.resident) // step) * step
        return overspill_config(
            {
                "spill_bytes": spilled * self.block_bytes,
                "resident_bytes": self.resident * self.block_bytes + window_bytes(spilled, page, self.num_regions),
                "spill_share": 1.0,
                "reserve_bytes": 0,
                "spill_lends": False,
                **extra,
            }
        )

    @property
    def longest(self) -> int:
        return longest_with([self.turn])


def longest_with(requests: Sequence[Request]) -> int:
    """A max_model_len that leaves room for the answer, and for an image in place of its token."""
    return max(len(request.tokens) for request in requests) + 100


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {**FAMILIES[name].settings(cuda=CUDA), **more}


def ask(running: Engine, request: Request, max_tokens: int = 24) -> Answer:
    return ask_counting(running, request, max_tokens)[0]


def ask_counting(running: Engine, request: Request, max_tokens: int = 24) -> tuple[Answer, int]:
    """And how many blocks it held at most."""
    running._count += 1
    name = f"request-{running._count}"
    running.llm.llm_engine.add_request(name, request.prompt, sampling(max_tokens), lora_request=request.lora)
    pool, done = running.gpu_pool, {}
    least = before = pool.get_num_free_blocks()
    while name not in done:
        done.update(running.step())
        least = min(least, pool.get_num_free_blocks())
    return done[name], before - least


@pytest.fixture(scope="module", autouse=True)
def one_split() -> Iterator[None]:
    """LoRA's kernels add up splits of a sum in any order, and round otherwise each time; one split has one order."""
    from vllm.lora.ops.triton_ops import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "is_batch_invariant", True)
        utils.get_lora_op_configs.cache_clear()
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Stock vLLM's answers, asked for once."""

    @cache
    def of(name: str) -> Reference | Exception:
        folder = FAMILIES[name].write(tmp_path_factory.mktemp("families") / name.replace(" ", "-"))
        try:
            return stock(name, folder)
        except Exception as error:
            return error

    def get(name: str, feature: str) -> Reference:
        found = of(name)
        if isinstance(found, Exception):
            reason = f"stock vLLM does not run it: {' '.join(str(found).split())[:500]}"
            if not CUDA:
                pytest.skip(reason)
            keep(name, feature, {"outcome": "failed", "reason": reason})
            raise AssertionError(reason) from found
        return found

    return get


def stock(name: str, folder: Path) -> Reference:
    family = FAMILIES[name]
    longest = 66_000 if CUDA else 4000
    with engine(folder, num_gpu_blocks_override=None, max_model_len=longest, **settings(name)) as plain:
        vllm_config, groups = plain.llm.llm_engine.vllm_config, plain.vllm_scheduler.kv_cache_config.kv_cache_groups
        if not vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("vLLM turns prefix caching off for it")
        block_bytes = _pool_bytes_per_block(vllm_config, groups)
        num_regions = max(len(group.layer_names) for group in groups)
        block_size = vllm_config.cache_config.block_size
        step = block_step(block_bytes // num_regions, granularity())
        resident = -(-10 // step) * step
        prompts = family.requests(folder, max(600, 5 * block_size), 1)
        counted = [ask_counting(plain, request) for request in prompts]
        first, held = [answer for answer, _ in counted], max(blocks for _, blocks in counted)
        again = [ask(plain, request) for request in prompts]
        long = family.requests(folder, 3 * resident * block_size + 40, 2)[0]
        long_answer, long_blocks = ask_counting(plain, long)
        long_again = ask(plain, long)
        vllm_config.model_config.max_model_len = longest_with(prompts)
        needed = _max_memory_usage_bytes_from_groups(vllm_config, groups) // block_bytes + 2
        vllm_config.model_config.max_model_len = longest
        turn = long.followed_by(long_answer.tokens, random_prompt(4, 100))
        return Reference(
            folder=folder,
            block_bytes=block_bytes,
            num_regions=num_regions,
            resident=resident,
            prompts=prompts,
            first=first,
            again=again,
            held_blocks=held,
            needed_blocks=needed,
            long=long,
            turn=turn,
            long_answers=[long_answer, long_again, ask(plain, turn)],
            long_blocks=long_blocks,
        )


def compare(name: str, figures: dict[str, Any], got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Tokens the same but for ties, log-probabilities but for rounding; says how near they came."""
    for mine, theirs in zip(got, expected, strict=True):
        figures["answers"] = figures.get("answers", 0) + 1
        identical = mine.tokens == theirs.tokens and mine.logprobs == theirs.logprobs
        figures["identical_answers"] = figures.get("identical_answers", 0) + identical
        figures.setdefault("tokens", 0)
        for position, token in enumerate(mine.tokens):
            if token != theirs.tokens[position]:
                break
            apart = abs(mine.logprobs[position][token] - theirs.logprobs[position][token])
            figures["tokens"] += 1
            figures["worst_logprob_difference"] = max(figures.get("worst_logprob_difference", 0.0), apart)
    assert_same_but_for_ties(got, expected, rounding=FAMILIES[name].rounding if CUDA else ROUNDING)


def assert_different(name: str, got: Answer, expected: Answer) -> None:
    with pytest.raises(AssertionError):
        compare(name, {}, [got], [expected])


def damage(slots: np.ndarray, *, fp8: bool) -> None:
    """Other numbers of the usual size, none of them infinite."""
    view = torch.from_numpy(slots).view(torch.uint8 if fp8 else torch.bfloat16 if CUDA else torch.float32)
    for row in view:  # one at a time: a pool may be large
        values = torch.randn(row.shape, generator=torch.Generator().manual_seed(0))
        row.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else values.to(row.dtype))


def count_moved(running: Engine, figures: dict[str, Any], *needed: str) -> None:
    figures.update({key: running.metric(key) for key in MOVED if running.metric(key)})
    for key in needed:
        assert figures.get(key, 0) > 0, f"{key}: nothing moved"
    assert running.metric("load_failures") == 0 and running.metric("store_failures") == 0


@each_family
def test_prompts_and_answers_of_a_family_vary(reference: Any, name: str) -> None:
    """Else a comparison would show nothing: a model that repeats one token has the same answer to everything."""
    ref: Reference = reference(name, "stock")
    assert len({answer.tokens for answer in ref.first}) == len(ref.first)
    assert all(len(set(answer.tokens)) > 6 for answer in (*ref.first, ref.long_answers[0]))
    assert all(answer.num_cached < len(r.tokens) // 4 for answer, r in zip(ref.first, ref.prompts, strict=True))


@pytest.mark.parametrize("store", ["eager", "lazy"])
@each_family
def test_evicted_prompts_return_from_ram(reference: Any, name: str, store: str) -> None:
    ref: Reference = reference(name, f"offload {store}")
    # Checksums with one kind of store; without them damage is seen in the answer, as below.
    transfer = overspill(host_bytes="256MiB", store=store, verify="all" if store == "lazy" else "off")
    # Room for one of the prompts, not for two. Lazy stores begin when a block comes near eviction, and need a step or
    # two before it goes: a larger GPU, and more prompts that push the first ones out.
    blocks = 2 * ref.held_blocks + 4 if store == "lazy" else 5 * ref.held_blocks // 4 + 3
    others = FAMILIES[name].requests(ref.folder, len(ref.prompts[0].tokens), 3) if store == "lazy" else []
    few = {"blocks": max(blocks, ref.needed_blocks), "max_model_len": longest_with(ref.prompts)}
    with outcome(name, f"offload {store}") as figures, engine(ref.folder, transfer, **settings(name, **few)) as running:
        first = [ask(running, request) for request in ref.prompts]
        compare(name, figures, first, ref.first)
        # The same tokens with another adapter or another image are not found.
        assert [answer.num_cached for answer in first] == [answer.num_cached for answer in ref.first]
        for request in others:
            ask(running, request)
        again = [ask(running, request) for request in ref.prompts]
        compare(name, figures, again, ref.again)
        cached = [answer.num_cached for answer in again]
        assert min(cached) >= len(ref.prompts[0].tokens) // 2, cached
        running.drain()
        count_moved(running, figures, "store_bytes", "load_bytes", "hit_tokens")
        assert figures["hit_tokens"] >= sum(len(r.tokens) for r in ref.prompts) // 3
        running.assert_nothing_is_held()
        if store == "eager":
            running.forget_gpu()
            damage(running.worker.memory.slots, fp8=name == "FP8 KV")
            damaged = ask(running, ref.prompts[0])
            assert damaged.num_cached >= len(ref.prompts[0].tokens) // 2
            assert_different(name, damaged, ref.again[0])
            figures["damage_shows"] = True


@each_family
def test_a_prompt_three_times_the_gpu_spills(reference: Any, name: str) -> None:
    ref: Reference = reference(name, "spill")
    with (
        outcome(name, "spill") as figures,
        engine(ref.folder, ref.spilling(), **settings(name, max_model_len=ref.longest)) as running,
    ):
        answers = [ask(running, request) for request in (ref.long, ref.long, ref.turn)]
        compare(name, figures, answers, ref.long_answers)
        assert answers[-1].num_cached > len(ref.long.tokens) // 2
        count_moved(running, figures, "spill_in_bytes", "spill_out_bytes", "spilled_steps")
        damage(running.spill_worker.arena.slots, fp8=name == "FP8 KV")
        damaged = ask(running, ref.long)
        assert damaged.num_cached > len(ref.long.tokens) // 2
        assert_different(name, damaged, ref.long_answers[1])
        figures["damage_shows"] = True


@each_family
def test_a_spilled_prompt_returns_from_ram(reference: Any, name: str) -> None:
    ref: Reference = reference(name, "spill and offload")
    transfer = ref.spilling(host_bytes=HOST_BYTES, load="always", verify="all")
    with (
        outcome(name, "spill and offload") as figures,
        engine(ref.folder, transfer, **settings(name, max_model_len=ref.longest)) as running,
    ):
        spill_and_return(running, name, figures, ref.long, ref.turn, ref.long_answers)


def spill_and_return(
    running: Engine, name: str, figures: dict[str, Any], long: Request, turn: Request, expected: list[Answer]
) -> None:
    compare(name, figures, [ask(running, long)], expected[:1])
    running.forget_gpu()
    streamed = running.metric("spill_in_bytes")
    again = ask(running, long)
    compare(name, figures, [again], expected[1:2])
    assert again.num_cached > len(long.tokens) // 2
    assert running.metric("spill_in_bytes") > streamed
    running.forget_gpu()
    compare(name, figures, [ask(running, turn)], expected[2:])
    running.drain()
    count_moved(running, figures, *MOVED)
    assert running.metric("corrupt_blocks") == 0
    running.assert_nothing_is_held()


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].graphs], scope="module")
def test_spilled_and_returned_prompts_run_in_graphs(reference: Any, name: str) -> None:
    ref: Reference = reference(name, "CUDA graphs")
    graphs = {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
        "max_model_len": ref.longest,  # kernels in a graph are laid out for it
    }
    with outcome(name, "CUDA graphs") as figures:
        with engine(ref.folder, num_gpu_blocks_override=None, **settings(name, **graphs)) as plain:
            expected = [ask(plain, request) for request in (ref.long, ref.long, ref.turn)]
        transfer = ref.spilling(host_bytes=HOST_BYTES, load="always", verify="all")
        with engine(ref.folder, transfer, **settings(name, **graphs)) as running:
            spill_and_return(running, name, figures, ref.long, ref.turn, expected)
