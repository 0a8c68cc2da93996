"""Memory in two places, GPU and RAM: what an engine needs, what it holds, and what is free."""

from dataclasses import dataclass

from overspill.kv.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    gpu_bytes: int = 0
    ram_bytes: int = 0

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(gpu_bytes=self.gpu_bytes + other.gpu_bytes, ram_bytes=self.ram_bytes + other.ram_bytes)

    def __sub__(self, other: "Memory") -> "Memory":
        return Memory(gpu_bytes=self.gpu_bytes - other.gpu_bytes, ram_bytes=self.ram_bytes - other.ram_bytes)

    def holds(self, need: "Memory") -> bool:
        return need.gpu_bytes <= max(0, self.gpu_bytes) and need.ram_bytes <= max(0, self.ram_bytes)

    def where_asked(self, need: "Memory") -> "Memory":
        """Without the place that is not asked for, of which there may be no limit."""
        return Memory(
            gpu_bytes=self.gpu_bytes if need.gpu_bytes else 0, ram_bytes=self.ram_bytes if need.ram_bytes else 0
        )

    def __str__(self) -> str:
        parts = [(self.gpu_bytes, "of GPU memory"), (self.ram_bytes, "of RAM")]
        told = [f"{format_size(max(0, size))} {where}" for size, where in parts if size]
        return " and ".join(told) or "no memory"


NOTHING = Memory()


def total(parts: "list[Memory]") -> Memory:
    return sum(parts, NOTHING)
