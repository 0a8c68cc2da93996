"""The connector's options as a flag's text: read, written, refused, and as far as a plan has a use for them."""

from dataclasses import fields

import pytest

from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.planning.connector_options import read_options, unused_options, used_options, write_options
from overspill.settings import resolve

ALL = (
    "store=lazy,eviction=arc,verify=all,load=always,keep_on_reset=true,spill_share=0.25,reserve_bytes=2147483648,"
    "pin=true,spill_compute=gpu,spill_threads=6,spill_graphs=false,spill_lends=false,park=true,"
    "ledger=/run/overspill/gpu.ledger,ledger_bytes=1073741824,ledger_weight=2,"
    "disk_bytes=1073741824,disk_path=/var/cache/kv,remote=mooncake://127.0.0.1:50051"
)


def test_the_connector_accepts_options_as_read() -> None:
    read = read_options(ALL)
    assert read == {
        "store": "lazy", "eviction": "arc", "verify": "all", "load": "always", "spill_share": 0.25,
        "reserve_bytes": 2**31, "pin": True, "keep_on_reset": True, "spill_compute": "gpu", "spill_threads": 6,
        "spill_graphs": False, "spill_lends": False, "park": True,
        "ledger": "/run/overspill/gpu.ledger", "ledger_bytes": 2**30, "ledger_weight": 2,
        "disk_bytes": 2**30, "disk_path": "/var/cache/kv", "remote": "mooncake://127.0.0.1:50051",
    }  # fmt: skip
    options = Options.parse({"host_bytes": 1, "spill_bytes": 1, **read})
    assert all(getattr(options, name) == value for name, value in read.items())


def test_every_option_can_be_written_but_the_sizes() -> None:
    assert set(read_options(ALL)) == {f.name for f in fields(Options)} - {"host_bytes", "spill_bytes", "resident_bytes"}


@pytest.mark.parametrize(
    "written", [ALL, " store = lazy , pin=FALSE", "spill_share=1", "reserve_bytes=0.5GiB", "pin=true"]
)
def test_options_survive_writing_and_reading(written: str) -> None:
    assert read_options(write_options(read_options(written))) == read_options(written)


def test_an_empty_text_says_nothing() -> None:
    assert read_options("") == {} and write_options({}) == ""


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("store", "write for example store=lazy,verify=all"),
        ("store=", "write for example"),
        ("=lazy", "write for example"),
        ("store=lazy,", "'' is not an option with a value"),
        ("store=later", "store: must be one of eager, lazy"),
        ("stor=lazy", "did you mean 'store'"),
        ("lazy_offload=true", '"store": "lazy" for true'),
        ("store=lazy,store=eager", "given twice"),
        ("host_bytes=4GiB", "--offload-ram sets it"),
        ("spill_bytes=4GiB", "within --ram"),
        ("resident_bytes=4GiB", "within --gpu-memory"),
        ("pin=7", "must be true or false"),
        ("spill_share=most", "above 0 and at most 1"),
        ("spill_share=1.5", "above 0 and at most 1"),
        ("reserve_bytes=some", "is not a size"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(written: str, said: str) -> None:
    with pytest.raises(OverspillError) as refused:
        read_options(written)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(OverspillError, match=r"^--kv-options: "):
        resolve({"kv_options": written}, {}, None)


def test_options_without_their_size_are_not_used() -> None:
    options = read_options("store=lazy,spill_share=1,pin=false")
    assert set(used_options(options, ["host_bytes"])) == {"store", "pin"}
    assert set(used_options(options, ["spill_bytes"])) == {"spill_share", "pin"}
    assert used_options(options, ["host_bytes", "spill_bytes"]) == options
    assert used_options(options, []) == {} and unused_options(options, []) == options
    assert unused_options(options, ["host_bytes"]) == {"spill_share": 1.0}
