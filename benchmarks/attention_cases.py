"""Random cases for the kernel, with results in float64 to hold it against."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from overspill.kv.attention.library import TYPES
from overspill.kv.attention.pool import Ids, Job, Layout, Pool, Segments

# Of the largest output, and absolute for log-sum-exps. AMX keeps 16 bits of the weights.
OUTPUT_BOUND, AMX_OUTPUT_BOUND, LSE_BOUND = 5e-6, 3e-5, 3e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Keys, values and queries from a normal distribution; `sharp` makes a few tokens count most."""

    kv_type: str = "bfloat16"
    query_type: str = "bfloat16"
    kv_heads: int = 2
    group: int = 4
    head_size: int = 128
    block_size: int = 16
    # Blocks and query tokens of each segment.
    segments: tuple[tuple[int, tuple[int, ...]], ...] = ((5, (0,)),)
    num_queries: int = 1
    heads_first: bool = False
    sharp: float = 1.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.sharp * self.head_size**-0.5 / self.key_scale

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @cached_property
    def blocks(self) -> list[Ids]:
        """Ids of each segment, none twice."""
        counts = [count for count, _ in self.segments]
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(self.seed), dtype=torch.int32)
        return [part.numpy() for part in order[: sum(counts)].split(counts)]

    @property
    def num_blocks(self) -> int:
        return sum(count for count, _ in self.segments) + 3

    @cached_property
    def kv(self) -> torch.Tensor:
        """[block][token][head][K | V]"""
        shape = (self.num_blocks, self.block_size, self.kv_heads, 2, self.head_size)
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed)).to(getattr(torch, self.kv_type))

    @cached_property
    def arena(self) -> torch.Tensor:
        return self.kv.transpose(1, 2).contiguous() if self.heads_first else self.kv

    @cached_property
    def query(self) -> torch.Tensor:
        shape = (self.num_queries, self.heads, self.head_size)
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed + 1))
        return numbers.to(getattr(torch, self.query_type))

    @cached_property
    def layout(self) -> Layout:
        return Layout.packed(
            num_blocks=self.num_blocks, block_size=self.block_size, kv_heads=self.kv_heads, group=self.group,
            head_size=self.head_size, kv_type=self.kv_type, query_type=self.query_type, heads_first=self.heads_first,
        )  # fmt: skip

    def job(self, output: torch.Tensor, lse: torch.Tensor, blocks: list[Ids] | None = None) -> Job:
        queries = [of_segment for _, of_segment in self.segments]
        return Job(
            layout=self.layout, segments=Segments(zip(blocks or self.blocks, queries)), kv=self.arena.data_ptr(),
            query=self.query.data_ptr(), output=output.data_ptr(), lse=lse.data_ptr(), num_queries=self.num_queries,
            scale=self.scale, key_scale=self.key_scale, value_scale=self.value_scale,
        )  # fmt: skip

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for an output and its log-sum-exp, full of NaN."""
        output = torch.full((self.num_queries, self.heads, self.head_size), torch.nan)
        return output, torch.full((self.heads, self.num_queries), torch.nan)

    def attend(self, pool: Pool, blocks: list[Ids] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = self.results()
        pool.attend(self.job(output, lse, blocks))
        return output, lse

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp in float64."""
        output = torch.zeros(self.num_queries, self.heads, self.head_size, dtype=torch.float64)
        lse = torch.full((self.heads, self.num_queries), -torch.inf, dtype=torch.float64)
        for query in range(self.num_queries):
            parts = [ids for ids, (_, queries) in zip(self.blocks, self.segments) if query in queries]
            if not any(len(ids) for ids in parts):
                continue
            kv = torch.cat([self.kv[ids.tolist()].double().flatten(0, 1) for ids in parts])
            keys, values = kv[:, :, 0], kv[:, :, 1] * self.value_scale
            rows = self.query[query].double().view(self.kv_heads, self.group, self.head_size)
            scores = torch.einsum("hgd,thd->hgt", rows, keys) * self.scale * self.key_scale
            output[query] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).flatten(0, 1)
            lse[:, query] = scores.logsumexp(-1).flatten()
        return output, lse

    def suits(self, kernel: str) -> bool:
        """Whether the kernel takes such a case when it is forced."""
        if kernel not in ("amx", "avx512bf16"):
            return True
        whole_e4m3 = self.kv_type == "float8_e4m3fn" and self.head_size % 64 == 0
        return self.query_type == "bfloat16" and (self.kv_type == "bfloat16" or whole_e4m3)

    def errors(self, pool: Pool) -> tuple[float, float]:
        """Largest errors of the output, as a part of its largest number, and of the log-sum-exp."""
        output, lse = self.attend(pool)
        expected, expected_lse = self.expected()
        missing = expected_lse.isinf()
        assert torch.equal(missing, lse.isinf()), "a query without a segment has no weight, and any other has some"
        difference = (lse.double() - expected_lse).masked_fill(missing, 0).abs().max()
        return float((output.double() - expected).abs().max() / expected.abs().max()), float(difference)


def bounds(kernel: str) -> tuple[float, float]:
    return AMX_OUTPUT_BOUND if kernel == "amx" else OUTPUT_BOUND, LSE_BOUND


def cases() -> Iterator[Case]:
    """Every type with shapes that differ in what the kernels treat differently."""
    shapes = [  # kv heads, group, head size, block size, blocks
        (8, 4, 128, 16, 9), (2, 7, 64, 16, 5), (1, 16, 80, 32, 3), (3, 1, 96, 7, 12), (1, 3, 112, 128, 2),
        (2, 2, 192, 16, 4), (1, 5, 256, 48, 3), (1, 40, 64, 1, 21),
    ]  # fmt: skip
    for number, (kv_type, shape, queries) in enumerate(product(TYPES, shapes, (1, 3))):
        kv_heads, group, head_size, block_size, blocks = shape
        together = tuple(range(queries))
        # The second segment is one request's own, as behind a shared prefix.
        own = ((2, (queries - 1,)),) if number % 3 == 0 else ()
        fp8 = kv_type.startswith("float8")
        other = ("float16", "float32")[number % 2]
        query_types = {"bfloat16": ("bfloat16", "float32"), "float8_e4m3fn": ("bfloat16", other)}.get(kv_type, (other,))
        for query_type in query_types:
            yield Case(
                kv_type=kv_type, query_type=query_type, kv_heads=kv_heads, group=group, head_size=head_size,
                block_size=block_size, segments=((blocks, together), *own), num_queries=queries,
                heads_first=number % 2 == 1, sharp=(1.0, 8.0)[number // 2 % 2], seed=number,
                key_scale=0.5 if fp8 else 1.0, value_scale=1.7 if fp8 else 1.0,
            )  # fmt: skip
