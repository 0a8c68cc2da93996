"""Engine logs: the tail, a search backwards from the end, new lines as they come, and a limit on size.

A log may have a gigabyte: nothing here reads a file from its beginning.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from overspill.kv.sizes import MiB

_BLOCK = 64 * 1024
_LONGEST_LINE = 16 * 1024
_POLL_S = 0.25
_SEARCHED_BYTES, _TAIL_BYTES = 64 * MiB, 16 * MiB
LARGEST_BYTES = 64 * MiB


@dataclass(frozen=True, slots=True)
class Line:
    offset: int
    """Byte offset of the line in the file."""
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    lines: list[Line]
    """The last matches, in the order of the file."""
    searched_from: int
    """Offset where the search ended; 0 if the whole file was searched."""


def tail(path: Path, num_lines: int = 200) -> list[str]:
    """The last lines; none if the file does not exist."""
    found: list[str] = []
    for line in _backwards(path, None, _TAIL_BYTES):
        if len(found) == num_lines:
            break
        found.append(line.text)
    return found[::-1]


def last_line(path: Path) -> str:
    """The last line that is not blank; empty if there is none."""
    return next((line.strip() for line in reversed(tail(path)) if line.strip()), "")


def search(path: Path, text: str, *, limit: int = 200, before: int | None = None) -> Found:
    """The last `limit` lines before an offset that contain `text`, ignoring case. At most 64 MiB are searched; pass
    `before=searched_from` to continue from there."""
    wanted, found = text.lower(), list[Line]()
    end = _size(path) if before is None else before
    reached = end
    for line in _backwards(path, end, _SEARCHED_BYTES):
        reached = line.offset
        if wanted in line.text.lower():
            found.append(line)
            if len(found) == limit:
                break
    # No line at all means one that is longer than the searched part.
    return Found(found[::-1], reached if reached < end else max(0, end - _SEARCHED_BYTES))


async def follow(path: Path, num_lines: int = 200) -> AsyncIterator[list[str]]:
    """Yield the last lines, then new ones as they are written, for ever, across truncation and a new file."""
    size, inode = _stat(path)
    yield await asyncio.to_thread(tail, path, num_lines)
    offset, rest = size, b""
    while True:
        await asyncio.sleep(_POLL_S)
        now_size, now_inode = _stat(path)
        if now_inode != inode or now_size < offset:
            inode, offset, rest = now_inode, 0, b""
        if now_size == offset:
            continue
        # A reader that was away for long gets the end, not a gigabyte.
        skipped = max(0, now_size - offset - 16 * _BLOCK)
        data = await asyncio.to_thread(_read, path, offset + skipped, 16 * _BLOCK)
        offset += skipped + len(data)
        *lines, rest = (rest + data if not skipped else data).split(b"\n")
        rest = rest[-_LONGEST_LINE:]
        if lines:
            yield [_text(line) for line in lines]


def limit_size(path: Path, largest_bytes: int = LARGEST_BYTES) -> bool:
    """Rotate a log that is too large to `.1`; True if it was. The file is copied and emptied, not renamed: its writer
    has it open, and appends."""
    if _size(path) <= largest_bytes:
        return False
    old, new = path.with_name(path.name + ".1"), path.with_name(path.name + ".1.new")
    try:
        with path.open("rb") as source, new.open("wb") as target:
            source.seek(max(0, _size(path) - largest_bytes))
            shutil.copyfileobj(source, target, _BLOCK)
        os.replace(new, old)
    except OSError:
        # A full disk is one more reason to empty the log.
        with suppress(OSError):
            new.unlink()
    os.truncate(path, 0)
    return True


def begin(path: Path) -> None:
    """Begin a new log for a new start; the previous one is kept as `.1`."""
    with suppress(FileNotFoundError):
        os.replace(path, path.with_name(path.name + ".1"))


def _backwards(path: Path, end: int | None, most_bytes: int) -> Iterator[Line]:
    """Yield lines from last to first, reading a block at a time and at most `most_bytes` of the file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        position = file.seek(0, os.SEEK_END) if end is None else end
        least = max(0, position - most_bytes)
        rest = b""  # the beginning of a line whose end is already read
        is_last = True
        while position > least:
            size = min(_BLOCK, position - least)
            position -= size
            file.seek(position)
            parts = (file.read(size) + rest).split(b"\n")
            if is_last and parts[-1] == b"":
                parts.pop()
            is_last = False
            # Only the beginning of an endless line is shown.
            rest = parts.pop(0)[: _BLOCK + 2 * _LONGEST_LINE] if parts else b""
            offset = position + len(rest) + 1
            lines = []
            for part in parts:
                lines.append(Line(offset, _text(part)))
                offset += len(part) + 1
            yield from reversed(lines)
        if not least and not is_last:
            yield Line(0, _text(rest))


def _text(line: bytes) -> str:
    return line[:_LONGEST_LINE].decode(errors="replace").rstrip("\r")


def _read(path: Path, offset: int, size: int) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        file.seek(offset)
        return file.read(size)
    return b""


def _size(path: Path) -> int:
    return _stat(path)[0]


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_ino
