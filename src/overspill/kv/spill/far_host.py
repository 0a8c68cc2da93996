"""Far attention on the CPU platform: vLLM's attention with a part of the blocks left to Overspill's kernel.

vLLM's kernel returns no log-sum-exp, and keeps keys transposed within a block. So the log-sum-exp is computed again
here, and blocks are unpacked: this platform is for tests, and must be correct rather than fast.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from overspill.kv.attention.pool import Layout
from overspill.kv.spill.far import SplitBuilder, far_attention


class SplitMetadataBuilder(SplitBuilder, CPUAttentionMetadataBuilder):
    pass


class SplitAttention(CPUAttentionBackendImpl):
    overspill_merges = True

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
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        far = far_attention()
        if far is None or not getattr(attn_metadata, "overspill_split", False):
            return output
        num_tokens = attn_metadata.num_actual_tokens
        queries = query[:num_tokens].contiguous()
        blocks = unpacked(far.spilled_blocks(layer.layer_name, kv_cache), self.head_size)
        layout = Layout.packed(
            num_blocks=len(blocks), block_size=blocks.shape[2], kv_heads=self.num_kv_heads,
            group=self.num_queries_per_kv, head_size=self.head_size, kv_type=str(blocks.dtype).removeprefix("torch."),
            query_type=str(query.dtype).removeprefix("torch."), heads_first=True,
        )  # fmt: skip
        partial, partial_lse = far.attend(queries, blocks, far.rows_of(layer.layer_name), layout, self.scale)
        near_lse = self._near_lse(queries, unpacked(kv_cache, self.head_size), attn_metadata)
        near = output[:num_tokens].clone()
        merge_attn_states(output[:num_tokens], partial.to(output.dtype), partial_lse, near, near_lse)
        return output

    def _near_lse(self, query: torch.Tensor, blocks: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Log-sum-exps [head, query] of the blocks that vLLM's kernel attended to."""
        lse = torch.empty(self.num_heads, len(query))
        starts = metadata.query_start_loc.tolist()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            num_queries = starts[row + 1] - starts[row]
            table = metadata.block_table[row, : -(-length // blocks.shape[2])].long()
            keys = blocks[table, :, :, : self.head_size].transpose(1, 2).reshape(-1, self.num_kv_heads, self.head_size)
            keys = keys[:length].repeat_interleave(self.num_queries_per_kv, 1).float()
            scores = torch.einsum("qhd,thd->hqt", query[starts[row] : starts[row + 1]].float(), keys) * self.scale
            positions = torch.arange(length)[None] - (length - num_queries + torch.arange(num_queries))[:, None]
            lse[:, starts[row] : starts[row + 1]] = scores.masked_fill(positions > 0, -torch.inf).logsumexp(-1)
        return lse


def unpacked(kv_cache: torch.Tensor, head_size: int) -> torch.Tensor:
    """Copy of blocks with transposed keys, as [block, head, token, K | V]."""
    num_blocks, num_heads, block_size, _ = kv_cache.shape
    keys, values = kv_cache.view(num_blocks, num_heads, 2, -1).unbind(2)
    keys = keys.view(num_blocks, num_heads, head_size, block_size).transpose(2, 3)
    return torch.cat((keys, values.view(num_blocks, num_heads, block_size, head_size)), dim=-1)


class SplitBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[SplitAttention]:
        return SplitAttention

    @staticmethod
    def get_builder_cls() -> type[SplitMetadataBuilder]:
        return SplitMetadataBuilder
