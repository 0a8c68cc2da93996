"""A tiny, sensitive Llama, for trying things out without a download.

With the usual initialisation, a random-weight checkpoint (``config.json`` and safetensors) repeats one token for ever
whatever it reads, and would hide a corrupted cache. Here the weights are scaled so that greedy output varies from token
to token and depends on the whole context.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 512
HIDDEN = 128
HEADS = 4
HEAD_DIM = 32


def make_llama(path: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """Write a checkpoint to ``path`` and return ``path``; the same seed gives the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**common_config(layers), head_dim=HEAD_DIM)
    return write_checkpoint(LlamaForCausalLM, config, path, seed)


def common_config(layers: int) -> dict[str, int]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": 32768,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_checkpoint(architecture: type[PreTrainedModel], config: PreTrainedConfig, path: Path, seed: int) -> Path:
    """Write a checkpoint of any architecture, with weights redrawn from `seed`."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = architecture(config).float()
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # From heads that forget within tens of tokens to heads that remember thousands.
                parameter.copy_(torch.linspace(math.log(0.05), math.log(0.0002), len(parameter)))
            elif name.endswith("dt_bias"):
                parameter.zero_()
            elif name.endswith("q_norm.weight"):
                # The gain is 1 + weight; a gain of 1 would make attention almost uniform.
                parameter.fill_(4.0)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 1.0 if name.startswith("lm_head") else 0.35)
    model.save_pretrained(path)
    return path
