"""The link between RAM and GPU, measured with plain torch copies of pinned memory.

python benchmarks/link.py       prints one JSON object, null without a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from record import GIB, Json


def measure(num_bytes: int = GIB, repeats: int = 9) -> Json | None:
    """Bytes per second each way, and of both directions together."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = [torch.ones(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    device = [torch.ones(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def load() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)

    def store() -> None:
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)

    def both() -> None:
        load()
        store()

    def seconds(copy: Callable[[], None]) -> list[float]:
        taken = []
        for _ in range(repeats + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return taken[2:]  # the first copies also wake the link up

    return {
        "bytes": num_bytes,
        "repeats": repeats,
        "h2d_bytes_per_second": num_bytes / statistics.median(seconds(load)),
        "d2h_bytes_per_second": num_bytes / statistics.median(seconds(store)),
        "both_bytes_per_second": 2 * num_bytes / statistics.median(seconds(both)),
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(json.dumps(measure()))
