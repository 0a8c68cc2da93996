"""What a user may write in kv_connector_extra_config, and what he is told otherwise."""

from dataclasses import fields
from typing import Any

import pytest

from overspill.kv.errors import OverspillError
from overspill.kv.options import Options, describe_options


def test_host_bytes_alone_gives_the_defaults() -> None:
    options = Options.parse({"host_bytes": "40GiB"})
    assert options == Options(host_bytes=40 * 2**30)
    assert (options.store, options.eviction, options.verify, options.load) == ("eager", "lru", "sample", "auto")
    assert options.reserve_bytes == 4 * 2**30
    assert options.pin is True


def test_every_option_can_be_set() -> None:
    written = {
        "host_bytes": 1 << 30, "store": "lazy", "eviction": "arc", "verify": "all", "load": "always",
        "reserve_bytes": "1GiB", "pin": False, "spill_bytes": "2GiB", "resident_bytes": "3GiB", "spill_share": 0.25,
    }  # fmt: skip
    options = Options.parse(written)
    assert set(written) == {f.name for f in fields(Options)}
    for f in fields(Options):
        assert getattr(options, f.name) != f.default


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(OverspillError, match="no option 'host_byte'; did you mean 'host_bytes'"):
        Options.parse({"host_byte": "1GiB"})
    with pytest.raises(OverspillError, match="did you mean 'eviction'"):
        Options.parse({"host_bytes": "1GiB", "evict": "lru"})


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
    rows = describe_options()
    assert [row[0] for row in rows] == [f.name for f in fields(Options)]
    assert dict((row[0], row[1]) for row in rows)["pin"] == "true"
    assert all(len(row[2]) > 40 for row in rows)
