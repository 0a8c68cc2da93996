"""Speed of a plan: bytes over the GPU's memory and over the link, and operations over its FLOPS."""

from dataclasses import dataclass

# Shares of an H200's data sheet (4.8 TB/s, 989 TFLOPS dense bf16) that vLLM 0.32 reaches, from Llama-3.1-8B measured by
# benchmarks/spill.py. Steps of one request with 256, 39,000 and 131,072 tokens took 4.83, 6.4 and 9.2 ms for 15, 20 and
# 32 GB; prompts of 39,000 and 131,072 tokens 1.58 and 10.8 s, which separates matrices from attention.
_MEMORY_EFFICIENCY = 0.82
_MATRIX_EFFICIENCY = 0.62
_ATTENTION_EFFICIENCY = 0.58
# Launching a step, whatever it computes, and sampling for each request: 64 at once took 6.05 ms.
_STEP_S = 0.0010
_REQUEST_S = 0.00001
# Steps that stream spilled KV run in piecewise graphs: 11.4 instead of 5.0 ms, overlapping with the link. With little
# to stream, such steps took 21 to 29 ms: the CPU launches each of the 32 layers.
_PIECEWISE_S = 0.0064
_SPILLED_LAYER_S = 0.00065
# In FULL graphs each layer waits for the copies' flags, and hands its query over where the CPU attends to a part: 32
# layers of two matrices each took 1.2 ms more with flags than without, and a hand-over 22 us.
_FLAGS_LAYER_S = 0.000035
_FAR_LAYER_S = 0.000022
# Choosing experts, and sorting tokens by them: 48 layers in 4 bits, with 52,000 tokens partly in RAM, took 8.5 ms where
# bytes and flags take 5.7.
_EXPERTS_LAYER_S = 0.00006
# Experts share a chunk's tokens, and multiply few each: prompts of 52,000 tokens in 4 bits and of 131,072 in bf16 took
# 2.79 and 13.6 s.
_EXPERTS_EFFICIENCY = 0.35
# Without graphs at all the CPU launches every kernel: 16 to 24 ms for 32 layers, 47 to 85 ms for the 48 of
# Qwen3-Coder-30B-A3B, whose experts take more kernels, and 98 to 115 ms where these stream spilled KV too.
_EAGER_LAYER_S = 0.00065
_EAGER_EXPERTS_S = 0.00065
_EAGER_SPILLED_S = 0.00095
# Tensor-parallel ranks all-reduce twice in each layer, and once for the embedding. Time of an all-reduce with next to
# nothing to send: vLLM's own kernel over NVLink, and NCCL over PCIe. Not measured here; assumed from what others
# report, 20 to 60 us over PCIe.
ALL_REDUCE_NVLINK_S, ALL_REDUCE_PCIE_S = 0.00001, 0.00003
# Weights that the GPU reads in RAM (UVA): 50 of the link's 55.3 GB/s, overlapping with nothing; a prompt of 512 tokens
# read them 2.7 times, since every tile of a batch reads them for itself.
_UVA_EFFICIENCY = 0.9
UVA_TOKENS_PER_READ = 190


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    memory_bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    cpu_bytes_per_s: float = 0.0
    """Rate at which the CPU attends to KV in RAM."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    all_reduce_s: float = 0.0
    peer_bytes_per_s: float = 1.0
    """Rate between two ranks, each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Data that a step reads, and where it lies."""

    weight_bytes: int
    """Weights read from the GPU's memory in a decode step; of routed experts only the chosen ones."""
    prefetched_weight_bytes: int = 0
    """Weights moved over the link in every step, chosen experts or not."""
    num_prefetched_layers: int = 0
    """Number of layers whose weights are prefetched."""
    num_prefetched_runs: int = 0
    """Number of runs of consecutive prefetched layers."""
    uva_weight_bytes: int = 0
    """Weights read over the link in a decode step."""
    uva_prompt_weight_bytes: int = 0
    """Weights read over the link, at least once, by a chunk of a prompt, which chooses every expert."""
    uva_bytes_per_prompt_token: float = 0.0
    """Bytes read over the link per token, where a chunk is so long that it reads weights several times."""
    kv_bytes: int = 0
    """KV of all requests of a step."""
    spilled_kv_bytes: int = 0
    shared_kv_bytes: int = 0
    """Spilled KV of the layers for which the CPU may attend to a part."""
    num_requests: int = 1
    parameters_per_token: int = 0
    """Parameters that a token is multiplied with."""
    attention_flops_per_token_pair: int = 0
    """4 x heads x head size x layers of full attention."""
    num_layers: int = 0
    hidden_bytes: int = 0
    """Bytes of one token between two layers."""
    has_experts: bool = False
    is_eager: bool = False
    """Whether steps run without CUDA graphs."""
    is_graphed: bool = False
    """Whether spilled KV streams inside FULL graphs."""


def decode_step_s(machine: Machine, load: Load) -> float:
    """Time of a step that decodes one token per request. Link and GPU work in parallel, so the slower of the two
    decides; only the GPU's own reads in RAM add up. The CPU attends in parallel with the link, in each layer once its
    query is there, so the GPU's reads of weights and the CPU's of KV come one after the other."""
    # The engine's division (overspill.kv.spill.scheduler): link and CPU take the same time.
    far_bytes = load.shared_kv_bytes * machine.cpu_bytes_per_s / (machine.cpu_bytes_per_s + machine.link_bytes_per_s)
    far_s = far_bytes / machine.cpu_bytes_per_s if far_bytes else 0.0
    near_s = (load.kv_bytes - far_bytes) / (machine.memory_bytes_per_s * _MEMORY_EFFICIENCY)
    reads_s = load.weight_bytes / (machine.memory_bytes_per_s * _MEMORY_EFFICIENCY) + near_s
    multiply_s = _matrix_s(machine, load, load.num_requests)
    is_piecewise = load.spilled_kv_bytes and not load.is_graphed
    gpu_s = max(reads_s, multiply_s) + max(0.0, far_s - near_s) + (_PIECEWISE_S if is_piecewise else 0)
    gpu_s += _all_reduce_s(machine, load, load.num_requests)
    if load.has_experts:
        gpu_s += load.num_layers * _EXPERTS_LAYER_S
    if load.spilled_kv_bytes and load.is_graphed:
        gpu_s += load.num_layers * (_FLAGS_LAYER_S + (_FAR_LAYER_S if far_bytes else 0))
    launch_s = load.num_layers * _launched_layer_s(load)
    link_s = (load.spilled_kv_bytes - far_bytes + load.prefetched_weight_bytes) / machine.link_bytes_per_s
    uva_s = load.uva_weight_bytes / (machine.link_bytes_per_s * _UVA_EFFICIENCY)
    beside_s = max(link_s, _prefetching_s(machine, load, gpu_s))
    # A token goes through all stages, one after the other.
    stage_s = max(launch_s, _STEP_S + load.num_requests * _REQUEST_S + uva_s + beside_s)
    return machine.pipeline_parallel_size * stage_s


def prefill_s(machine: Machine, load: Load, num_tokens: int, chunk_tokens: int) -> float:
    """Time to first token of one request. In each chunk the GPU computes while the link brings spilled KV."""
    resident = load.kv_bytes - load.spilled_kv_bytes
    seconds, chunk_s, done = 0.0, 0.0, 0
    while done < num_tokens:
        chunk = min(chunk_tokens, num_tokens - done)
        pairs = chunk * (done + chunk / 2)
        attention_s = load.attention_flops_per_token_pair * pairs / (machine.flops * _ATTENTION_EFFICIENCY)
        # KV fills the GPU first; only the rest streams.
        spilled = max(0.0, load.kv_bytes * done / num_tokens - resident)
        link_s = (spilled + load.prefetched_weight_bytes) / machine.link_bytes_per_s
        uva_bytes = max(load.uva_prompt_weight_bytes, chunk * load.uva_bytes_per_prompt_token)
        uva_s = uva_bytes / (machine.link_bytes_per_s * _UVA_EFFICIENCY)
        # Short chunks wait for the weights, which each of them reads once.
        weights_s = load.weight_bytes / (machine.memory_bytes_per_s * _MEMORY_EFFICIENCY)
        gpu_s = max(_matrix_s(machine, load, chunk), weights_s) + attention_s + _all_reduce_s(machine, load, chunk)
        chunk_s = _STEP_S + uva_s + max(link_s, _prefetching_s(machine, load, gpu_s))
        seconds += chunk_s
        done += chunk
    # Stages work on successive chunks in parallel; the last chunk still goes through all of them.
    return seconds + (machine.pipeline_parallel_size - 1) * chunk_s


def _prefetching_s(machine: Machine, load: Load, gpu_s: float) -> float:
    """Time of a step that would take `gpu_s` with all layers on the GPU. Prefetched layers share one slot, so a layer's
    weights are copied once the prefetched one before it is done: behind the layers between, or in a run behind none."""
    layers, runs = load.num_prefetched_layers, load.num_prefetched_runs
    if not layers:
        return gpu_s
    copy_s = load.prefetched_weight_bytes / layers / machine.link_bytes_per_s
    layer_s = gpu_s / load.num_layers
    between_s = (load.num_layers - layers) * layer_s
    return layers * layer_s + (layers - runs) * copy_s + max(runs * copy_s, between_s)


def _all_reduce_s(machine: Machine, load: Load, num_tokens: int) -> float:
    """Time of a step's all-reduces, during which nothing else is computed: a ring sends a sum's bytes nearly twice."""
    ranks = machine.tensor_parallel_size
    if ranks == 1:
        return 0.0
    sent_s = 2 * (ranks - 1) / ranks * num_tokens * load.hidden_bytes / machine.peer_bytes_per_s
    return (2 * load.num_layers + 1) * (machine.all_reduce_s + sent_s)


def _launched_layer_s(load: Load) -> float:
    """CPU time to launch one layer of a decode step."""
    if not load.is_eager:
        return _SPILLED_LAYER_S if load.spilled_kv_bytes and not load.is_graphed else 0.0
    return (
        _EAGER_LAYER_S
        + (_EAGER_EXPERTS_S if load.has_experts else 0.0)
        + (_EAGER_SPILLED_S if load.spilled_kv_bytes else 0.0)
    )


def _matrix_s(machine: Machine, load: Load, num_tokens: int) -> float:
    efficiency = _EXPERTS_EFFICIENCY if load.has_experts else _MATRIX_EFFICIENCY
    return 2 * load.parameters_per_token * num_tokens / (machine.flops * efficiency)
