"""Models that are measured: folders with only a config.json, what their KV cache weighs, weights, and prompts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

# Speed depends on shapes, not on weights, so no benchmark needs the 16 GB of the real ones.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "hidden_act": "silu",
    "rope_theta": 500000.0, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True,
       "modules_to_not_convert": ["mlp.gate"]}  # fmt: skip


def llama_3_1_8b(**changes: Any) -> Path:
    """A fresh folder holding Llama-3.1-8B's shape, with `changes` to its config."""
    folder = Path(tempfile.mkdtemp(prefix="shape-")) / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_1_8B | changes))
    return folder


def tiny() -> Path:
    """Made by another process: this one need not load torch."""
    folder = Path(tempfile.mkdtemp(prefix="shape-")) / "tiny-llama"
    code = "import sys, pathlib, overspill.tiny as t; t.make_llama(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def in_four_bits(folder: Path) -> Path:
    """The model of `folder`, its layers in 4 bits as AutoAWQ writes them. Plans read the sizes of such weights from the
    header of their file; the rest of the file has no content and takes no space."""
    from overspill.model.config import Config
    from overspill.model.derived import derive_tensors

    config = config_of(folder)
    written = Config(config, where="config.json")
    header: dict[str, Any] = {}
    end = 0
    for tensor in derive_tensors(written, dtype="bfloat16", is_tied=False, quantization=None):
        name = tensor.name.removesuffix(".weight")
        if name.endswith("_proj"):
            out, inner = tensor.shape
            groups = inner // AWQ["group_size"]
            parts = {"qweight": ("I32", (inner, out // 8)), "qzeros": ("I32", (groups, out // 8)),
                     "scales": ("F16", (groups, out))}  # fmt: skip
        else:
            parts = {"weight": ("BF16", tensor.shape)}
        for part, (dtype, shape) in parts.items():
            begin, end = end, end + math.prod(shape) * (4 if dtype == "I32" else 2)
            header[f"{name}.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    made = Path(tempfile.mkdtemp(prefix="shape-")) / f"{folder.name}-awq"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    text = json.dumps(header).encode()
    with (made / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return made


def kv_bytes_per_token(model: Path, element_bytes: int = 2) -> int:
    """Keys and values of all layers, for a model whose layers all use full attention."""
    config = config_of(model)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"]) * int(heads) * int(head_dim) * element_bytes


def config_of(model: Path | str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    return config


def folder_of(given: str | None) -> Path:
    """`tiny`, a folder with a config.json, or Llama-3.1-8B's shape if none is given."""
    if given is None or given == "tiny":
        return llama_3_1_8b() if given is None else tiny()
    folder = Path(given).resolve()
    if not (folder / "config.json").is_file():
        raise SystemExit(f"--model {given}: there is no config.json")
    return folder


class Prompts:
    """Random tokens, the same for every system: a prompt depends on its name only."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary, self._seed = vocabulary, seed

    def __call__(self, kind: str, number: int, tokens: int) -> list[int]:
        random = np.random.default_rng([self._seed, zlib.crc32(kind.encode()), number])
        lowest = min(1000, self._vocabulary // 8)
        ids: list[int] = random.integers(lowest, self._vocabulary - lowest, tokens).tolist()
        return ids


class SensitiveWeights:
    """Mixed into vLLM's worker by `worker_extension_cls`, and called with `collective_rpc`: weights with which answers
    depend on the whole KV cache, drawn in place, since CUDA graphs keep their addresses."""

    def make_weights_sensitive(self: Any, seed: int) -> int:
        from overspill.verify.inprocess import redraw

        return redraw(self.model_runner.model, seed, head_gain=1.0)
