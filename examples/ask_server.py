"""Asking a server that runs (`overspill serve MODEL`) with the openai package, streaming.

Expect the answer piece by piece, or a line that says no server was found. Where it listens is in OPENAI_BASE_URL, by
default http://127.0.0.1:8000/v1.

    python examples/ask_server.py "Which rivers cross Paris?"
"""

import os
import sys

import openai

question = sys.argv[1] if len(sys.argv) > 1 else "Which rivers cross Paris?"
address = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
# A server of your own asks for no key, unless it was given one with --api-key.
client = openai.OpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY", "none"))

try:
    model = client.models.list().data[0].id
except openai.APIConnectionError:
    print(f"skipped: no server at {address}; start one with: overspill serve Qwen/Qwen3-4B-Instruct-2507")
    sys.exit()

print(f"{model} at {address}:")
messages = [{"role": "user", "content": question}]
for piece in client.chat.completions.create(model=model, messages=messages, max_tokens=64, stream=True):
    if piece.choices:
        print(piece.choices[0].delta.content or "", end="", flush=True)
print()
