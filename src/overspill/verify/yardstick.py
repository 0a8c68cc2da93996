"""Torch's attention as a second kernel on the CPU platform, where vLLM has only one. Runs only in child processes."""

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from overspill.kv.spill.far import attends_plainly
from overspill.kv.spill.far_host import SplitAttention, unpacked


class TorchAttention(SplitAttention):
    """Torch's kernel for layers that the CPU may share; other layers keep vLLM's."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is None or not attends_plainly(self):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        blocks = unpacked(kv_cache, self.head_size)  # [block, head, token, K | V]
        starts = attn_metadata.query_start_loc.tolist()
        for row, length in enumerate(attn_metadata.seq_lens.tolist()):
            queries = query[starts[row] : starts[row + 1]]
            table = attn_metadata.block_table[row, : -(-length // blocks.shape[2])].long()
            keys, values = blocks[table].transpose(0, 1).flatten(1, 2)[:, :length].split(self.head_size, dim=-1)
            # A query sees all tokens up to its own; queries are the last tokens.
            mask = torch.ones(len(queries), length, dtype=torch.bool).tril(length - len(queries))
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries.transpose(0, 1), keys, values, mask, scale=self.scale, enable_gqa=True
            )
            output[starts[row] : starts[row + 1]] = attended.transpose(0, 1).reshape(output[: len(queries)].shape)
        return output


class TorchBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TorchAttention]:
        return TorchAttention
