"""How fast a plan will be: bytes over the GPU's memory and over the link, and operations over its FLOPS."""

from dataclasses import dataclass

# Parts of the data sheet's figures that vLLM's kernels reach. Of an H200 (4.8 TB/s, 989 TFLOPS dense bf16) serving
# Llama-3.1-8B: a decode step of batch 1 took 5.0 ms for 16 GB of weights, a prefill of 100,000 tokens 6.5 s.
_MEMORY_EFFICIENCY = 0.75
_COMPUTE_EFFICIENCY = 0.55
# Launching a step and sampling, whatever it computes.
_STEP_S = 0.0007


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    memory_bytes_per_s: float
    flops: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One request at its full length, and where what it reads lies."""

    active_weight_bytes: int
    """Read in a step of one token, wherever they lie."""
    weights_in_ram_bytes: int
    """Of all weights; every step moves them."""
    kv_bytes: int
    spilled_kv_bytes: int
    parameters_per_token: int
    """That a token is multiplied with."""
    attention_flops_per_token_pair: int
    """4 x heads x head size x layers of full attention."""


def decode_step_s(machine: Machine, load: Load) -> float:
    """One token of one request. The link works beside the GPU, so the slower of the two decides."""
    reads = load.active_weight_bytes + load.kv_bytes
    gpu_s = reads / (machine.memory_bytes_per_s * _MEMORY_EFFICIENCY)
    link_s = (load.spilled_kv_bytes + load.weights_in_ram_bytes) / machine.link_bytes_per_s
    return _STEP_S + max(gpu_s, link_s)


def prefill_s(machine: Machine, load: Load, num_tokens: int, chunk_tokens: int) -> float:
    """Time to first token. In each chunk the GPU computes while the link brings what was spilled before."""
    seconds, done = 0.0, 0
    while done < num_tokens:
        chunk = min(chunk_tokens, num_tokens - done)
        pairs = chunk * (done + chunk / 2)
        flops = 2 * load.parameters_per_token * chunk + load.attention_flops_per_token_pair * pairs
        spilled = load.spilled_kv_bytes * min(1.0, done / num_tokens)
        link_s = (spilled + load.weights_in_ram_bytes) / machine.link_bytes_per_s
        seconds += _STEP_S + max(flops / (machine.flops * _COMPUTE_EFFICIENCY), link_s)
        done += chunk
    return seconds
