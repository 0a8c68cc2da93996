"""vLLM's asynchronous engine, started by yourself with the plan's arguments.

Expect the arguments, then two answers that grow at the same time: lines of both take turns.

    python examples/async_engine.py Qwen/Qwen3-4B-Instruct-2507 128k
"""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import overspill


async def ask(engine: AsyncLLM, name: str, prompt: str) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=256, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(prompt, sampling, request_id=name):
        print(f"{name}: {output.outputs[0].text!r}")


async def main(model: str, max_model_len: str) -> None:
    arguments = overspill.engine_args(model, max_model_len=max_model_len)
    print(arguments)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        await asyncio.gather(ask(engine, "first", "Once upon a time"), ask(engine, "second", "In a far land"))
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine is a process of its own, which imports this file
    defaults = ["Qwen/Qwen3-4B-Instruct-2507", "128k"]
    asyncio.run(main(*sys.argv[1:], *defaults[len(sys.argv) - 1 :]))
