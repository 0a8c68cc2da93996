"""Logs of engines, be they of a gigabyte: their end, what is searched for, what is added."""

import asyncio
import os
from pathlib import Path

import pytest

from overspill.kv.sizes import MiB
from overspill.manager import logs


def test_the_end_of_a_log_of_a_gigabyte_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.seek(1 << 30)  # a hole: to read it would take seconds
        file.write(b"\n" + b"".join(b"line %d\n" % i for i in range(100_000)))
    read = _bytes_read()
    assert logs.tail(path, 3) == ["line 99997", "line 99998", "line 99999"]
    found = logs.search(path, "LINE 9999", limit=20)
    assert len(found.lines) == 11 and found.lines[0].text == "line 9999" and found.searched_from > 1 << 29
    assert _bytes_read() - read < 80 * MiB
    with path.open("rb") as file:
        file.seek(found.lines[5].offset)
        assert file.readline().decode().rstrip() == found.lines[5].text


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"{'odd' if i % 2 else 'even'} {i}\n" for i in range(20_000)))
    texts, before = [], None
    while before != 0:
        found = logs.search(path, "odd", limit=3000, before=before)
        texts = [line.text for line in found.lines] + texts
        before = found.searched_from
    assert texts == [f"odd {i}" for i in range(1, 20_000, 2)]


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\n\nb", "\n\n", "x" * 200_000 + "\nend", "ä\r\n\xff\n"])
def test_the_end_of_a_log_is_what_reading_all_of_it_says(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    expected = [line.rstrip("\r")[: 16 * 1024] for line in text.split("\n")]
    expected = expected[:-1] if expected[-1] == "" else expected
    assert logs.tail(path, 5) == expected[-5:]
    assert logs.tail(tmp_path / "none") == []


def test_follow_survives_truncation_and_replacement_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")

    async def run() -> list[str]:
        seen = []
        following = logs.follow(path, 10)
        async for lines in following:
            seen += lines
            match seen[-1]:
                case "old":
                    with path.open("a") as file:
                        file.write("new\nhalf")
                case "new":
                    os.truncate(path, 0)
                    await asyncio.sleep(0.6)
                    path.write_text("emptied\n")
                case "emptied":
                    os.replace(path, tmp_path / "log.1")
                    path.write_text("replaced by a longer one\n")
                case _:
                    await following.aclose()
                    return seen
        raise AssertionError("it goes on for ever")

    assert asyncio.run(run()) == ["old", "new", "emptied", "replaced by a longer one"]


def test_an_oversized_log_rotates_while_its_writer_continues(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab") as writer:
        writer.write(b"x" * 99 + b"\n")
        writer.write(b"y" * 99 + b"\n")
        writer.flush()
        assert not logs.limit_size(path, 200)
        assert logs.limit_size(path, 150)
        writer.write(b"after\n")
        writer.flush()
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "log.1").read_bytes() == b"x" * 49 + b"\n" + b"y" * 99 + b"\n"
