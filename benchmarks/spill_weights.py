"""Random weights for long contexts: like sensitive_weights, also where queries are normalised."""

from __future__ import annotations

from typing import Any

from sensitive_weights import SensitiveWeights

# Normalised queries and keys give scores around 1, so softmax over 131,072 tokens would be all but uniform and a wrong
# block of KV would be averaged away. With this gain it picks out few tokens.
QUERY_GAIN = 4.0


class SpillWeights(SensitiveWeights):
    """Mixed into vLLM's worker by `worker_extension_cls`; called with `collective_rpc`."""

    def make_weights_sensitive(self: Any, seed: int) -> int:
        import torch

        changed = SensitiveWeights.make_weights_sensitive(self, seed)
        with torch.inference_mode():
            for name, parameter in self.model_runner.model.named_parameters():
                if name.endswith("q_norm.weight"):
                    parameter.fill_(QUERY_GAIN)
        return changed
