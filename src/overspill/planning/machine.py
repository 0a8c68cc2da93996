"""A plan for a named model on this machine, or on one that is stated: the effects around the arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overspill.figures import Known, assumed, derived
from overspill.hardware import Gpu, Hardware, detect, with_stated
from overspill.hardware.link import same_both_ways
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size
from overspill.model.facts import ModelFacts
from overspill.model.read import read_model
from overspill.planning.host_ram import RESERVE_BYTES, require_total
from overspill.planning.installed import installed_vllm
from overspill.planning.planner import Plan, make_plan
from overspill.planning.platform import CPU, CUDA, LATENT_BLOCK_SIZE_WITH_AMX, Platform
from overspill.planning.profiles import Profile, Remembered, fingerprint
from overspill.planning.setup import Profiles
from overspill.planning.wishes import AT_ONCE, MAX_NUM_SEQS, Wishes

_BF16_CAPABILITY = (8, 0)
# Of the RAM that is available, what plays the GPU's memory on a machine without one.
_STAND_IN_SHARE = 4
# Two channels of DDR4, and what a copy between two places in them reaches. No CPU's speed is known here.
_RAM_BYTES_PER_S, _COPY_BYTES_PER_S, _CPU_FLOPS = 40 * 10**9, 15 * 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan is for, and the RAM beside it."""

    gpu: Gpu
    platform: Platform
    ram_bytes: Known[int]


def plan_for(model: str, settings: Mapping[str, Any], *, cards: bool = False, found: Hardware | None = None) -> Plan:
    """`settings` are the values of `overspill.settings`, by name, and what vLLM's own flags say beside them
    (`overspill.serve.adopted`); `found` is the machine, if not as it is now."""
    dtype, chunk = settings.get("dtype") or "auto", settings.get("max_num_batched_tokens")
    facts = read_model(model, dtype=dtype)
    wishes = Wishes(
        max_model_len=settings.get("max_model_len"),
        dtype=dtype,
        kv_cache_dtype=settings.get("kv_cache_dtype"),
        gpu_memory_bytes=settings.get("gpu_memory"),
        gpu_memory_utilization=settings.get("gpu_memory_utilization"),
        max_num_batched_tokens=chunk,
        at_once=settings.get("at_once") or AT_ONCE,
        max_num_seqs=settings.get("max_num_seqs") or min(MAX_NUM_SEQS, chunk or MAX_NUM_SEQS),
        enforce_eager=bool(settings.get("enforce_eager")),
        offload_ram_bytes=settings.get("offload_ram"),
        weights_ram_bytes=settings.get("weights_ram"),
        offload_groups=settings.get("offload_groups"),
        tensor_parallel_size=settings.get("tensor_parallel_size") or 1,
        kv_options=settings.get("kv_options") or "",
        force=bool(settings.get("force")),
        cards=cards,
    )
    device = find_device(settings, found)
    require_possible(wishes, device.gpu)
    profiles = _measured_profiles(facts, device.gpu, wishes)
    return make_plan(facts, device.gpu, device.ram_bytes, wishes, platform=device.platform, profiles=profiles)


def require_possible(wishes: Wishes, gpu: Gpu) -> None:
    """What vLLM would refuse later, after minutes of loading."""
    chunk, num_seqs = wishes.max_num_batched_tokens, wishes.num_seqs
    if chunk is not None and chunk < num_seqs:
        raise OverspillError(
            f"--max-num-batched-tokens {chunk} is less than the {num_seqs} requests of a step, each of which has one "
            f"token at least; give {num_seqs} or more, or --max-num-seqs {chunk}"
        )
    capability = gpu.compute_capability
    if wishes.dtype == "bfloat16" and capability is not None and capability < _BF16_CAPABILITY:
        raise OverspillError(
            f"--dtype bfloat16 needs a GPU of compute capability 8.0 or more, and {gpu.name} has "
            f"{capability[0]}.{capability[1]}; use --dtype float16"
        )


def find_device(settings: Mapping[str, Any], found: Hardware | None = None) -> Device:
    """The GPU that is stated or found; vLLM's CPU platform if asked for, or where there is neither a GPU nor a vLLM
    that could use one."""
    found = detect() if found is None else found
    ram = settings.get("ram")
    hardware = with_stated(
        found, gpu=settings.get("gpu"), ram=None if ram is None else f"{ram}B", link=settings.get("link")
    )
    vllm = installed_vllm()
    wanted = settings.get("device") or "auto"
    if wanted == "cpu" and settings.get("gpu") is not None:
        raise OverspillError(
            "--device cpu plans for a machine without a GPU, and --gpu states one; leave one of them out"
        )
    if wanted == "cpu" or (wanted == "auto" and not hardware.gpus and vllm is not None and vllm.is_cpu):
        return _cpu(found, hardware, settings.get("gpu_memory"), ram)
    if ram is not None and settings.get("gpu") is None:  # a card that is stated is another machine's
        require_total(found.machine, ram)
    available = hardware.machine.ram_available_bytes
    return Device(hardware.first_gpu(), CUDA, available if ram is not None else _less_reserve(available))


def _cpu(found: Hardware, hardware: Hardware, gpu_memory: int | None, ram: int | None) -> Device:
    """A part of RAM plays the GPU's memory: weights and resident KV lie in it, and the rest spills."""
    available = found.machine.ram_available_bytes
    if gpu_memory is None:
        total = derived(
            available.value // _STAND_IN_SHARE, available, note="a quarter of the RAM; --gpu-memory sets it"
        )
    elif gpu_memory > available.value:
        raise OverspillError(
            f"--gpu-memory is {format_size(gpu_memory)}, and {format_size(available.value)} of RAM is available to "
            "play the GPU's memory; give less"
        )
    else:
        total = assumed(gpu_memory, "RAM in place of a GPU's memory, by --gpu-memory")
    beside = hardware.machine.ram_available_bytes
    if ram is not None:
        require_total(found.machine, ram, total.value)
    else:
        beside = _less_reserve(derived(max(0, available.value - total.value), available, note=available.note))
    gpu = Gpu(
        index=0,
        uuid="",
        name="CPU",
        total_bytes=total,
        free_bytes=total,
        memory_bytes_per_second=assumed(_RAM_BYTES_PER_S, "RAM"),
        bf16_flops=assumed(_CPU_FLOPS, "some CPU"),
        compute_capability=None,
        pcie_generation=None,
        pcie_width=None,
        numa_node=None,
        link=same_both_ways(assumed(_COPY_BYTES_PER_S, "copies within RAM")),
    )
    platform = replace(CPU, latent_block_size=LATENT_BLOCK_SIZE_WITH_AMX) if _has_amx() else CPU
    return Device(gpu, platform, beside)


def _has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        return "amx_tile" in cpuinfo.read_text().split()
    except OSError:
        return False


def _measured_profiles(facts: ModelFacts, gpu: Gpu, wishes: Wishes) -> Profiles:
    vllm, remembered = installed_vllm(), Remembered()
    known: dict[tuple[int, str], Profile | None] = {}

    def profile(max_num_batched_tokens: int, kv_cache_dtype: str) -> Profile | None:
        if vllm is None or gpu.is_stated:  # was never run on
            return None
        case = (max_num_batched_tokens, kv_cache_dtype)
        if case not in known:
            known[case] = remembered.recall(
                fingerprint(
                    facts, gpu, vllm_version=vllm.version, max_num_batched_tokens=max_num_batched_tokens,
                    max_num_seqs=wishes.num_seqs, enforce_eager=wishes.enforce_eager,
                    kv_cache_dtype=kv_cache_dtype,
                )
            )  # fmt: skip
        return known[case]

    return profile


def _less_reserve(available: Known[int]) -> Known[int]:
    note = "; ".join(filter(None, (available.note, "less 4 GiB for the rest of the machine")))
    return derived(max(0, available.value - RESERVE_BYTES), available, note=note)
