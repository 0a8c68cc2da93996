"""Small random models of the kinds that people serve, without checkpoints.

A model is a folder with `config.json`; its weights are drawn when vLLM loads it, by a loader of our own, before vLLM
repacks them for its kernels. So every quantized format needs only the parameters vLLM makes for it.
"""

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from tests.engine import VOCAB, random_prompt

Config = dict[str, Any]

SEED = 7
# Where queries are not normalised: scores of width 4, so that softmax over thousands of tokens picks out a few of them
# and a wrong block of KV is not averaged away.
SHARP = 2.0
# Normalised queries and keys have scores of width 1; this gain makes them as wide.
QUERY_GAIN = 4.0
# Logits of this width: the likeliest token varies, and is seldom tied with the next.
LOGITS = 3.0
FP4_WIDTH = 2.93  # root mean square of the sixteen values of E2M1
INT4_WIDTH = 4.32  # of a uniform -7 … 7: a mean that is not zero would make answers repeat themselves
FP8_WIDTH = 64.0  # seven deviations are within E4M3's 448


@register_model_loader("sensitive")
class SensitiveLoader(DummyModelLoader):
    """Weights whose output depends on the whole context; the same for the same names, in whatever order they come."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                values = weight_values(prefix, name, parameter, module)
                if values is not None:
                    parameter.data.copy_(values.to(parameter.dtype))


def weight_values(prefix: str, name: str, parameter: nn.Parameter, module: nn.Module) -> torch.Tensor | None:
    """What a parameter is to hold; None leaves it as vLLM made it."""
    path = f"{prefix}.{name}"
    draw = torch.Generator().manual_seed(SEED + zlib.crc32(path.encode()))
    shape = parameter.shape

    def normal(width: float) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * width

    if not shape:
        return None  # scales of K and V, which stay 1 unless a checkpoint says otherwise
    if name == "A_log" or name == "A":
        # Heads that forget within tens of tokens, up to ones that remember thousands.
        rates = torch.linspace(math.log(0.05), math.log(0.0002), len(parameter))
        return rates if name == "A_log" else -rates.exp()
    if name in ("D", "dt_bias"):
        return torch.full(shape, float(name == "D"))
    if "Norm" in type(module).__name__ and name == "weight":
        gain = QUERY_GAIN if path.endswith("q_norm.weight") else 1.0
        return torch.full(shape, gain - ("Gemma" in type(module).__name__))
    if name.endswith("bias"):
        return normal(0.02)
    if name == "qzeros":
        return torch.full(shape, _signed(0x88888888), dtype=parameter.dtype)
    if name == "qweight":
        digits = torch.randint(1, 16, (*shape, 8), generator=draw, dtype=torch.int64)
        packed = (digits << torch.arange(0, 32, 4)).sum(-1)
        return torch.where(packed >= 2**31, packed - 2**32, packed)
    if parameter.dtype == torch.uint8:
        return _mxfp4(name, parameter, draw)
    width = _width(path, module, shape)
    if name == "scales":
        return torch.full(shape, width / INT4_WIDTH)
    if name.startswith("weight_scale"):
        return torch.full(shape, width / FP8_WIDTH)
    if parameter.dtype == torch.float8_e4m3fn:
        return normal(FP8_WIDTH).clamp(-448, 448)
    return normal(width)


def _width(path: str, module: nn.Module, shape: torch.Size) -> float:
    fan_in = getattr(module, "input_size_per_partition", None)  # of packed weights and of scales, too
    if "embed" in path or (len(shape) == 1 and fan_in is None):
        return 1.0
    if fan_in is None or len(shape) > 2:
        fan_in = math.prod(shape[1:]) if len(shape) == 4 else shape[-1]
    if "lm_head" in path:
        return float(LOGITS * fan_in**-0.5)
    # Decisive routers, too: where two experts are as good, rounding would choose between them.
    sharp = any(part in path for part in ("qkv", "q_proj", "k_proj", "q_b_proj", "kv_", ".gate.", ".router."))
    return float((SHARP if sharp and "vision" not in path else 1.0) * fan_in**-0.5)


def _mxfp4(name: str, parameter: nn.Parameter, draw: torch.Generator) -> torch.Tensor:
    if not name.endswith("_scale"):
        return torch.randint(0, 256, parameter.shape, generator=draw, dtype=torch.uint8)
    fan_in = parameter.shape[-1] * 32
    exponent = round(math.log2(fan_in**-0.5 / FP4_WIDTH))
    return torch.full(parameter.shape, 127 + exponent, dtype=torch.uint8)


def _signed(bits: int) -> int:
    return bits - 2**32


@dataclass(frozen=True)
class Request:
    """A prompt as the engine takes it."""

    tokens: tuple[int, ...]
    lora: LoRARequest | None = None
    image: int | None = None
    """The seed of a picture, put in place of `IMAGE_TOKEN`."""

    @property
    def prompt(self) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(self.tokens)}
        if self.image is not None:
            prompt["multi_modal_data"] = {"image": picture(self.image)}
        return prompt

    def followed_by(self, answer: tuple[int, ...], more: list[int]) -> "Request":
        """The next turn of a conversation."""
        said = (token if token < VOCAB else 3 for token in answer)  # never an image's token without an image
        return Request((*self.tokens, *said, *more), self.lora, self.image)


def prompts(folder: Path, length: int, seed: int) -> list[Request]:
    return [Request(tuple(random_prompt(100 * seed + i, length))) for i in range(3)]


def prompts_with_adapters(folder: Path, length: int, seed: int) -> list[Request]:
    """The same tokens without an adapter and with two: they must not find each other's KV."""
    tokens = tuple(random_prompt(seed, length))
    return [Request(tokens, lora) for lora in (adapter(folder, 1), None, adapter(folder, 2))]


def prompts_with_images(folder: Path, length: int, seed: int) -> list[Request]:
    """The same text after different pictures."""
    tokens = (1, IMAGE_TOKEN, *random_prompt(seed, length - IMAGE_TOKENS))
    return [Request(tokens, image=10 * seed + i) for i in range(3)]


@dataclass(frozen=True)
class Family:
    config: Config
    engine: Config = field(default_factory=dict)
    """Settings of every engine."""
    cuda: Config = field(default_factory=dict)
    """Settings on a GPU only: kernels that need no package beside vLLM's own."""
    cpu: Config = field(default_factory=dict)
    notes: str = ""
    requests: Callable[[Path, int, int], list[Request]] = prompts
    files: Callable[[Path], None] | None = None
    """What else belongs in the model's folder."""
    rounding: float = 0.35
    """How far log-probabilities may lie apart in bf16 where a prompt was computed in other pieces. Logits of width 3
    reach 10, where bf16 has steps of 1/16, and the layers before them add about as much again."""
    graphs: bool = False
    """Also run with CUDA graphs, which takes as long as all the rest of a family. Not where a router chooses experts:
    steps that stream may run piecewise where stock vLLM replays a FULL graph, and that rounding would choose others."""

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.files is not None:
            self.files(folder)
        return folder

    def settings(self, *, cuda: bool) -> Config:
        return {
            "load_format": "sensitive",
            "block_size": 32,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 1 << 30,
            **self.engine,
            **(self.cuda if cuda else self.cpu),
        }


# 32 tokens of 4 KV heads of 128 numbers are 64 KiB in bf16, so the 2 MiB that CUDA maps hold 32 blocks, 1024 tokens.
_BASE: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
_LLAMA: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_BASE}
_EVERY_THIRD_FULL = ["sliding_attention", "sliding_attention", "full_attention"] * 4
# Four layers with attention, so that each half of spill's window serves two of them.
_EVERY_THIRD_ATTENDS = ["linear_attention", "linear_attention", "full_attention"] * 4
_GDN: Config = {
    **_BASE,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": _EVERY_THIRD_ATTENDS,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# 576 numbers a token are 9 times a power of two, so CUDA's 2 MiB come out even at 16,384 tokens.
_MLA: Config = {
    **{key: value for key, value in _BASE.items() if key != "head_dim"},
    **_EXPERTS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "attention_bias": False,
}
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip

IMAGE_TOKEN = VOCAB
_IMAGE, _PATCH = 112, 14
IMAGE_TOKENS = (_IMAGE // _PATCH) ** 2


def picture(seed: int) -> Any:
    """Coarse noise: fine noise would be one grey to a patch."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((_IMAGE, _IMAGE), Image.Resampling.NEAREST)


def write_processor(folder: Path) -> None:
    """What vLLM asks of a model with pictures: a tokenizer, though prompts are tokens, and an image processor."""
    words = {f"t{i}": i for i in range(VOCAB)} | {"<image>": IMAGE_TOKEN}
    image_token = {"id": IMAGE_TOKEN, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False,
                   "normalized": False, "special": True}  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [image_token], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }  # fmt: skip
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": _PATCH,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_processor": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": _IMAGE},
            "crop_size": {"height": _IMAGE, "width": _IMAGE},
        },
    }
    parts = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"},
        "processor_config.json": processor,
    }
    for name, part in parts.items():
        (folder / name).write_text(json.dumps(part))


def adapter(folder: Path, number: int) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, str(folder / f"adapter-{number}"))


def write_adapters(folder: Path) -> None:
    """Two that change queries, keys and values, so that KV of the same tokens differs."""
    from safetensors.torch import save_file

    rank, hidden = 8, _BASE["hidden_size"]
    outputs = {"q_proj": 1024, "k_proj": 512, "v_proj": 512}
    for number in (1, 2):
        draw = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(_BASE["num_hidden_layers"]):
            for name, width in outputs.items():
                path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(rank, hidden, generator=draw) * hidden**-0.5
                tensors[f"{path}.lora_B.weight"] = torch.randn(width, rank, generator=draw) * rank**-0.5
        place = folder / f"adapter-{number}"
        place.mkdir()
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, place / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none",
                  "target_modules": list(outputs)}  # fmt: skip
        (place / "adapter_config.json").write_text(json.dumps(config))


FAMILIES: dict[str, Family] = {
    "Llama": Family(_LLAMA, graphs=True, notes="full attention, bf16"),
    "Qwen3-MoE": Family(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **_BASE,
            **_EXPERTS,
            "num_experts": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        cuda={"moe_backend": "triton"},
        notes="8 experts, 2 for each token",
    ),
    "Gemma 3": Family(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            **_BASE,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 128,
            "layer_types": _EVERY_THIRD_FULL,
        },
        notes="a sliding window in two layers of three",
    ),
    "gpt-oss": Family(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **_BASE,
            "num_hidden_layers": 8,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 512,
            # All of them: the experts' kernels do not round the same way every time, and a router would make a step of
            # the difference.
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        },
        # Sinks need FlashAttention 3, or attention_backend TRITON_ATTN. With the package triton_kernels, moe_backend
        # triton works too.
        cuda={"moe_backend": "marlin"},
        graphs=True,
        notes="attention sinks, a sliding window in every other layer, MXFP4 experts",
    ),
    "DeepSeek-V2": Family(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            **_MLA,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "routed_scaling_factor": 1.0,
        },
        # vLLM's first choice on Hopper; TRITON_MLA is the one that needs no FlashAttention.
        cuda={"attention_backend": "FLASH_ATTN_MLA", "moe_backend": "triton", "max_num_batched_tokens": 4096},
        notes="latent attention (MLA), as in V2-Lite",
    ),
    "DeepSeek-V3": Family(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **_MLA,
            "q_lora_rank": 256,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
        },
        cuda={"attention_backend": "TRITON_MLA", "moe_backend": "triton", "max_num_batched_tokens": 4096},
        notes="MLA with compressed queries and grouped sigmoid routing, as in V3 and R1",
    ),
    "Qwen3-Next": Family(
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **_GDN,
            **_EXPERTS,
            "num_experts": 8,
            "shared_expert_intermediate_size": 256,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        cuda={"gdn_prefill_backend": "triton", "moe_backend": "triton"},
        notes="gated delta nets in two layers of three, experts",
    ),
    "Qwen3.5": Family(
        {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **_GDN, "mamba_ssm_dtype": "float32"},
        cuda={"gdn_prefill_backend": "triton"},
        graphs=True,
        notes="gated delta nets in two layers of three, their state in float32",
    ),
    "Granite 4": Family(
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            **{key: value for key, value in _BASE.items() if key != "head_dim"},
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "attention_multiplier": 128**-0.5,
            "layer_types": ["mamba", "mamba", "attention"] * 4,
            "mamba_d_head": 64,
            "mamba_d_state": 32,
            "mamba_expand": 1,
            "mamba_n_groups": 1,
            "mamba_n_heads": 8,
            "num_experts_per_tok": 0,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 1024,
        },
        # vLLM's CPU scan of Mamba-2 returns one state per sequence, so its chunks must not be longer than a block.
        cpu={"max_num_batched_tokens": 32},
        notes="Mamba-2 in two layers of three",
    ),
    "AWQ": Family(
        {
            **_LLAMA,
            "quantization_config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "zero_point": True,
                "version": "gemm",
                # Without a word vLLM looks for it in the checkpoint, and there is none.
                "modules_to_not_convert": ["lm_head"],
            },
        },
        notes="Llama, 4-bit weights through Marlin",
    ),
    "GPTQ": Family(
        {
            **_LLAMA,
            "quantization_config": {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 128,
                "sym": True,
                "desc_act": False,
                "modules_in_block_to_quantize": list(_LINEARS),
            },
        },
        notes="Llama, 4-bit weights through Marlin",
    ),
    "FP8 weights": Family(
        {**_LLAMA, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        # Activations are rounded to three bits of mantissa, by their own largest value.
        rounding=0.8,
        notes="Llama, weights and activations in FP8",
    ),
    "FP8 KV": Family(_LLAMA, {"kv_cache_dtype": "fp8", "block_size": 64}, notes="Llama, KV in FP8"),
    "LoRA": Family(
        _LLAMA,
        {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
        requests=prompts_with_adapters,
        files=write_adapters,
        notes="Llama, the same prompts with and without adapters",
    ),
    "LLaVA": Family(
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "text_config": {**_LLAMA, "vocab_size": VOCAB + 64},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_attention_heads": 4,
                "num_hidden_layers": 3,
                "image_size": _IMAGE,
                "patch_size": _PATCH,
                "projection_dim": 256,
            },
        },
        {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}},
        # FLASH_ATTN for the encoder asks for FlashAttention 2 on some heads; torch's own always works.
        cuda={"mm_encoder_attn_backend": "TORCH_SDPA"},
        requests=prompts_with_images,
        files=write_processor,
        notes="pictures in the prompt",
    ),
}
