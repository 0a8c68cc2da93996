"""Parking on CUDA: GPU memory is really given back, and answers are those of an engine that never parked.

vLLM's sleep mode can be used by one engine of a process, so each is a process of its own: `python -m
tests.test_gpu_park MODE MODEL`. Run with `pytest -m gpu`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import Engine, assert_same_but_for_ties, engine, overspill_config, random_prompt
from tests.gpu_memory import used_bytes
from tests.test_gpu_spill import SETTINGS, spilling
from tests.zygote import cold

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

MIB = 2**20
OFFLOAD = {"host_bytes": "256MiB", "load": "always", "verify": "all", "reserve_bytes": 0, "park": True}
# Without the compiler, which takes half a minute of every start.
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}
# The first does not fit beside spill's window.
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((9000, 300, 150))]
CYCLES = 5


def transfer_of(mode: str) -> Any:
    if mode == "spill":
        return spilling(**{name: OFFLOAD[name] for name in ("host_bytes", "load", "park")})
    return overspill_config({**OFFLOAD, "store": "lazy" if mode == "lazy" else "eager"})


def check(mode: str, model: Path) -> dict[str, Any]:
    """Raises where something is not as it should be; what was measured, for the log."""
    blocks = {} if mode == "spill" else {"blocks": 4000}
    with engine(model, transfer_of(mode), **SETTINGS, **GRAPHS, **blocks) as parked:
        expected = [parked.ask_one(prompt, 48) for prompt in PROMPTS]
        parked.drain()
        running, figures = used_bytes(), []
        for cycle in range(CYCLES):
            names = [parked.add(prompt, 48) for prompt in PROMPTS]
            done = {}
            for _ in range(4):
                done |= parked.step()
            told = parked.core.overspill_park()
            assert told["state"] == "parked" and parked.step() == {}
            gone = running - used_bytes()
            # Segments of vLLM's pools, and pieces of the KV cache, are whole; the rest is other's.
            assert gone >= 0.95 * told["freed_bytes"] > 0, (gone, told)
            if cycle == 2:
                refuse_to_wake(parked)
            figures.append({**told, "gone_bytes": gone, "wake": parked.core.overspill_wake()})
            assert used_bytes() < running + 64 * MIB, "what is held returns to what it was"
            done |= parked.run()
            assert_same_but_for_ties([done[name] for name in names], expected)
            again = parked.ask_one(PROMPTS[0], 48)
            assert_same_but_for_ties([again], [expected[0]])
            assert again.num_cached >= 8900
        assert parked.metric("load_failures") == parked.metric("corrupt_blocks") == 0 < parked.metric("hit_tokens")
        weights = figures[0]["weights_bytes"]
        assert all(each["copied_bytes"] < weights for each in figures[1:]), "weights are copied once"
        return {"mode": mode, "figures": figures, "running_bytes": running}


def refuse_to_wake(parked: Engine) -> None:
    """Another process has the memory, as it were."""
    from overspill.kv.errors import OverspillError

    free = torch.cuda.mem_get_info()[0]
    neighbour = torch.empty(free - 8 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(OverspillError, match="GPU memory"):
        parked.core.overspill_wake()
    assert parked.core.overspill_state()["state"] == "parked"
    del neighbour
    torch.cuda.empty_cache()


@pytest.mark.parametrize("mode", ["eager", "lazy", "spill"])
def test_an_engine_gives_its_memory_back_and_goes_on(llama: Path, mode: str) -> None:
    with cold():
        ran = subprocess.run(
            [sys.executable, "-m", "tests.test_gpu_park", mode, str(llama)],
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-8000:]
    print(ran.stdout.splitlines()[-1])


def test_pieces_under_an_address_come_and_go_on_the_gpu() -> None:
    from overspill.kv.buffer import CudaBuffer, plain_pieces

    num_bytes = 200 * MIB + 5
    buffer = CudaBuffer(num_bytes, plain_pieces(num_bytes), torch.device("cuda", 0))
    contents = buffer.tensor()
    address = contents.data_ptr()
    contents.fill_(7)
    assert int(contents.max()) == 7 and contents.numel() == num_bytes
    held = used_bytes()  # after the first kernels, which take memory of their own when they are loaded
    for _ in range(3):
        torch.cuda.synchronize()
        buffer.unmap()
        assert held - used_bytes() >= 200 * MIB and buffer.mapped_bytes == 0
        buffer.map()
        assert contents.data_ptr() == address and int(contents.max()) == 0
        assert abs(used_bytes() - held) < 16 * MIB
        contents.fill_(7)
    buffer.close()
    assert held - used_bytes() >= 200 * MIB


if __name__ == "__main__":
    print(json.dumps(check(sys.argv[1], Path(sys.argv[2]))))
