"""Which context lengths a card can serve, how, and how fast. Needs no GPU and loads no weights.

Expect a line per length. Where the KV of a long context does not fit beside the weights, the line says what goes to
RAM, and the speed drops.

    python examples/plan_for_a_card.py Qwen/Qwen3-4B-Instruct-2507 rtx4090 64GiB
"""

import sys

import overspill

model, card, ram = [*sys.argv[1:], *["Qwen/Qwen3-4B-Instruct-2507", "rtx4090", "64GiB"][len(sys.argv) - 1 :]]

for length in ("8k", "32k", "128k", "256k"):
    plan = overspill.plan(model, max_model_len=length, gpu=card, ram=ram)
    if plan.max_model_len > plan.facts.max_position_embeddings:
        print(f"{plan.max_model_len:>9,} tokens: more than the model was made for")
        continue
    way = plan.recommended
    if way is None:
        print(f"{plan.max_model_len:>9,} tokens: does not fit; the longest that does is {plan.longest_context:,}")
        continue
    in_ram = way.ram_bytes / 2**30
    speed = way.decode_tokens_per_s.value
    print(f"{plan.max_model_len:>9,} tokens: {way.name}, {in_ram:.1f} GiB in RAM, {speed:.0f} tokens/s")
