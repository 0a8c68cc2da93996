"""Bytes of weights: of published models, tensor by tensor, and by where they are used."""

import json
from pathlib import Path
from typing import Any

import pytest

from overspill.figures import Origin
from overspill.kv.sizes import GiB
from overspill.model import ModelError
from overspill.model.checkpoint import Tensor
from overspill.model.config import Config
from overspill.model.derived import SHAPES, derive_tensors
from overspill.model.description import describe, sort_weights
from overspill.model.facts import ModelFacts, active_bytes
from overspill.model.source import read_folder
from tests import model_configs as models
from tests.model_tensors import write_safetensors


def derive(config: dict[str, Any], **changes: Any) -> ModelFacts:
    return describe(Config({**config, **changes}, where="config.json"), None, name="model")


# total_size in the model.safetensors.index.json of each; of OLMo-2 and Qwen3-Coder what vLLM makes of their configs.
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (models.llama_3_1_8b(), 16_060_522_496),
        (models.qwen2_5_7b(), 15_231_233_024),
        (models.qwen3_8b(), 16_381_470_720),
        (models.qwen3_30b_a3b(), 61_064_245_248),
        (models.qwen3_coder_30b_a3b(), 61_064_245_248),
        (models.olmo_2_7b(), 14_597_234_688),
        (models.mistral_7b_v0_1(), 14_483_464_192),
        (models.mixtral_8x7b(), 93_405_585_408),
        (models.phi_3_mini_4k(), 7_642_159_104),
        (models.gemma_3_4b(), 8_600_158_944),
        (models.deepseek_v2_lite(), 31_412_968_448),
        (models.gpt_oss_20b(), 13_761_264_768),
    ],
)
def test_derived_weights_are_those_of_the_published_checkpoint(config: dict[str, Any], expected: int) -> None:
    weights = derive(config).weights
    assert weights.total_bytes == weights.checkpoint_bytes == expected
    assert weights.source is Origin.DERIVED


def test_unquantised_weights_default_to_the_dtype_vllm_runs() -> None:
    """Without a dtype in its config, gpt-oss-20b was 16.2 GiB: attention and embeddings were taken for float32."""
    config = {key: value for key, value in models.gpt_oss_20b().items() if key != "torch_dtype"}
    facts = derive(config)
    assert facts.dtype == "bfloat16" and facts.weights.total_bytes == 13_761_264_768


def test_what_vllm_reports_after_loading_is_what_is_derived() -> None:
    # "Model loading took 13.5958 GiB", says a user's log of OLMo-2-7B: a megabyte more, for tables of rotary positions.
    assert derive(models.olmo_2_7b()).weights.total_bytes / GiB == pytest.approx(13.5958, abs=0.002)


SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# The kinds of each architecture that its config can ask for.
ASKED: dict[str, list[dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": [
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2},
        {**LATENT, "q_lora_rank": 12, "attention_bias": True},
    ],
    "DeepseekV3ForCausalLM": [{**LATENT, "q_lora_rank": 12}],
    "GemmaForCausalLM": [{**SHAPE, "head_dim": 16}],
    "Gemma2ForCausalLM": [{**SHAPE, "head_dim": 16, "attention_bias": True}],
    "Gemma3ForCausalLM": [{**SHAPE, "head_dim": 16}, {**SHAPE, "head_dim": 16, "tie_word_embeddings": False}],
    "GptOssForCausalLM": [{**SHAPE, "head_dim": 16, "num_local_experts": 4}],
    "GraniteForCausalLM": [{**SHAPE, "attention_bias": True}],
    "LlamaForCausalLM": [
        {**SHAPE},
        {**SHAPE, "tie_word_embeddings": True, "head_dim": 16},
        {**SHAPE, "attention_bias": True, "mlp_bias": True},
    ],
    "MistralForCausalLM": [{**SHAPE, "head_dim": 16}],
    "MixtralForCausalLM": [{**SHAPE, "num_local_experts": 4}],
    "Olmo2ForCausalLM": [{**SHAPE}],
    "Olmo3ForCausalLM": [{**SHAPE, "attention_bias": True}],
    "Phi3ForCausalLM": [{**SHAPE}],
    "Qwen2ForCausalLM": [{**SHAPE}, {**SHAPE, "tie_word_embeddings": True}],
    "Qwen3ForCausalLM": [{**SHAPE, "head_dim": 16}, {**SHAPE, "head_dim": 16, "attention_bias": True}],
    "Qwen3MoeForCausalLM": [
        {**SHAPE, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {
            **SHAPE,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 2,
        },
    ],
    "SmolLM3ForCausalLM": [{**SHAPE}],
}


def saved(architecture: str, keys: dict[str, Any], folder: Path) -> Path:
    """A checkpoint as transformers writes it."""
    import torch
    import transformers

    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model_class(model_class.config_class(**keys)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "keys"), [(architecture, keys) for architecture, asked in ASKED.items() for keys in asked]
)
def test_every_derived_tensor_is_in_the_checkpoint_and_no_other(
    tmp_path: Path, architecture: str, keys: dict[str, Any]
) -> None:
    from safetensors import safe_open

    folder = saved(architecture, keys, tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    config = Config(json.loads((folder / "config.json").read_text()), where="config.json")
    measured = read_folder(folder)
    derived = derive_tensors(config, dtype="bfloat16", is_tied=measured.is_tied, quantization=None)
    assert {tensor.name: tensor.shape for tensor in derived} == written
    (folder / "model.safetensors").unlink()
    assert read_folder(folder).weights.total_bytes == measured.weights.total_bytes
    assert measured.weights.source is Origin.MEASURED


def test_every_formula_has_been_held_against_a_checkpoint() -> None:
    # Gemma-3 with its vision tower needs torchvision to be built; its published size stands above.
    assert set(SHAPES) == {*ASKED, "Gemma3ForConditionalGeneration"}


def test_weights_are_sorted_by_where_they_are_used() -> None:
    shapes = {
        "model.embed_tokens.weight": (64, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.mlp.experts.3.up_proj.weight": (4, 8),
        "model.layers.1.mlp.experts.gate_up_proj": (2, 4, 8),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (2, 8),
        "model.layers.1.block_sparse_moe.input_linear.weight": (2, 8),
        "model.layers.2.mtp_head.weight": (100,),
        "model.norm.weight": (8,),
        "lm_head.weight": (32, 8),
        "vision_tower.encoder.layers.0.weight": (7,),
        "mtp.layers.0.weight": (11,),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
    }
    tensors = [Tensor(name=name, dtype="BF16", shape=shape) for name, shape in shapes.items()]
    weights = sort_weights(
        tensors, num_layers=2, is_tied=False, is_quantized=False, dtype="bfloat16", source=Origin.MEASURED
    )
    assert weights.embedding_bytes == 2 * 64 * 8
    assert weights.lm_head_bytes == 2 * 32 * 8
    assert weights.layer_bytes == (2 * (64 + 32), 2 * (64 + 16 + 16))
    assert weights.expert_bytes == (2 * 32, 2 * (64 + 16))
    assert weights.rest_bytes == 2 * (8 + 7)
    assert weights.unused_bytes == 2 * (100 + 11 + 4)
    assert weights.checkpoint_bytes == sum(tensor.num_bytes for tensor in tensors)
    assert weights.total_bytes + weights.unused_bytes == weights.checkpoint_bytes


def write(folder: Path, config: dict[str, Any], tensors: list[Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_a_tied_lm_head_is_not_loaded_though_it_was_saved(tmp_path: Path) -> None:
    config = {**models.SMALL["llama, biases"], "tie_word_embeddings": True}
    parsed = Config(config, where="config.json")
    tensors = derive_tensors(parsed, dtype="bfloat16", is_tied=False, quantization=None)
    facts = read_folder(write(tmp_path, config, tensors))
    assert facts.is_tied
    assert facts.weights.lm_head_bytes == 0
    assert facts.weights.unused_bytes == facts.weights.embedding_bytes == 512 * 256 * 2


def test_a_checkpoint_without_an_lm_head_is_tied(tmp_path: Path) -> None:
    """Even if its config does not say so."""
    config = models.SMALL["llama, biases"]
    parsed = Config(config, where="config.json")
    tensors = derive_tensors(parsed, dtype="bfloat16", is_tied=True, quantization=None)
    assert read_folder(write(tmp_path, config, tensors)).is_tied


def test_float32_is_served_as_bfloat16_unless_asked_for(tmp_path: Path) -> None:
    config = {**models.SMALL["llama, biases"], "torch_dtype": "float32"}
    parsed = Config(config, where="config.json")
    folder = write(tmp_path, config, derive_tensors(parsed, dtype="float32", is_tied=False, quantization=None))
    halved, whole = read_folder(folder), read_folder(folder, dtype="float32")
    assert (halved.dtype, whole.dtype) == ("bfloat16", "float32")
    assert 2 * halved.weights.total_bytes == whole.weights.total_bytes == halved.weights.checkpoint_bytes


def test_quantised_weights_count_as_they_lie_in_the_file(tmp_path: Path) -> None:
    config = {**models.SMALL["llama, biases"], "num_hidden_layers": 1, "quantization_config": {"quant_method": "awq"}}
    packed = [
        Tensor(name="model.layers.0.mlp.up_proj.qweight", dtype="I32", shape=(256, 64)),
        Tensor(name="model.layers.0.mlp.up_proj.qzeros", dtype="I32", shape=(2, 64)),
        Tensor(name="model.layers.0.mlp.up_proj.scales", dtype="F32", shape=(2, 512)),
    ]
    facts = read_folder(write(tmp_path, config, packed))
    assert facts.quantization == "awq"
    assert facts.weights.layer_bytes == (4 * (256 * 64 + 2 * 64 + 2 * 512),)


def test_a_token_reads_its_experts_and_a_batch_reads_more() -> None:
    facts = derive(models.qwen3_30b_a3b())
    dense = facts.weights.total_bytes - sum(facts.weights.expert_bytes) - facts.weights.embedding_bytes
    expert = 3 * 2048 * 768 * 2
    assert sum(facts.weights.expert_bytes) == 48 * 128 * expert
    # 3.35 billion parameters, less the embedding of which a token reads a row, and the final norm.
    assert active_bytes(facts) == dense - facts.weights.rest_bytes + 48 * 8 * expert
    assert active_bytes(facts) < active_bytes(facts, 16) < active_bytes(facts, 10_000)
    assert active_bytes(facts, 10_000) == dense - facts.weights.rest_bytes + 48 * 128 * expert


def test_all_of_a_dense_model_is_read_but_the_embedding() -> None:
    facts = derive(models.qwen3_8b())
    weights = facts.weights
    assert active_bytes(facts) == weights.total_bytes - weights.embedding_bytes - weights.rest_bytes
    tied = derive(models.gemma_3_4b_text())
    assert active_bytes(tied) == tied.weights.total_bytes - tied.weights.rest_bytes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (models.qwen3_next_80b_a3b(), "describes a Qwen3NextForCausalLM, and no weight files are beside it"),
        (
            {**models.llama_3_1_8b(), "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised with gptq, and no weight files are beside it",
        ),
    ],
)
def test_what_cannot_be_derived_is_refused_with_what_is_missing(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        derive(config)
