"""Several conversations that take turns, more than the GPU's KV cache holds.

Expect `cached` to be most of the prompt from the second round on: what the GPU had to forget in between comes back from
RAM instead of being computed again.

    python examples/warm_conversations.py Qwen/Qwen3-4B-Instruct-2507 32k
"""

import sys

from vllm import SamplingParams

import overspill

CONVERSATIONS, ROUNDS, ANSWER_TOKENS = 6, 3, 16

if __name__ == "__main__":  # the engine may be a process of its own, which imports this file
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-4B-Instruct-2507"
    length = sys.argv[2] if len(sys.argv) > 2 else "32k"

    llm = overspill.LLM(model, max_model_len=length)
    print(f"RAM for conversations that wait: {llm.plan.chosen.offload_bytes / 2**30:.2f} GiB")
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)

    # Each begins with a document of its own, half as long as the context allows.
    tokenizer, half = llm.get_tokenizer(), llm.plan.max_model_len // 2
    texts = ["".join(f"{who}: {i * i % 997}, " for i in range(half)) for who in range(CONVERSATIONS)]
    histories = [tokenizer.encode(text)[:half] for text in texts]

    for turn in range(1, ROUNDS + 1):
        for who, history in enumerate(histories):
            (output,) = llm.generate([{"prompt_token_ids": history}], sampling, use_tqdm=False)
            cached = output.num_cached_tokens or 0
            print(f"round {turn}, conversation {who}: {len(history)} tokens, {cached} cached")
            history += [*output.outputs[0].token_ids, *tokenizer.encode(" And then?")]
