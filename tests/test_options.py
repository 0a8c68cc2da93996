"""What a user may write in kv_connector_extra_config, and what he is told otherwise."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from overspill.kv.errors import OverspillError
from overspill.kv.options import ELSEWHERE, Options


def test_host_bytes_alone_gives_the_defaults() -> None:
    options = Options.parse({"host_bytes": "40GiB"})
    assert options == Options(host_bytes=40 * 2**30)
    assert (options.store, options.eviction, options.verify, options.load) == ("eager", "lru", "sample", "auto")
    assert options.reserve_bytes == 4 * 2**30
    assert options.pin is True


def test_every_option_can_be_set() -> None:
    written = {
        "host_bytes": 1 << 30, "store": "lazy", "eviction": "arc", "verify": "all", "load": "always",
        "reserve_bytes": "1GiB", "spill_bytes": "2GiB", "resident_bytes": "3GiB", "spill_share": 0.25,
        "keep_on_reset": True, "spill_compute": "gpu", "spill_threads": 8, "spill_graphs": False,
        "spill_lends": False, "park": True,
        "ledger": "/run/overspill/gpu.ledger", "ledger_bytes": 2**30, "ledger_weight": 2,
        "disk_bytes": "1GiB", "disk_path": "/var/cache/kv", "remote": "mooncake://127.0.0.1:50051",
    }  # fmt: skip
    options = Options.parse(written)
    assert {*written, "pin"} == {f.name for f in fields(Options)}
    for name, default in ((f.name, f.default) for f in fields(Options) if f.name in written):
        assert getattr(options, name) != default
    assert Options.parse({"host_bytes": "1GiB", "pin": False}).pin is False


def test_spilled_kv_must_be_pinned() -> None:
    """CUDA promises no order between events and copies of pageable memory."""
    with pytest.raises(OverspillError, match="must be registered for DMA; remove pin, or spill_bytes"):
        Options.parse({"spill_bytes": "1GiB", "pin": False})


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(OverspillError, match="no option 'host_byte'; did you mean 'host_bytes'"):
        Options.parse({"host_byte": "1GiB"})
    with pytest.raises(OverspillError, match="did you mean 'eviction'"):
        Options.parse({"host_bytes": "1GiB", "evict": "lru"})


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"num_cpu_blocks": 50000, "block_size": 16}, r"host_bytes.*blocks x tokens.*x KV bytes.*spill_bytes"),
        ({"cpu_bytes_to_use": 80 * 2**30}, "called host_bytes, with the same number"),
        ({"cpu_bytes_to_use_per_rank": 2**30}, "host_bytes.*--tensor-parallel-size"),
        ({"lazy_offload": True}, 'use "store": "lazy" for true'),
        ({"eviction_policy": "arc"}, "called eviction"),
        ({"block_size": 16}, "--block-size"),
        ({"disk_capacity_bytes": 5}, "called disk_bytes"),
        ({"max_local_disk_size": 100}, '"100GiB"'),
        ({"kv_offload_backend": "fs"}, "to a Mooncake Store, and nowhere else"),
        ({"remote_url": "redis://kv"}, "use remote, for a Mooncake Store: mooncake://host:port"),
        ({"max_local_cpu_size": 5}, '"host_bytes": "10GiB"'),
        ({"lmcache.max_local_cpu_size": 5}, '"host_bytes": "10GiB"'),
        ({"lmcache.mp.port": 5555}, "LMCache's; remove it"),
    ],
)
def test_another_connectors_option_is_answered_with_ours(given: dict[str, Any], instead: str) -> None:
    """By spelling alone, num_cpu_blocks and cpu_bytes_to_use were both answered with spill_bytes."""
    with pytest.raises(OverspillError, match=instead) as refused:
        Options.parse({"host_bytes": "1GiB"} | given)
    said = str(refused.value)
    assert repr(next(iter(given))) in said and "did you mean" not in said and "\n" not in said


def test_options_of_other_connectors_map_only_to_ours() -> None:
    known = {f.name for f in fields(Options)}
    assert known.isdisjoint(ELSEWHERE)
    for instead in ELSEWHERE.values():
        assert set(re.findall(r"\b[a-z]+_bytes\b", instead)) <= known


def test_vllms_own_connectors_have_no_option_that_gets_no_answer() -> None:
    """What they read of kv_connector_extra_config, found in the vLLM that is installed."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    connectors = root / "distributed/kv_transfer/kv_connector/v1"
    files = [connectors / "simple_cpu_offload_connector.py", *(connectors / "offloading").glob("*.py")]
    files += [*(root / "v1/kv_offload").glob("*.py"), *(root / "v1/kv_offload/cpu").glob("*.py")]
    files += [root / "v1/kv_offload/tiering/spec.py"]
    asked = r"extra_config(?:\.get\(|\[)\s*\"(\w+)\""
    named = {name for file in files for name in re.findall(asked, file.read_text())}
    assert {"cpu_bytes_to_use", "lazy_offload", "eviction_policy"} <= named
    assert named <= ELSEWHERE.keys() | {f.name for f in fields(Options)}


def test_a_missing_size_is_asked_for() -> None:
    for nothing in ({}, {"host_bytes": 0}, {"host_bytes": "0GiB", "spill_bytes": 0}):
        with pytest.raises(OverspillError, match=r"needs host_bytes.*or spill_bytes.*40GiB"):
            Options.parse(nothing)


def test_spill_alone_is_enough() -> None:
    options = Options.parse({"spill_bytes": "40GiB"})
    assert (options.host_bytes, options.spill_bytes, options.spill_share) == (0, 40 * 2**30, 0.5)


@pytest.mark.parametrize(
    ("given", "useless", "needs"),
    [
        ({"host_bytes": "1GiB", "spill_share": 0.5}, "spill_share", "spill_bytes"),
        ({"host_bytes": "1GiB", "resident_bytes": "1GiB"}, "resident_bytes", "spill_bytes"),
        ({"spill_bytes": "1GiB", "store": "lazy"}, "store", "host_bytes"),
        ({"spill_bytes": "1GiB", "verify": "all"}, "verify", "host_bytes"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(given: dict[str, Any], useless: str, needs: str) -> None:
    with pytest.raises(OverspillError, match=rf"\['{useless}'\] does nothing without {needs}; remove it"):
        Options.parse(given)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"host_bytes": -5}, "must not be negative"),
        ({"host_bytes": "lots"}, "is not a size"),
        ({"host_bytes": 1.5}, "is not a size"),
        ({"host_bytes": True}, "is not a size"),
        ({"reserve_bytes": -1}, "must not be negative"),
        ({"spill_bytes": "-1GiB"}, "is not a size"),
        ({"spill_share": 0}, "above 0 and at most 1"),
        ({"spill_share": 1.5}, "above 0 and at most 1"),
        ({"spill_share": True}, "above 0 and at most 1"),
        ({"store": "sometimes"}, "eager, lazy"),
        ({"eviction": "fifo"}, "lru, arc"),
        ({"verify": True}, "off, sample, all"),
        ({"verify": ["all"]}, "off, sample, all"),
        ({"load": "never"}, "auto, always"),
        ({"pin": "yes"}, "true or false"),
        ({"pin": 1}, "true or false"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_would_do(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(OverspillError) as refused:
        Options.parse({"host_bytes": "1GiB"} | wrong)
    message = str(refused.value)
    assert f"kv_connector_extra_config[{next(iter(wrong))!r}]" in message
    assert said in message
    assert "\n" not in message


def test_ranks_share_the_pool() -> None:
    assert Options(host_bytes=1000).host_bytes_per_rank(4) == 250


def test_every_option_is_described() -> None:
    assert all(len(f.metadata["help"]) > 40 for f in fields(Options))


@pytest.mark.parametrize("path", ["kv", "./kv", "../kv", "/kv/../etc", "/a,b", "", "/a\nb", 7, None])
def test_a_disk_path_that_is_no_absolute_folder_is_refused(path: object) -> None:
    with pytest.raises(OverspillError, match=r"'disk_path'.*absolute path of a folder, without \.\. or commas"):
        Options.parse({"host_bytes": "1GiB", "disk_bytes": "1GiB", "disk_path": path})


def test_a_disk_needs_ram_and_a_path_needs_a_disk() -> None:
    with pytest.raises(OverspillError, match=r"'disk_bytes'.*does nothing without host_bytes"):
        Options.parse({"spill_bytes": "1GiB", "disk_bytes": "1GiB"})
    with pytest.raises(OverspillError, match=r"'disk_path'.*does nothing without disk_bytes"):
        Options.parse({"host_bytes": "1GiB", "disk_path": "/kv"})


@pytest.mark.parametrize("remote", ["redis://kv:1", "mooncake://kv", "mooncake://kv:1,pin=0", "mooncake://a b:1", 7])
def test_a_store_that_is_no_mooncake_master_is_refused(remote: object) -> None:
    with pytest.raises(OverspillError, match=r"'remote'.*must be mooncake://host:port"):
        Options.parse({"host_bytes": "1GiB", "remote": remote})
