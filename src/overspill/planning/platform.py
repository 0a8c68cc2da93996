"""What differs between vLLM's platforms, as far as a plan is concerned."""

import mmap
from dataclasses import dataclass

from overspill.kv.spill.geometry import CUDA_GRANULARITY
from overspill.model.caches import LatentAttention
from overspill.model.facts import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    name: str
    """vLLM's: cuda, cpu."""
    granularity: int
    """How finely memory is mapped under spilled KV, in bytes."""
    block_size: int
    """Tokens, where the user asks for none."""
    latent_block_size: int
    """The same for multi-head latent attention."""
    kernel_block_multiple: int
    max_concurrent_batches: int
    chunks: tuple[int, ...]
    """Values of max_num_batched_tokens that are worth trying on a device of common size."""
    profiles_memory: bool
    """Whether vLLM takes a fraction of the device's memory, and looks what is left of it for KV."""
    offloads_weights: bool

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def block_size_of(self, facts: ModelFacts) -> int:
        is_latent = any(isinstance(entry.cache, LatentAttention) for entry in facts.caches)
        return self.latent_block_size if is_latent else self.block_size


CUDA = Platform(
    name="cuda",
    granularity=CUDA_GRANULARITY,
    block_size=16,
    latent_block_size=64,  # FlashMLA's
    kernel_block_multiple=16,
    max_concurrent_batches=2,
    # Prefill hides the link only in long chunks, and long chunks cost activations: both are tried.
    chunks=(2048, 8192),
    profiles_memory=True,
    offloads_weights=True,
)
# vllm/platforms/cpu.py. It schedules one batch at a time, and its offloaders need CUDA.
CPU = Platform(
    name="cpu",
    # As overspill.kv.spill.aliased_memory, which cannot be imported without torch.
    granularity=mmap.PAGESIZE,
    block_size=128,
    latent_block_size=16,
    kernel_block_multiple=32,
    max_concurrent_batches=1,
    chunks=(2048,),
    profiles_memory=False,
    offloads_weights=False,
)
# With AMX, vLLM's CPU platform does not insist on blocks of 16 for latent attention.
LATENT_BLOCK_SIZE_WITH_AMX = 128
