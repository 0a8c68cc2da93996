"""The machine a plan is for, as found here or stated, and a plan for a model on it."""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from overspill.figures import Known, Origin, assumed, derived
from overspill.files import ledger_file
from overspill.hardware import Gpu, Hardware, detect, with_stated
from overspill.hardware.cards import CARDS
from overspill.hardware.cpu import assumed_attention, computes_bf16, cpu_attention, measure_attention
from overspill.hardware.gpu import visible_gpus, weakest
from overspill.hardware.machine import Machine, read_numa_nodes
from overspill.hardware.stated import parse_cpu_attention
from overspill.kv.errors import OverspillError
from overspill.kv.ledger import Ledger
from overspill.kv.options import Options
from overspill.kv.sizes import GiB, exact_size, format_size, parse_size
from overspill.launch.profiles import measured_profiles
from overspill.launch.vllm import installed_vllm
from overspill.model.facts import RecurrentState
from overspill.model.source import read_model
from overspill.planning.arguments import kv_transfer_config
from overspill.planning.connector_options import read_options, write_options
from overspill.planning.planner import Plan, make_plan
from overspill.planning.ranks import rank_facts
from overspill.planning.setup import (
    CPU,
    CUDA,
    MAX_NUM_SEQS,
    NO_CPU_ATTENTION,
    Platform,
    Wishes,
    cpu_with,
)
from overspill.settings import AUTO, RAM_RESERVE_BYTES

# vLLM's variable: the cores of each rank, separated by |.
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_BF16_CAPABILITY = (8, 0)
# Without a GPU, the available RAM divided by this stands in for its memory.
_STAND_IN_SHARE = 4
# Two channels of DDR4, and the rate of copies within them. The CPU's own speed is not known here.
_RAM_BYTES_PER_S, _COPY_BYTES_PER_S, _CPU_FLOPS = 40 * 10**9, 15 * 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Device:
    """The GPUs or CPU that a plan is for, and the RAM beside them."""

    gpus: tuple[Gpu, ...]
    """One GPU per rank."""
    platform: Platform
    ram_bytes: Known[int]
    cpu_attention: Known[int] = NO_CPU_ATTENTION


def plan_for(
    model: str,
    settings: Mapping[str, Any],
    *,
    cards: bool = False,
    found: Hardware | None = None,
    is_server: bool = False,
    revision: str = "main",
    environ: Mapping[str, str] = os.environ,
) -> Plan:
    """Plan a model. `settings` are the values of `overspill.settings` by name, with additions from vLLM's own flags
    (`overspill.launch.arguments`); `found` replaces the machine as it is now, and `environ` says where the hub is."""
    found = detect() if found is None else found
    if cards and not found.gpus and settings.get("gpu") is None and settings.get("device") in (None, "auto"):
        if settings.get("max_model_len") == AUTO:
            raise OverspillError("--cards without a GPU needs a length: give one with --max-model-len")
        settings = {
            **settings,
            "gpu": max(CARDS, key=lambda card: card.total_bytes).key,
        }  # any will do: the plan is for all cards
    wishes = wishes_of(settings, cards=cards)
    read = partial(read_model, model, revision=revision, environ=environ)
    facts = read(dtype=wishes.dtype)
    device = find_device(settings, found)
    if device.platform.is_cpu and wishes.dtype == "auto" and facts.dtype == "bfloat16" and not computes_bf16():
        wishes = replace(wishes, dtype="float32", has_bf16=False)
        facts = read(dtype=wishes.dtype)
    gpu = weakest(device.gpus)
    if wishes.elastic and is_server:
        wishes = _on_ledger(wishes, gpu, is_cpu=device.platform.is_cpu)
    require_possible(wishes, gpu, device.platform)
    rank = rank_facts(facts, wishes.tensor_parallel_size, wishes.pipeline_parallel_size)
    make = partial(
        make_plan, facts, device.gpus, device.ram_bytes, wishes, platform=device.platform,
        profiles=measured_profiles(rank, gpu, wishes, installed_vllm()),
    )  # fmt: skip
    plan = make(cpu_attention=device.cpu_attention)
    spills = plan.chosen is not None and plan.chosen.kv.spilled_bytes > 0
    if spills and plan.cpu_attention is not None and not gpu.is_stated and _measures_attention(settings):
        plan = make(cpu_attention=_cpu_attention(settings))
    require_connector(plan)
    return plan


def require_connector(plan: Plan) -> None:
    """Refuse what Overspill's connector would refuse in the engine."""
    options = kv_transfer_config(plan.chosen, plan.wishes.kv_options) if plan.chosen is not None else None
    if options is None:
        return
    Options.parse(cast(Mapping[str, Any], options["kv_connector_extra_config"]))
    if plan.wishes.drafts != "off" and any(isinstance(entry.cache, RecurrentState) for entry in plan.facts.caches):
        raise OverspillError(
            "--drafts rewrites the state of Mamba and linear-attention layers after it was stored in RAM; leave it "
            "out, or keep everything on the GPU with --offload-ram 0 and a shorter --max-model-len"
        )


def wishes_of(settings: Mapping[str, Any], *, cards: bool = False) -> Wishes:
    """Wishes from settings of the same names, to which wishes for bytes append `_bytes`."""
    found = {field.name: settings.get(field.name.removesuffix("_bytes")) for field in fields(Wishes)}
    given = {name: value for name, value in found.items() if value is not None}
    given["kv_options"] = _kv_options(settings)
    if given.get("max_model_len") == AUTO:
        del given["max_model_len"]
    else:
        given.pop("min_speed", None)
    # A step has at least one token of each request.
    given.setdefault("max_num_seqs", min(MAX_NUM_SEQS, settings.get("max_num_batched_tokens") or MAX_NUM_SEQS))
    return Wishes(**{**given, "cards": cards, "ram_given": settings.get("ram") is not None})


def _kv_options(settings: Mapping[str, Any]) -> str:
    """The connector's options: those of `kv_options`, overridden by settings of their own."""
    own = {field.name: settings[field.name] for field in fields(Options) if settings.get(field.name) is not None}
    if settings.get("disk") is not None:
        own["disk_bytes"] = settings["disk"]
    options = {**read_options(settings.get("kv_options") or ""), **own}
    if not options.get("disk_bytes"):
        options.pop("disk_path", None)  # config.toml may name a folder for all models, even those without a disk
    return write_options(options)


def _on_ledger(wishes: Wishes, gpu: Gpu, *, is_cpu: bool) -> Wishes:
    if (path := ledger_file(gpu.uuid)) is None:
        raise OverspillError("--elastic needs a ledger file, and there is no home folder for it; set XDG_STATE_HOME")
    # No driver counts the free part of RAM that stands in for a GPU.
    held = 0
    if is_cpu and path.exists():
        with closing(Ledger(path)) as ledger:
            held = sum(max(one.granted, one.held) for one in ledger.accounts().values() if one.held)
    return replace(wishes, ledger=str(path), ledger_held_bytes=held)


def require_possible(wishes: Wishes, gpu: Gpu, platform: Platform = CUDA) -> None:
    """Refuse what vLLM would refuse only after minutes of loading."""
    chunk, num_seqs = wishes.max_num_batched_tokens, wishes.num_seqs
    if chunk is not None and chunk < num_seqs:
        raise OverspillError(
            f"--max-num-batched-tokens {chunk} is less than the {num_seqs} requests of a step, each of which has one "
            f"token at least; give {num_seqs} or more, or --max-num-seqs {chunk}"
        )
    if platform.is_cpu and wishes.pipeline_parallel_size > 1 and wishes.enforce_eager:
        raise OverspillError(
            "vLLM's CPU build runs stages only where it compiles the model; use --no-enforce-eager, or "
            "--tensor-parallel-size instead of --pipeline-parallel-size"
        )
    if wishes.parks and wishes.pipeline_parallel_size > 1:
        raise OverspillError(
            "--park does not work with pipeline parallelism; leave it out, or use --tensor-parallel-size instead of "
            "--pipeline-parallel-size"
        )
    if wishes.elastic and wishes.num_ranks > 1:
        raise OverspillError("--elastic shares one GPU between engines; remove it, or use --tensor-parallel-size 1")
    capability = gpu.compute_capability
    if wishes.dtype == "bfloat16" and capability is not None and capability < _BF16_CAPABILITY:
        raise OverspillError(
            f"--dtype bfloat16 needs a GPU of compute capability 8.0 or more, and {gpu.name} has "
            f"{capability[0]}.{capability[1]}; use --dtype float16"
        )


def find_device(settings: Mapping[str, Any], found: Hardware | None = None) -> Device:
    """The GPUs stated or found; vLLM's CPU platform on request, or where there is neither a GPU nor a vLLM build that
    could use one."""
    found = detect() if found is None else found
    ram = settings.get("ram")
    hardware = with_stated(
        found, gpu=settings.get("gpu"), ram=None if ram is None else exact_size(ram), link=settings.get("link"),
        ram_place=settings.get("ram_place") or "--ram",
    )  # fmt: skip
    vllm = installed_vllm()
    wanted = settings.get("device") or "auto"
    if wanted == "cpu" and settings.get("gpu") is not None:
        raise OverspillError(
            "--device cpu plans for a machine without a GPU, and --gpu names one; leave one of them out"
        )
    if wanted == "cpu" or (wanted == "auto" and not hardware.gpus and vllm is not None and vllm.is_cpu):
        for name in ("gpus", "link"):
            if settings.get(name) is not None:
                raise OverspillError(f"--{name} is about GPUs, and vLLM will run on the CPU; leave it out")
        return _cpu(found, hardware, settings)
    if ram is not None and settings.get("gpu") is None:  # a stated card is another machine's
        require_total(found.machine, ram)
    available = hardware.machine.ram_available_bytes
    beside = available if ram is not None else _less_reserve(available, settings)
    return Device(_chosen_gpus(hardware, settings), CUDA, beside, _cpu_attention(settings))


def num_ranks(settings: Mapping[str, Any]) -> int:
    return (settings.get("tensor_parallel_size") or 1) * (settings.get("pipeline_parallel_size") or 1)


def _chosen_gpus(hardware: Hardware, settings: Mapping[str, Any]) -> tuple[Gpu, ...]:
    """The GPUs of --gpus, or the first ones; a stated card is repeated for each rank."""
    first, ranks, names = hardware.first_gpu(), num_ranks(settings), settings.get("gpus")
    if settings.get("gpu") is not None:
        if names is not None:
            raise OverspillError("--gpu plans for another card, and --gpus chooses among this machine's; leave one out")
        return (first,) * ranks
    here = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in hardware.gpus)
    chosen = hardware.gpus if names is None else visible_gpus(hardware.gpus, names)
    if names is not None and len(chosen) != len(names.split(",")):
        raise OverspillError(f"--gpus {names} names a GPU that is not here or not visible; there are: {here}")
    if len(chosen) < ranks or (names is not None and len(chosen) > ranks):
        raise OverspillError(
            f"{ranks} GPU(s) are needed (--tensor-parallel-size times --pipeline-parallel-size), and {len(chosen)} "
            f"{'are chosen with --gpus' if names is not None else 'are here'}; there are: {here}. Another machine's "
            "can be stated, as with --gpu rtx4090"
        )
    return chosen[:ranks]


def rank_environment(plan: Plan, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that assign GPUs to vLLM's ranks, or cores on its CPU platform."""
    if plan.platform.is_cpu:
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // plan.num_ranks)
        is_left = plan.num_ranks == 1 or _BIND in environment or len(read_numa_nodes()) >= plan.num_ranks
        # By default vLLM gives each rank a NUMA node, and exits if there are fewer.
        parts = [cores[(each * rank) % len(cores) :][:each] for rank in range(plan.num_ranks)]
        return {} if is_left else {_BIND: "|".join(",".join(map(str, part)) for part in parts)}
    if plan.wishes.gpus is None:
        return {}
    names = [gpu.uuid if gpu.uuid.startswith("MIG-") else str(gpu.index) for gpu in plan.gpus]
    # Indices follow NVML, which counts by PCI address.
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _cpu_attention(settings: Mapping[str, Any]) -> Known[int]:
    if (stated := settings.get("cpu_attention")) is not None:
        return parse_cpu_attention(stated)
    if settings.get("gpu") is not None:  # a stated card is another machine's
        return assumed_attention()
    return cpu_attention(_spill_threads(settings))


def _measures_attention(settings: Mapping[str, Any]) -> bool:
    """Measure how fast the CPU attends to KV if that was assumed; True if it was measured now."""
    known = _cpu_attention(settings)
    is_assumed = settings.get("cpu_attention") is None and known.value > 0 and known.origin is Origin.ASSUMED
    return is_assumed and measure_attention(_spill_threads(settings))


def _spill_threads(settings: Mapping[str, Any]) -> int | None:
    threads: int | None = read_options(_kv_options(settings)).get("spill_threads")
    return threads


def _cpu(found: Hardware, hardware: Hardware, settings: Mapping[str, Any]) -> Device:
    """A CPU device, with a part of RAM as GPU memory: weights and resident KV lie in it, and the rest spills."""
    gpu_memory, ram, ranks = settings.get("gpu_memory"), settings.get("ram"), num_ranks(settings)
    available = found.machine.ram_available_bytes
    if gpu_memory is None:
        total = derived(
            available.value // _STAND_IN_SHARE // ranks, available, note="a quarter of the RAM; --gpu-memory sets it"
        )
    elif gpu_memory * ranks > available.value:
        raise OverspillError(
            f"--gpu-memory is {format_size(gpu_memory)}, and {format_size(available.value)} of RAM is available to "
            "take the place of GPU memory; give less"
        )
    else:
        total = assumed(gpu_memory, "RAM in place of a GPU's memory, by --gpu-memory")
    beside = hardware.machine.ram_available_bytes
    if ram is not None:
        require_total(found.machine, ram, ranks * total.value)
    else:
        rest = derived(max(0, available.value - ranks * total.value), available, note=available.note)
        beside = _less_reserve(rest, settings)
    gpu = Gpu(
        index=0,
        uuid="",
        name="CPU",
        total_bytes=total,
        free_bytes=total,
        memory_bytes_per_second=assumed(_RAM_BYTES_PER_S, "RAM"),
        bf16_flops=assumed(_CPU_FLOPS, "some CPU"),
        compute_capability=None,
        link=assumed(_COPY_BYTES_PER_S, "copies within RAM"),
    )
    return Device((gpu,) * ranks, cpu_platform(), beside)


def cpu_platform(cpuinfo: Path = Path("/proc/cpuinfo")) -> Platform:
    try:
        return cpu_with(frozenset(cpuinfo.read_text().split()))
    except OSError:
        return CPU


def _less_reserve(available: Known[int], settings: Mapping[str, Any]) -> Known[int]:
    reserve = settings.get("ram_reserve", RAM_RESERVE_BYTES)
    note = "; ".join(filter(None, (available.note, f"less {format_size(reserve)} for the rest of the machine")))
    return derived(max(0, available.value - reserve), available, note=note)


class TooMuchRam(OverspillError):
    """More RAM is needed than this machine has, or has available now."""


def require_total(machine: Machine, ram_bytes: int, stand_in_bytes: int = 0) -> None:
    """Refuse a `--ram` that, beside RAM standing in for GPU memory, exceeds the limit of the machine or its cgroup."""
    limit, need = machine.ram_limit_bytes, ram_bytes + stand_in_bytes
    asked = f"--ram {format_size(ram_bytes)}"
    if stand_in_bytes:
        asked += f" beside {format_size(stand_in_bytes)} in place of a GPU's memory (--gpu-memory)"
    which = f"{limit.note} allows" if limit is machine.cgroup_limit_bytes else "this machine has"
    _require(
        need, limit.value, stand_in_bytes,
        f"{asked} needs {format_size(need)} of RAM, and {which} {format_size(limit.value)}",
        "To plan for another machine, name its card too, as with --gpu rtx4090",
    )  # fmt: skip


def require_available(machine: Machine, plan: Plan) -> None:
    """Refuse a plan that needs more RAM than is available now, which the engine notices only after loading."""
    way, available = plan.chosen, machine.ram_available_bytes
    if way is None:
        return
    stand_in = plan.stand_in_bytes
    takes, pools = way.peak_ram_bytes + stand_in, sum(way.connector_sizes.values())
    pools += plan.num_ranks * way.parked_bytes if way.parks else 0
    # The engine insists on its reserve beside its pools; without pools it needs none.
    reserve = parse_size(read_options(plan.wishes.kv_options).get("reserve_bytes", Options.reserve_bytes))
    reserved = f", of which {format_size(pools)} must leave {format_size(reserve)} free" if pools else ""
    _require(
        max(takes, pools + reserve if pools else 0), available.value, stand_in,
        f"the plan takes {format_size(takes)} of RAM{reserved}; {format_size(available.value)} is available now "
        f"({available.note})",
        "End other programs, or start anyway with --force",
    )  # fmt: skip


def _require(need: int, have: int, stand_in: int, said: str, otherwise: str) -> None:
    if need <= have:
        return
    most = (have - stand_in - RAM_RESERVE_BYTES) // GiB
    advice = f"Use --ram {most}GiB, or leave" if most > 0 else "Leave"
    raise TooMuchRam(f"{said}. {advice} --ram out to use what is available less --ram-reserve. {otherwise}")
