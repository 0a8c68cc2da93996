"""The connector's options, in `kv_connector_extra_config`: one table for parsing, checks and documentation."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from dataclasses import field as dataclass_field
from typing import Any, Literal

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, parse_size

Store = Literal["eager", "lazy"]
Eviction = Literal["lru", "arc"]
Verify = Literal["off", "sample", "all"]
Load = Literal["auto", "always"]
Compute = Literal["auto", "gpu"]


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise OverspillError(f"must be above 0 and at most 1, got {value!r}")
    return float(value)


def _size(value: object) -> int:
    size = parse_size(value)
    if size < 0:
        raise OverspillError(f"must not be negative, got {value!r}")
    return size


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OverspillError(f"must be a whole number and not negative, got {value!r}")
    return value


def _path(value: object) -> str:
    if not isinstance(value, str) or (value and not value.startswith("/")):
        raise OverspillError(f"must be the path of a file, from the root; got {value!r}")
    return value


def parse_folder(value: object) -> str:
    """Parse an absolute path, expanding `~`; commas are refused because they separate options in a flag."""
    path = os.path.expanduser(value) if isinstance(value, str) else ""
    if not path.startswith("/") or "," in path or not path.isprintable() or ".." in path.split("/"):
        raise OverspillError(f"must be the absolute path of a folder, without .. or commas in it, got {value!r:.80}")
    return os.path.normpath(path)


def parse_remote(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"mooncake://[A-Za-z0-9.-]{1,253}:[0-9]{1,5}", value):
        raise OverspillError(f"must be mooncake://host:port, the address of a Mooncake master, got {value!r:.80}")
    return value


def _one_of(*choices: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in choices:
            raise OverspillError(f"must be one of {', '.join(choices)}; got {value!r}")
        return str(value)

    return check


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise OverspillError(f"must be true or false, got {value!r}")
    return value


def _option(parse: Callable[[object], Any], default: Any, text: str, *, needs: str = "") -> Any:
    """Define an option; `needs` names the option without which this one does nothing."""
    return dataclass_field(default=default, metadata={"parse": parse, "help": text, "needs": needs})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the connector; `host_bytes`, `spill_bytes` or both must be given."""

    host_bytes: int = _option(
        _size,
        0,
        "RAM for offloaded KV, in total for the server (each tensor-parallel rank takes an equal part). "
        'An integer of bytes or a string such as "40GiB". 0 turns offload off.',
    )
    spill_bytes: int = _option(
        _size,
        0,
        "RAM for the KV of running requests that do not fit on the GPU, in total for the server. Contexts may be as "
        "long as this and the GPU's KV cache can hold together. 0 turns spill off.",
    )
    resident_bytes: int = _option(
        _size,
        0,
        "GPU memory for KV with spill, its window included, in total for the server. 0 takes what vLLM finds free "
        "under `--gpu-memory-utilization`.",
        needs="spill_bytes",
    )
    spill_share: float = _option(
        _share,
        0.5,
        "The share of time that spilled requests may take from others while both generate: 1 runs them in every step, "
        "at the speed of the link; less lets them sit out steps. Above 0, at most 1.",
        needs="spill_bytes",
    )
    spill_compute: Compute = _option(
        _one_of("auto", "gpu"),
        "auto",
        "Where decode steps attend to spilled KV: `auto` lets the CPU attend to a part of it, in RAM, while the rest "
        "is streamed, which rounds differently; `gpu` streams all of it, with exactly the results of the GPU alone.",
        needs="spill_bytes",
    )
    spill_threads: int = _option(
        _count,
        0,
        "Threads that attend to spilled KV. 0 takes one for each physical core near the GPU, less two.",
        needs="spill_bytes",
    )
    spill_graphs: bool = _option(
        _flag,
        True,
        "Run small decode steps with spilled KV in FULL CUDA graphs. `false` runs them piecewise: slower, with the "
        "same tokens.",
        needs="spill_bytes",
    )
    spill_lends: bool = _option(
        _flag,
        True,
        "Lend window memory that is not needed now to GPU blocks. `false` keeps both at their initial size.",
        needs="spill_bytes",
    )
    store: Store = _option(
        _one_of("eager", "lazy"),
        "eager",
        "When blocks are copied to RAM: `eager` as soon as they are full, prompt and output alike; `lazy` when they "
        "come near eviction from the GPU, or when a second request uses them.",
        needs="host_bytes",
    )
    eviction: Eviction = _option(
        _one_of("lru", "arc"),
        "lru",
        "What leaves RAM first: `lru`, least recently used; `arc`, which also protects what was used more than once. "
        "Both give up the tail of a prefix before its head.",
        needs="host_bytes",
    )
    verify: Verify = _option(
        _one_of("off", "sample", "all"),
        "sample",
        "Which blocks carry an xxh3 checksum that is checked during a load, before its request runs: none, one in 16, "
        "or all. A block that fails is dropped and recomputed.",
        needs="host_bytes",
    )
    load: Load = _option(
        _one_of("auto", "always"),
        "auto",
        "`auto` loads only when that is faster than recomputing, from the measured link and prefill speed; "
        "`always` loads every hit.",
        needs="host_bytes",
    )
    keep_on_reset: bool = _option(
        _flag,
        False,
        "Whether RAM keeps its KV when vLLM's prefix cache is reset without `reset_connector`. By default both are "
        "cleared: after new weights, KV of the old ones would give wrong answers.",
        needs="host_bytes",
    )
    park: bool = _option(
        _flag,
        False,
        "Whether the engine can be parked: its weights go to RAM and its GPU memory to others, while its process, its "
        "graphs and its KV in RAM stay, until it is woken. Needs RAM for a copy of the weights.",
    )
    ledger: str = _option(
        _path,
        "",
        "A file in which the engines of a GPU record the memory of their KV and read how much they are granted; their "
        "KV caches grow and shrink accordingly while they run. Empty keeps the KV cache at its initial size.",
        needs="host_bytes",
    )
    ledger_bytes: int = _option(
        _size,
        0,
        "GPU memory under the KV cache until the ledger grants another amount; 0 for all of the KV cache.",
        needs="ledger",
    )
    ledger_weight: int = _option(
        _count,
        1,
        "Memory that no engine of the ledger needs is divided by their weights.",
        needs="ledger",
    )
    disk_bytes: int = _option(
        _size,
        0,
        "Disk for KV that leaves RAM, in total for the server: blocks that were used more than once, and at a stop all "
        "of them. They are found again after a restart. 0 keeps KV in RAM only.",
        needs="host_bytes",
    )
    disk_path: str = _option(
        parse_folder,
        "",
        "Folder for `disk_bytes`, for one server at a time. By default, one in the user's cache folder, named after "
        "the model.",
        needs="disk_bytes",
    )
    remote: str = _option(
        parse_remote,
        "",
        "A store between machines, `mooncake://host:port` with the address of its master: blocks that come into RAM "
        "are put there, and found by other engines of the same model. Empty for none.",
        needs="host_bytes",
    )
    reserve_bytes: int = _option(
        _size,
        4 * GiB,
        "Available RAM that must remain for the rest of the machine; a start that would go below it is refused.",
    )
    pin: bool = _option(
        _flag,
        True,
        "Register the RAM given to KV for DMA, in the background. `false` keeps it pageable: slower, but nothing is "
        "locked. Spilled KV must be registered: with spill_bytes, `false` is refused.",
    )

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Options":
        """Parse `kv_connector_extra_config`; every error is one sentence that names the key."""
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in extra.items():
            if key not in known:
                raise OverspillError(f"kv_connector_extra_config has no option {key!r}{hint_for(key, known)}")
            try:
                values[key] = known[key].metadata["parse"](value)
            except OverspillError as error:
                raise OverspillError(f"kv_connector_extra_config[{key!r}]: {error}") from error
        if not values.get("host_bytes") and not values.get("spill_bytes"):
            raise OverspillError(
                "kv_connector_extra_config needs host_bytes, the RAM for KV that waits to be used again, or "
                'spill_bytes, the RAM for requests longer than the GPU holds, for example {"host_bytes": "40GiB"}'
            )
        for key in values:
            needs = known[key].metadata["needs"]
            if needs and not values.get(needs):
                raise OverspillError(f"kv_connector_extra_config[{key!r}] does nothing without {needs}; remove it")
        if values.get("spill_bytes") and not values.get("pin", True):
            # CUDA does not order copies of pageable memory by events, and spill relies on that order.
            raise OverspillError(
                "kv_connector_extra_config['pin']: spilled KV must be registered for DMA; remove pin, or spill_bytes"
            )
        return cls(**values)

    def host_bytes_per_rank(self, world_size: int) -> int:
        return self.host_bytes // world_size


_RAM_ONLY = (
    "KV goes to RAM, with disk_bytes to local disk, with remote to a Mooncake Store, and nowhere else; remove it"
)
_OWN_PARTS = "it names a part of vLLM's own offloader; remove it"
# Options of connectors that users migrate from: vLLM's OffloadingConnector and SimpleCPUOffloadConnector (0.32 and
# earlier), and LMCache, with or without its `lmcache.` prefix. Suggesting the nearest spelling would mislead: for
# num_cpu_blocks that is spill_bytes.
ELSEWHERE: dict[str, str] = {
    "num_cpu_blocks": "use host_bytes, the RAM itself: blocks x tokens in a block x KV bytes of a token. If they were "
    "to make one context longer than the GPU holds, use spill_bytes",
    "cpu_bytes_to_use": "it is called host_bytes, with the same number: bytes in total for the server",
    "cpu_bytes_to_use_per_rank": "use host_bytes, which is for all ranks: multiply by --tensor-parallel-size",
    "lazy_offload": 'use "store": "lazy" for true, and "store": "eager", the default, for false',
    "eviction_policy": 'it is called eviction: "lru" or "arc"',
    "store_threshold": 'nearest is "store": "lazy", which stores what a second request uses and what comes near '
    "eviction",
    "max_tracker_size": "it belongs to store_threshold; remove it",
    "offload_prompt_only": "prompt and output are stored alike; remove it",
    "block_size": "blocks are stored as they are on the GPU, whose size --block-size sets; remove it",
    "blocks_per_chunk": "blocks are stored as they are on the GPU, one by one; remove it",
    "self_describing_kv_events": "events are switched on with --kv-events-config; remove it",
    "canonical_layout": _OWN_PARTS,
    "spec_name": _OWN_PARTS,
    "spec_module_path": _OWN_PARTS,
    "cache_policy_module_path": _OWN_PARTS,
    "backpressure": "stores wait while the link is busy, and are dropped if it stays busy; remove it",
    "secondary_tiers": _RAM_ONLY,
    "kv_offload_backend": _RAM_ONLY,
    "disk_capacity_bytes": "it is called disk_bytes",
    "disk_buffer_slots": _RAM_ONLY,
    "use_page_cache": _RAM_ONLY,
    "local_cpu": "host_bytes switches offload on, and 0 switches it off",
    "max_local_cpu_size": 'use host_bytes, which is for all ranks: 5 for each of two is "host_bytes": "10GiB"',
    "reserve_local_cpu_size": 'it is called reserve_bytes: 8 is "8GiB"',
    "cache_policy": 'it is called eviction: "lru" or "arc"',
    "chunk_size": "blocks are stored as they are on the GPU, whose size --block-size sets; remove it",
    "save_decode_cache": "prompt and output are stored alike; remove it",
    "save_unfull_chunk": "only full blocks are stored; remove it",
    "discard_partial_chunks": "only full blocks are stored; remove it",
    "local_disk": "use disk_bytes for the size, and disk_path for the folder",
    "max_local_disk_size": 'use disk_bytes: 100 is "100GiB"',
    "remote_url": "use remote, for a Mooncake Store: mooncake://host:port",
}


def hint_for(key: str, known: Iterable[str]) -> str:
    """Hint for an unknown option: its counterpart if another connector has it, else the nearest spelling."""
    known = list(known)
    if (instead := ELSEWHERE.get(key.removeprefix("lmcache."))) is not None:
        return f": {instead}"
    if key.startswith("lmcache."):
        return ", it is LMCache's; remove it"
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"; did you mean {nearest[0]!r}? Options: {', '.join(known)}"
