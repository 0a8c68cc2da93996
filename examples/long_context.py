"""One prompt that is longer than the GPU's KV cache.

Expect the plan first: what of the KV is resident and what spills to RAM. Then the answer, and how much of the request
was in RAM. Where everything fits on the GPU nothing spills; give a longer context, or less of the GPU with
OVERSPILL_GPU_MEMORY=16GiB.

    python examples/long_context.py Qwen/Qwen3-4B-Instruct-2507 128k
"""

import sys

from vllm import SamplingParams

import overspill
from overspill.planning.report import plan_as_text

ANSWER_TOKENS = 32

if __name__ == "__main__":  # the engine may be a process of its own, which imports this file
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-4B-Instruct-2507"
    length = sys.argv[2] if len(sys.argv) > 2 else "128k"

    llm = overspill.LLM(model, max_model_len=length)
    print(plan_as_text(llm.plan))

    tokenizer = llm.get_tokenizer()
    question = tokenizer.encode("\nWhich of these numbers is a prime? The number is")
    book = tokenizer.encode("".join(f"Page {page} has {page * page % 997} words.\n" for page in range(50_000)))
    room = llm.plan.max_model_len - ANSWER_TOKENS - len(question)
    prompt = {"prompt_token_ids": book[:room] + question}

    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS), use_tqdm=False)
    spilled = (output.kv_transfer_params or {}).get("overspill", {}).get("spilled_bytes", 0)
    print(f"prompt: {len(output.prompt_token_ids):,} tokens, of which {spilled:,} bytes of KV were in RAM")
    print(f"answer: {output.outputs[0].text!r}")
