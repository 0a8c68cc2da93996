"""A worker extension that gives a dummy model weights whose output depends on the whole KV cache.

vLLM's dummy weights lie within ±0.001, norms included, so attention vanishes beside the residual in bf16
and the tokens depend on the last token alone: comparing them would prove nothing.
"""

from __future__ import annotations

from typing import Any


class SensitiveWeights:
    """Mixed into vLLM's worker by `worker_extension_cls`; called with `collective_rpc`."""

    def make_weights_sensitive(self: Any, seed: int) -> int:
        """Redraw all weights in place (CUDA graphs keep their addresses); returns how many."""
        import torch

        changed = 0
        with torch.inference_mode():
            for name, parameter in self.model_runner.model.named_parameters():
                generator = torch.Generator(device=parameter.device).manual_seed(seed + changed)
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    # Twice the usual width in qkv makes softmax pick out few tokens, so that a wrong
                    # block of KV is seen instead of being averaged away.
                    width = 2.0 if "qkv" in name else 1.0
                    parameter.normal_(0.0, width * parameter.shape[-1] ** -0.5, generator=generator)
                changed += 1
        return changed
