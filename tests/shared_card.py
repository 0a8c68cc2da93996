"""A card that three elastic models share: a manager with stand-ins for engines, and for the GPU's driver."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overspill.kv.sizes import GiB, MiB
from overspill.manager.needs import Memory, Need, on_gpus
from overspill.manager.telemetry import machine
from overspill.manager.telemetry.machine import GpuSampler
from overspill.registry import Model
from tests.managed_here import Here, managed_here
from tests.manager_process import Place, place_in
from tests.test_hardware_nvml import Device, FakeNvml, used

WEIGHTS = {"gemma-3-1b": 2 * GiB, "llama-3.2-3b": 6 * GiB, "qwen3-1.7b": 3 * GiB + 300 * MiB}
KV, FLOOR, REQUEST = 9 * GiB, GiB, 2 * GiB
TOTAL, CONTEXT = 24 * GiB, 500 * MiB


def _reckon(model: Model, evictable: Memory) -> Need:
    return Need(least=on_gpus(FLOOR), takes=on_gpus(FLOOR))


class _Shared(Place):
    def options(self, **more: Any) -> Any:
        memory = Memory(gpus=(KV,), ram_bytes=64 * GiB)
        return super().options(**{"memory": memory, "reckon": _reckon, **more})


class SharedCard:
    def __init__(self, here: Here, place: Place, device: Device) -> None:
        self.here, self.place, self._device = here, place, device

    def look(self) -> None:
        """What engines hold now is what the driver counts from now on."""
        with self.here.client() as client:
            while True:  # what an engine that was just started or woken holds is known a moment later
                engines = {one["name"]: one for one in client.get("/api/engines").json()}
                if all(one["kv"] for one in engines.values() if one["state"] == "ready"):
                    break
                time.sleep(0.1)
        counted = {
            one["pid"]: CONTEXT + (0 if one["state"] == "parked" else WEIGHTS[name] + one["kv"]["held"])
            for name, one in engines.items()
            if one["pid"]
        }
        self._device.answers["ComputeRunningProcesses"] = [used(pid, size) for pid, size in counted.items()]
        free = TOTAL - sum(counted.values())
        self._device.answers["MemoryInfo"] = SimpleNamespace(total=TOTAL, reserved=0, free=free)


@contextlib.contextmanager
def shared_card() -> Iterator[SharedCard]:
    """All three are ready."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        for place in place_in(Path(folder), patched):
            shared, device = _Shared(place.folder), Device()
            patched.setattr(machine, "GpuSampler", lambda device=device: GpuSampler(FakeNvml(device)))
            kv = {"held": KV // 3, "floor": FLOOR, "most": KV, "request": REQUEST}
            for name, size in WEIGHTS.items():
                shared.add(name, behaviour={"token_s": 0.1, "elastic": kv, "device": "cuda", "parks": size})
            with managed_here(shared) as here, here.client() as client:
                for name in WEIGHTS:
                    assert client.post(f"/api/engines/start/{name}").json()["state"] == "ready"
                card = SharedCard(here, shared, device)
                card.look()
                yield card
