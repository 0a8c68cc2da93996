"""Drafts on one GPU: what they gain requests with KV in RAM, and what they cost those that need none.

Each life is an engine held to --gpu-bytes with one setting of --drafts, in a process of its own. Its weights are such
that a model counts: after token 7 comes 8, whatever was before. So a prompt decides what becomes of drafts:

    edit     counts, and begins to count again: every draft is right
    vain     pairs of neighbours, each followed by another token: drafts are found, and all are wrong
    write    random tokens: none is found, and what vLLM drafts nevertheless is wrong

and each is decoded by one request of --length tokens, by --requests of them at once, and by batches of short ones.

    python benchmarks/drafts.py                                      all of it, about 600 s on an H200
    python benchmarks/drafts.py --drafts off ngram:4 --out mine.json
    python benchmarks/drafts.py --drafts ngram:8 --resume --out mine.json          adds a life to the file
    python benchmarks/drafts.py --model tiny --dtype float32 --enforce-eager --block-size 32 --length 1500 \\
        --requests 2 --batches 1,2 --output 24 --gpu-bytes 0 --resident-bytes 7MiB --max-num-batched-tokens 256
                                                                     on a CPU, 1 minute
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import lives
import markdown_tables as tables
import record
import shapes
from overspill.planning.drafts import num_drafts, parse_drafts
from overspill.verify.workload import Answer
from record import Json, say
from spill import element_bytes, size, token_counts
from spill_plan import SPARE_TOKENS, Life

if TYPE_CHECKING:
    from spill_engine import SpillEngine

TEXTS = ("edit", "vain", "write")
DRAFTS = ("off", "ngram:4", "ngram:8", "ngram_gpu:4")
SHORT_TOKENS = 512
TINY = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 8192}  # fmt: skip
LEAST_SECONDS = 90.0
SHUTDOWN_SECONDS = 20.0


def prompt_of(text: str, number: int, tokens: int, vocabulary: int) -> list[int]:
    """Requests differ in where they count from."""
    first = vocabulary // 8 + number * 997 % (vocabulary // 4)
    random = np.random.default_rng(number)
    if text == "write":
        drawn: list[int] = random.integers(vocabulary // 8, vocabulary, tokens).tolist()
        return drawn
    counted = first + np.arange(tokens) % (vocabulary // 2)
    if text == "vain":
        pairs = np.stack([counted[:-1], counted[1:], random.integers(0, vocabulary // 8, tokens - 1)], axis=1)
        counted = np.concatenate([pairs.ravel()[: tokens - 1], counted[:1]])
    else:
        begun = tokens // 8
        counted[tokens - begun :] = counted[:begun]
    found: list[int] = counted.tolist()
    return found


def live(life: Life, texts: Sequence[str], num_requests: int, output: int, report: Callable[[Json], None]) -> None:
    """One engine, from its start to its end; runs in a child."""
    import torch

    import gpu
    from spill_engine import SpillEngine
    from spill_phases import engine_arguments

    began = time.monotonic()
    measured = gpu.measure()
    report({"event": "started", **measured})
    total_bytes = int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else None
    arguments = engine_arguments(life, total_bytes, measured["context_bytes"])
    arguments["load_format"] = _register_loader()
    with SpillEngine.start(life.model, life.options, **arguments) as engine:
        vocabulary = int(engine.llm.model_config.get_vocab_size())
        report({"event": "started", "start_seconds": time.monotonic() - began, **engine.facts()})
        engine.wait_for_arena()
        make = partial(prompt_of, vocabulary=vocabulary)
        prompt = make("edit", 0, life.lengths[0] // 2)
        first = engine.generate(prompt, 2 * output)  # compiles what is compiled on first use
        if first.tokens != list(range(prompt[-1] + 1, prompt[-1] + 1 + 2 * output)):
            raise SystemExit(f"the model does not count: after {prompt[-1]} came {first.tokens[:8]}")
        for text in texts:
            for found in _decode(engine, life, make, text, num_requests, output):
                report({"event": "repeat", "text": text, **found})
                say(f"{life.name}: {text}: {found['requests']} of {found['length']}: {found['tokens_per_s']:.1f}/s")


def _decode(
    engine: SpillEngine, life: Life, make: Callable[[str, int, int], list[int]], text: str, num_requests: int,
    output: int,
) -> Iterator[Json]:  # fmt: skip
    length = life.lengths[0]
    engine.forget()
    # The first goes on while the others begin, so that each prompt is computed once.
    running = [engine.add(make(text, 0, length), life.max_model_len - length)]
    yield {"length": length, **_timed(engine, running, output)}
    running += [engine.add(make(text, n, length), life.max_model_len - length) for n in range(1, num_requests)]
    yield {"length": length, **_timed(engine, running, output)}
    engine.stop(*running)
    for batch in life.batches:
        engine.forget()
        short = [engine.add(make(text, n, SHORT_TOKENS), 4 * output) for n in range(batch)]
        yield {"length": SHORT_TOKENS, **_timed(engine, short, 2 * output)}
        engine.stop(*short)


def _timed(engine: SpillEngine, running: list[Answer], wanted: int) -> Json:
    """Tokens of requests that have all begun, until each has so many more."""
    engine.run(lambda: all(one.tokens for one in running))
    engine.step()
    before, counters, began = [len(one.tokens) for one in running], _drafted(), time.perf_counter()
    engine.run(lambda: all(len(one.tokens) - first >= wanted for one, first in zip(running, before)))
    seconds = time.perf_counter() - began
    made, accepted = (after - first for after, first in zip(_drafted(), counters))
    tokens = sum(len(one.tokens) for one in running) - sum(before)
    return {
        "requests": len(running), "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
        "draft_tokens": made, "accepted_tokens": accepted,
        "spilled": sum(engine.is_spilled(one) for one in running),
    }  # fmt: skip


def _drafted() -> tuple[int, int]:
    """Tokens that vLLM has guessed, and those that were right."""
    from prometheus_client import REGISTRY

    found = []
    for name in ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"):
        counter = REGISTRY._names_to_collectors.get(name)
        samples = [sample for metric in counter.collect() for sample in metric.samples] if counter else []
        found.append(sum(int(sample.value) for sample in samples if sample.name.endswith("_total")))
    made, accepted = found
    return made, accepted


def _register_loader() -> str:
    """A load format whose weights count: what layers add is zero, and the head has the embedding of the token before.
    Before kernels repack weights into forms of their own, as on a CPU."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("counting")
    class CountingWeights(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            super().load_weights(model, model_config)
            parameters = dict(model.named_parameters())
            embedding = next(value for name, value in parameters.items() if name.endswith("embed_tokens.weight"))
            with torch.inference_mode():
                embedding.normal_(generator=torch.Generator(device=embedding.device).manual_seed(0))
                for name, value in parameters.items():
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        value.zero_()
                    elif name.endswith("lm_head.weight"):
                        value.copy_(embedding.roll(1, dims=0))
                    elif value.dim() == 1:
                        value.fill_(1.0)

    return "counting"


def make_life(drafts: str, arguments: argparse.Namespace, seconds: float) -> Life:
    output = 2 * arguments.output * (1 + arguments.requests)  # the first goes on while others begin
    max_model_len = arguments.length + output + SPARE_TOKENS
    per_token = shapes.kv_bytes_per_token(arguments.model, element_bytes(arguments))
    resident = {"resident_bytes": arguments.resident_bytes} if arguments.resident_bytes else {}
    return Life(
        name=drafts, model=str(arguments.model), seconds=max(0.0, seconds - SHUTDOWN_SECONDS),
        lengths=[arguments.length], phases=(), batches=arguments.batches, max_model_len=max_model_len,
        positions=max_model_len, drafts=drafts, gpu_bytes=arguments.gpu_bytes or None,
        # As vLLM's own sizes do, so that batches run in graphs with drafts and without.
        capture_sizes=sorted({1, 2, 4, *arguments.batches} | {
            size * (1 + num_drafts(drafts)) for size in (1, 2, arguments.requests, *arguments.batches)}),
        options={"spill_bytes": arguments.requests * max_model_len * per_token, "spill_share": 1.0, **resident},
        **{key: getattr(arguments, key) for key in ("dtype", "block_size", "max_num_batched_tokens", "enforce_eager")},
    )  # fmt: skip


def summarise(result: Json) -> list[Json]:
    """Tokens a second of every case, and as a factor of the same without drafts, whose text does not matter."""
    cells: dict[tuple[str, str, int, int], list[float]] = {}
    for life in result["lives"]:
        for one in life["measured"]:
            cells.setdefault((life["drafts"], one["text"], one["length"], one["requests"]), []).append(
                one["tokens_per_s"]
            )
    rows: list[Json] = []
    for (drafts, text, length, requests), speeds in cells.items():
        plain = [speed for key, found in cells.items() if key[0] == "off" and key[2:] == (length, requests)
                 for speed in found]  # fmt: skip
        speed = statistics.median(speeds)
        factor = speed / statistics.median(plain) if plain else None
        rows.append(
            {"drafts": drafts, "text": text, "length": length, "requests": requests, "tokens_per_s": speed,
             "factor": factor}
        )  # fmt: skip
    return rows


def run_all(arguments: argparse.Namespace, out: Path, result: Json) -> None:
    def keep(life: lives.Life, events: list[tuple[str, Json]], ended: Json) -> None:
        started: Json = {}
        for event, facts in events:
            started |= facts if event == "started" else {}
        measured = [facts for event, facts in events if event == "repeat"]
        result["lives"].append({"drafts": life.kind, "at": record.now(), **ended, **started, "measured": measured})
        result["summary"] = summarise(result)

    planned = [
        lives.Life(
            name=f"drafts-{drafts}", kind=drafts, work="live", arguments=partial(_given, drafts, arguments),
            about={"drafts": drafts},
        )
        for drafts in arguments.drafts
    ]  # fmt: skip
    lives.run_all("drafts", planned, keep, result=result, out=out, options=arguments, least_seconds=LEAST_SECONDS)


def _given(drafts: str, arguments: argparse.Namespace, seconds: float) -> tuple[Life, list[str], int, int]:
    # Without drafts every text is decoded alike.
    texts = ["write"] if drafts == "off" else arguments.texts
    return make_life(drafts, arguments, seconds), texts, arguments.requests, arguments.output


def main() -> None:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--model", default=None, help="folder, or 'tiny'; default: Llama-3.1-8B's shape")
    parser.add_argument("--drafts", nargs="+", type=parse_drafts, default=list(DRAFTS))
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--length", type=int, default=52_000, help="of the long prompts")
    parser.add_argument("--requests", type=int, default=4, help="long ones at once")
    parser.add_argument("--batches", type=token_counts, default=[1, 8, 64], help="sizes of short ones, as 1,8,64")
    parser.add_argument("--output", type=int, default=96, help="tokens that are timed of each request")
    parser.add_argument("--gpu-bytes", type=size, default=size("24GB"), help="GPU memory, weights included")
    parser.add_argument("--resident-bytes", type=size, default=None, help="GPU memory for KV; default: what is free")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--enforce-eager", action="store_true")
    lives.add_options(parser, life_seconds=300)
    arguments = parser.parse_args()
    # A head of its own is needed for counting.
    is_tiny = arguments.model == "tiny"
    arguments.model = shapes.llama_3_1_8b(**TINY) if is_tiny else shapes.folder_of(arguments.model)
    settings = record.settings(arguments) | {"model": arguments.model.name}
    out, result = lives.load_result("drafts", settings, arguments, {"lives": []})
    run_all(arguments, out, result)
    print(tables.drafts_text(result), end="")
    say(f"written to {out}")


if __name__ == "__main__":
    main()
