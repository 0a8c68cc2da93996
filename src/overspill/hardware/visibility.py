"""Which GPUs CUDA_VISIBLE_DEVICES leaves to a program."""

from collections.abc import Sequence

from overspill.hardware.gpu import Gpu


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs a CUDA program sees, in its order.

    Numbers count as NVML counts, by PCI address, as vLLM takes them; CUDA itself does so only with
    CUDA_DEVICE_ORDER=PCI_BUS_ID, which matters where the cards differ. As in CUDA, the first entry that names no GPU
    ends the list. vLLM takes an empty setting for none at all.
    """
    if not setting:
        return tuple(gpus)
    found: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        gpu = _named(gpus, entry)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return tuple(found)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    alike = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]  # CUDA accepts the beginning, if it is only one's
    return alike[0] if len(alike) == 1 else None
