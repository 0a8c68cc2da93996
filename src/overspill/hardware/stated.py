"""Hardware stated by users: --gpu, --ram, --link, --cpu-attention."""

import re
from dataclasses import replace

from overspill.figures import Known, assumed
from overspill.hardware.cards import Card, find_card, link_of_card, modest_card, nearest_cards
from overspill.hardware.gpu import PCIE_GENERATIONS, PCIE_WIDTHS, Gpu, link_from_pcie
from overspill.hardware.machine import Hardware
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, TiB, format_size, parse_size

_GPU_EXAMPLE = '--gpu rtx4090, --gpu 24GiB or --gpu "rtx 4090:23GiB"'
_SMALLEST, _LARGEST_GPU, _LARGEST_RAM = GiB, TiB, 64 * TiB
_SLOWEST_LINK, _FASTEST_LINK = 10**8, 2 * 10**12
# "Gb" means bits, an eighth as much, so the B must be a capital.
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?\s*[kKMGT]?i?B)\s*/\s*s\s*")
_PCIE = re.compile(r"\s*pcie[\s-]*([0-9])(?:\.0)?\s*x\s*([0-9]{1,2})\s*", re.IGNORECASE)


def parse_gpu(text: str) -> Gpu:
    """Parse a card's name, with an unusual memory size after a colon, or only the memory size of any card."""
    name, colon, memory = text.partition(":")
    card = find_card(name)
    if card is not None:
        total = _gpu_bytes(text, memory) if colon else None
        return _gpu(card, total, name=card.name)
    if not colon and _is_size(text):
        total = _gpu_bytes(text, text)
        return _gpu(modest_card(total), total, name=f"a GPU of {format_size(total)}")
    alike = nearest_cards(name)
    nearest = f" (nearest: {', '.join(alike)})" if alike else ""
    raise OverspillError(
        f"--gpu {text!r} is neither a card known here{nearest} nor a memory size with its unit; write for example "
        f"{_GPU_EXAMPLE}"
    )


AS_ON = "as on an"
"""Prefix of the note on a figure borrowed from a card of that size, where only a size was stated."""


def parse_ram(text: str, place: str = "--ram") -> Known[int]:
    """Parse an amount of RAM; `place` is the flag or file that stated it."""
    num_bytes = parse_size(text) if _is_size(text) else None
    if num_bytes is None or not _SMALLEST <= num_bytes <= _LARGEST_RAM:
        raise OverspillError(
            f"{place} {text!r} is not a size from 1GiB to 64TiB with its unit; write for example --ram 128GiB"
        )
    return assumed(num_bytes, f"stated with {place}" if " " not in place else f"stated in {place}")


def parse_link(text: str) -> Known[int]:
    """Parse a rate that holds each way, or a PCIe generation and width."""
    pcie = _PCIE.fullmatch(text)
    if pcie is not None and int(pcie[1]) in PCIE_GENERATIONS and int(pcie[2]) in PCIE_WIDTHS:
        return link_from_pcie(assumed(int(pcie[1]), "stated with --link"), assumed(int(pcie[2]), "stated with --link"))
    num_bytes = _rate(text)
    if not _SLOWEST_LINK <= num_bytes <= _FASTEST_LINK:
        raise OverspillError(
            f"--link {text!r} is neither a rate from 0.1GB/s to 2TB/s nor a PCIe link; write for example --link 25GB/s "
            "or --link pcie4x16"
        )
    return assumed(num_bytes, "stated with --link")


def parse_cpu_attention(text: str) -> Known[int]:
    """Parse the bytes of KV in RAM that the CPU attends to per second."""
    num_bytes = _rate(text)
    if not _SLOWEST_LINK <= num_bytes <= _FASTEST_LINK:
        raise OverspillError(
            f"--cpu-attention {text!r} is not a rate from 0.1GB/s to 2TB/s; write for example --cpu-attention 80GB/s, "
            "or --spill-compute gpu to leave attention to the GPU"
        )
    return assumed(num_bytes, "stated with --cpu-attention")


def _rate(text: str) -> int:
    """Bytes per second, or 0 if the text is not a rate."""
    rate = _RATE.fullmatch(text)
    return parse_size(rate[1]) if rate is not None else 0


def with_stated(
    hardware: Hardware, *, gpu: str | None = None, ram: str | None = None, link: str | None = None,
    ram_place: str = "--ram",
) -> Hardware:  # fmt: skip
    """The hardware, with the user's figures in place of those detected."""
    if gpu is not None:
        hardware = replace(hardware, gpus=(parse_gpu(gpu),), problems=())
    if ram is not None:
        size = parse_ram(ram, ram_place)
        # The nodes' sizes would no longer add up.
        machine = replace(hardware.machine, ram_total_bytes=size, ram_available_bytes=size, numa_nodes=())
        hardware = replace(hardware, machine=machine)
    if link is not None:
        stated = parse_link(link)
        hardware = replace(hardware, gpus=tuple(replace(each, link=stated) for each in hardware.gpus))
    return hardware


def _is_size(text: str) -> bool:
    """Whether the text is a size with a unit: a bare number would be bytes, which nobody means here."""
    try:
        parse_size(text)
    except OverspillError:
        return False
    return not text.strip().isdigit()


def _gpu_bytes(text: str, memory: str) -> int:
    num_bytes = parse_size(memory) if _is_size(memory) else None
    if num_bytes is None or not _SMALLEST <= num_bytes <= _LARGEST_GPU:
        raise OverspillError(
            f"--gpu {text!r}: {memory.strip()!r} is not a memory size from 1GiB to 1TiB with its unit; write for "
            f"example {_GPU_EXAMPLE}"
        )
    return num_bytes


def _gpu(card: Card, total_bytes: int | None, *, name: str) -> Gpu:
    """A stated GPU with the card's figures, and with `total_bytes` if the user gave a size."""
    sheet = f"data sheet of the {card.name}" if name == card.name else f"{AS_ON} {card.name}, the slowest of that size"
    if total_bytes is None:
        total = assumed(card.total_bytes, f"usual for an {card.name}, sold as {card.marketed_gb} GB")
    else:
        total = assumed(total_bytes, "stated with --gpu")
    generation, width = (assumed(value, sheet) for value in card.pcie)
    return Gpu(
        index=0,
        uuid="",
        name=name,
        total_bytes=total,
        free_bytes=assumed(total.value, "no other program uses it"),
        memory_bytes_per_second=assumed(int(card.memory_gb_s * 1e9), sheet),
        bf16_flops=assumed(int(card.bf16_tflops * 1e12), sheet),
        # A size borrows a card's speeds, which may be too low; what a card can do at all is not guessed.
        compute_capability=card.compute_capability if name == card.name else None,
        link=link_of_card(card, generation, width),
        nvlink=None if card.nvlink_gb_s is None else assumed(int(card.nvlink_gb_s * 1e9), sheet),
    )
