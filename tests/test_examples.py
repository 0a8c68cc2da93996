"""Every example runs, as a user would run it, with a tiny model on vLLM's CPU platform."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from overspill.address import free_port

EXAMPLES = Path(__file__).parents[1] / "examples"
# Enough for the weights, and for the KV of some 1,000 tokens beside a window.
SMALL = {
    "OVERSPILL_DEVICE": "cpu", "OVERSPILL_GPU_MEMORY": "8MiB", "OVERSPILL_RAM": "4GiB", "OVERSPILL_DTYPE": "float32",
    "OVERSPILL_ENFORCE_EAGER": "true",
}  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        # The plan gives the KV cache its size.
        if not name.startswith("OVERSPILL_") and name != "VLLM_CPU_KVCACHE_SPACE"
    }
    return {**clean, "XDG_CONFIG_HOME": "/nonexistent", "VLLM_LOGGING_LEVEL": "ERROR", **changes}


def run(example: str, *arguments: str, **changes: str) -> str:
    answer = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        capture_output=True, text=True, timeout=600, check=False, env=environment(**changes),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    return answer.stdout


@pytest.fixture(scope="module")
def speaking(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer, a token for each byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("speaking") / "llama"
    shutil.copytree(llama, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    vocabulary |= {f"<{number}>": number for number in range(len(vocabulary), 512)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_a_plan_for_a_card_has_a_line_for_each_length(llama: Path) -> None:
    told = run("plan_for_a_card.py", str(llama), "rtx4090", "64GiB").splitlines()
    assert len(told) == 4
    assert re.fullmatch(r" +8,192 tokens: everything on the GPU, .* GiB in RAM, \d+ tokens/s", told[0])


def test_a_long_context_is_answered_with_a_part_of_its_kv_in_ram(speaking: Path) -> None:
    told = run("long_context.py", str(speaking), "4k", **SMALL, OVERSPILL_OFFLOAD_RAM="0")
    assert "KV spilled to RAM" in told
    found = re.search(r"prompt: 4,064 tokens, of which ([\d,]+) bytes of KV were in RAM", told)
    assert found and int(found[1].replace(",", "")) > 2**20
    assert re.search(r"^answer: '.+'$", told, re.MULTILINE)


def test_conversations_come_back_from_ram(speaking: Path) -> None:
    told = run("warm_conversations.py", str(speaking), "1k", **SMALL, OVERSPILL_OFFLOAD_RAM="64MiB")
    assert "RAM for conversations that wait: 0.06 GiB" in told
    turns = re.findall(r"round (\d), conversation \d: (\d+) tokens, (\d+) cached", told)
    assert len(turns) == 18
    assert all(int(cached) == 0 for turn, _, cached in turns if turn == "1")
    # All, unless computing again seemed faster than a load. Without RAM it would be none: the cache holds five.
    assert sum(int(cached) > int(length) // 2 for turn, length, cached in turns if turn != "1") >= 6


def test_an_engine_from_engine_args_streams_two_answers_at_once(speaking: Path) -> None:
    told = run("async_engine.py", str(speaking), "4k", **SMALL, OVERSPILL_OFFLOAD_RAM="0")
    assert "'max_model_len': 4096" in told and "'kv_cache_memory_bytes'" in told and "spill_bytes" in told
    lines = re.findall(r"^(first|second): ", told, re.MULTILINE)
    assert lines.index("second") < len(lines) - 1 - lines[::-1].index("first"), "one came after the other"


def test_without_a_server_the_example_says_so() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
        told = run("ask_server.py", "Why?", OPENAI_BASE_URL=address)
    assert told.startswith(f"skipped: no server at {address}")


def test_a_server_is_asked(speaking: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "overspill", "serve", str(speaking), "--max-model-len", "4k", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(**SMALL, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 600
        while not answers(f"{address}/health"):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.3)
        told = run("ask_server.py", "Why?", OPENAI_BASE_URL=f"{address}/v1")
        assert told.startswith(f"{speaking} at {address}/v1:\n") and len(told.splitlines()) >= 2
    finally:
        server.terminate()
        server.wait(timeout=60)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


def test_every_example_is_short_is_documented_and_is_run_here() -> None:
    page = (EXAMPLES.parent / "docs/python.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 40, path.name
        assert f"(../examples/{path.name})" in page, path.name
        assert f'"{path.name}"' in Path(__file__).read_text(), path.name
