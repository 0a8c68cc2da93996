"""Random weights whose answers depend on all of the KV cache, for a model of which only the shape is here. In a child.

vLLM's own dummy weights lie within ±0.001, norms included: attention vanishes beside the residual, answers depend on
the last token alone, and comparing them would prove nothing.
"""

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "overspill_random"
# Attention with scores of this width picks out few tokens, so that a wrong block is seen and not averaged away.
_QKV_GAIN = 2.0
# Normalised queries and keys give scores around 1 whatever made them; this is what remains to be chosen.
_QUERY_NORM = 4.0
# Logits then reach 16 and more, as models' do: the rounding that is allowed for is that of such numbers.
_HEAD_GAIN = 4.0


@register_model_loader(LOAD_FORMAT)
class RandomWeights(DummyModelLoader):
    """The same in every engine. Before kernels bring weights into forms of their own, which they do on a CPU."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        redraw(model)


def redraw(model: torch.nn.Module, seed: int = 0) -> int:
    """How many tensors were drawn; packed ones, and those for which vLLM has a value, keep what vLLM gave them."""
    drawn = 0
    with torch.inference_mode():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            is_packed = not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2
            if is_packed or parameter.is_meta or hasattr(parameter, "dummy_weight_value"):
                continue
            if parameter.dim() == 1:
                parameter.fill_(_vector(name))
            else:
                generator = torch.Generator(device=parameter.device).manual_seed(seed + number)
                parameter.normal_(0.0, _gain(name) * parameter.shape[-1] ** -0.5, generator=generator)
            drawn += 1
    return drawn


def _vector(name: str) -> float:
    if name.endswith("bias"):
        return 0.0
    return _QUERY_NORM if name.endswith("q_norm.weight") else 1.0


def _gain(name: str) -> float:
    if "qkv" in name:
        return _QKV_GAIN
    return _HEAD_GAIN if name.endswith(("lm_head.weight", "embed_tokens.weight")) else 1.0
