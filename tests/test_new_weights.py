"""KV in RAM belongs to the weights it was computed with: after new ones, no answer is made of the old."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.engine import BLOCK, Answer, Engine, _answer, assert_same, engine, overspill, random_prompt, sampling

PROMPT = random_prompt(1, 10 * BLOCK + 5)


def change(model: torch.nn.Module) -> None:
    """Every token gets the embedding of another one. Linear layers would not do: the CPU engine uses packed copies."""
    (embedding,) = (p for name, p in model.named_parameters() if "embed_tokens" in name)
    embedding.data.copy_(embedding.data.roll(1, 0))


def behind_the_connector(running: Engine) -> None:
    """Change the weights by a way that nothing of Overspill sees."""
    running.core.model_executor.collective_rpc("apply_model", args=(change,))


@pytest.fixture(scope="module")
def new_answer(llama: Path) -> Answer:
    with engine(llama) as fresh:
        behind_the_connector(fresh)
        return fresh.ask_one(PROMPT)


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_plain_reset_after_new_weights_empties_ram(llama: Path, new_answer: Answer, store: str) -> None:
    with engine(llama, overspill(store=store)) as spilling:
        for _ in range(2):  # lazy stores what is used again
            assert spilling.ask_one(PROMPT).differs_from(new_answer)
        spilling.drain()
        assert spilling.scheduler.host.num_cached > 0
        behind_the_connector(spilling)
        assert spilling.llm.reset_prefix_cache()
        assert_same([spilling.ask_one(PROMPT)], [new_answer])


def test_refused_reset_leaves_ram_as_it_is(llama: Path) -> None:
    with engine(llama, overspill()) as spilling:
        spilling.ask_one(PROMPT)
        spilling.drain()
        cached = spilling.scheduler.host.num_cached
        spilling.add(random_prompt(2, 40))
        spilling.step()
        assert not spilling.llm.reset_prefix_cache()
        assert spilling.scheduler.host.num_cached == cached > 0


def test_keep_on_reset_keeps_ram(llama: Path) -> None:
    with engine(llama, overspill(keep_on_reset=True)) as spilling:
        before = spilling.ask_one(PROMPT)
        spilling.drain()
        assert spilling.llm.reset_prefix_cache()
        again = spilling.ask_one(PROMPT)
        assert again.num_cached == 10 * BLOCK
        assert_same([again], [before])


def test_weights_changed_by_rpc_empty_ram_without_a_reset(llama: Path, new_answer: Answer) -> None:
    with engine(llama, overspill(keep_on_reset=True)) as spilling:
        assert spilling.ask_one(PROMPT).differs_from(new_answer)
        spilling.llm.apply_model(change)
        assert_same([spilling.ask_one(PROMPT)], [new_answer])


def test_kv_of_requests_that_run_through_a_change_is_not_shared(llama: Path, new_answer: Answer) -> None:
    with engine(llama, overspill()) as spilling:
        spilling.add(PROMPT, max_tokens=3 * BLOCK)
        for _ in range(4):
            spilling.step()
        spilling.llm.apply_model(change)
        (mixed,) = spilling.run().values()
        spilling.drain()
        assert spilling.scheduler.host.num_cached == 0, "KV of neither weights was stored"
        assert_same([spilling.ask_one(PROMPT)], [new_answer])
        later = spilling.ask_one([*PROMPT, *mixed.tokens])
        spilling.llm.reset_prefix_cache()
        assert_same([spilling.ask_one([*PROMPT, *mixed.tokens])], [later])


def test_harmless_rpc_leaves_ram_as_it_is(llama: Path) -> None:
    with engine(llama, overspill()) as spilling:
        spilling.ask_one(PROMPT)
        spilling.drain()
        cached = spilling.scheduler.host.num_cached
        spilling.llm.collective_rpc("check_health")
        assert spilling.scheduler.host.num_cached == cached > 0


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter for the keys and values of the tiny model."""
    folder.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for target, rows in (("k_proj", 64), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=draw)
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 8, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def ask_adapter(running: Engine, adapter: LoRARequest) -> Answer:
    prompts: Sequence[Any] = [{"prompt_token_ids": PROMPT}]
    (output,) = running.llm.generate(prompts, sampling(24), lora_request=adapter, use_tqdm=False)
    running.drain()
    return _answer(output)


@pytest.mark.parametrize("way", ["in place", "new id", "new content on disk"])
def test_replaced_adapter_does_not_find_the_old_ones_kv(llama: Path, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "adapter"
    lora = {"enable_lora": True, "max_lora_rank": 8}
    write_adapter(folder, seed=2)
    with engine(llama, **lora) as fresh:
        expected = ask_adapter(fresh, LoRARequest("a", 1, str(folder)))
    write_adapter(folder, seed=1)
    with engine(llama, overspill(), **lora) as spilling:
        before = ask_adapter(spilling, LoRARequest("a", 1, str(folder)))
        assert before.differs_from(expected)
        write_adapter(folder, seed=2)
        adapter = LoRARequest("a", 2 if way == "new id" else 1, str(folder), load_inplace=way == "in place")
        if way == "new content on disk":
            spilling.core.remove_lora(1)
        else:
            spilling.core.add_lora(adapter)
        assert_same([ask_adapter(spilling, LoRARequest("a", adapter.lora_int_id, str(folder)))], [expected])
