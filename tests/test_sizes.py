"""Sizes as people write them."""

import pytest

from overspill.kv.errors import OverspillError
from overspill.kv.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("40GiB", 40 * 2**30),
        ("40 gib", 40 * 2**30),
        ("40G", 40 * 2**30),
        ("40GB", 40 * 10**9),
        ("512m", 512 * 2**20),
        ("1.5KiB", 1536),
        (" 2 TiB ", 2 * 2**40),
        ("7B", 7),
    ],
)
def test_a_size_is_understood_as_written(written: object, num_bytes: int) -> None:
    assert parse_size(written) == num_bytes


@pytest.mark.parametrize("written", ["", "GiB", "40XB", "-1GiB", "4 0GiB", "1,5GiB", "0x10", True, 1.5, None, [1]])
def test_what_is_not_a_size_is_refused_with_an_example(written: object) -> None:
    with pytest.raises(OverspillError, match=r"is not a size; write .*40GiB"):
        parse_size(written)


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (40 * 2**30, "40 GiB"), (1023 * 2**20, "1023 MiB"),
     (2**40, "1 TiB"), (-(2**30), "-1 GiB")],
)  # fmt: skip
def test_a_size_is_printed_in_the_unit_that_reads_best(num_bytes: int, shown: str) -> None:
    assert format_size(num_bytes) == shown
