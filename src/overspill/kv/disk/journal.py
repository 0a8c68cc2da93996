"""The journal of a disk folder: which content each place holds, appended after the data was written.

A frame is one append: a header with the number of records and their xxh3, then the records. The first frame that does
not match begins a torn tail, which is dropped. Appends are not fsynced: if a record's data never reached the disk, the
checksum of the data turns the read into a miss.
"""

import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# A block's hash (SHA-256) and its group.
KEY_BYTES = 36
NO_KEY = bytes(KEY_BYTES)

_MAGIC = b"OVERKV01"
_HEADER = struct.Struct("<8s32s24x")
_FRAME = struct.Struct("<4sIQ")
_FRAME_MAGIC = b"OVF1"

Records = npt.NDArray[np.void]


def record_type(world_size: int) -> np.dtype[np.void]:
    """Layout of a record: a place and its content (`NO_KEY` if empty), with a digest of each rank's part."""
    return np.dtype(
        [
            ("key", f"V{KEY_BYTES}"),
            ("parent", f"V{KEY_BYTES}"),
            ("num_tokens", "<u4"),
            ("place", "<u4"),
            ("digests", "<u8", (world_size,)),
        ]
    )


class Journal:
    """An append-only file of frames. `identity` (32 bytes) seeds their checksums: a foreign frame does not match."""

    def __init__(self, path: Path, identity: bytes, world_size: int) -> None:
        self._path = path
        self._identity = identity
        self._type = record_type(world_size)
        self._seed = int.from_bytes(identity[:8], "little")
        self._file = -1
        self._end = 0
        self.num_records = 0

    def open(self) -> Records:
        """Read all records, oldest first, and cut off a torn tail."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        raw = self._read()
        header = _HEADER.pack(_MAGIC, self._identity)
        if raw[: _HEADER.size] != header:
            if raw:
                logger.warning("Overspill: the journal %s is damaged or foreign; KV on disk is dropped", self._path)
            os.ftruncate(self._file, 0)
            self._write(header, 0)
            self._end = _HEADER.size
            return np.zeros(0, self._type)
        records, self._end = self._frames(raw)
        self.num_records = len(records)
        if self._end < len(raw):
            logger.warning(
                "Overspill: the last %d bytes of the journal %s are torn; the KV in them is recomputed",
                len(raw) - self._end, self._path,
            )  # fmt: skip
            os.ftruncate(self._file, self._end)
        return records

    def _read(self) -> bytes:
        parts, at = [], 0
        while part := os.pread(self._file, 1 << 26, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _frames(self, raw: bytes) -> tuple[Records, int]:
        parts, at, size = [], _HEADER.size, self._type.itemsize
        view = memoryview(raw)
        while len(raw) - at >= _FRAME.size:
            magic, count, checksum = _FRAME.unpack_from(raw, at)
            begin = at + _FRAME.size
            payload = view[begin : begin + count * size]
            if magic != _FRAME_MAGIC or len(payload) < count * size or self._checksum(payload) != checksum:
                break
            parts.append(np.frombuffer(payload, self._type))
            at = begin + count * size
        return np.concatenate(parts) if parts else np.zeros(0, self._type), at

    def append(self, records: Records) -> None:
        """Append one frame. Raises OSError if the disk is full, and leaves the journal as it was."""
        frame = self._frame(records)
        try:
            self._write(frame, self._end)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(frame)
        self.num_records += len(records)

    def replace(self, records: Records) -> None:
        """Replace the journal by one that holds only these records."""
        new = self._path.with_suffix(".new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        content = _HEADER.pack(_MAGIC, self._identity) + (self._frame(records) if len(records) else b"")
        try:
            _write_all(file, content, 0)
            os.fsync(file)
            os.replace(new, self._path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._end, self.num_records = file, len(content), len(records)

    def close(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def _frame(self, records: Records) -> bytes:
        payload = records.tobytes()
        return _FRAME.pack(_FRAME_MAGIC, len(records), self._checksum(payload)) + payload

    def _checksum(self, payload: bytes | memoryview) -> int:
        return xxhash.xxh3_64_intdigest(payload, self._seed)

    def _write(self, content: bytes, at: int) -> None:
        _write_all(self._file, content, at)


def _write_all(file: int, content: bytes, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, at)
        at += written
        view = view[written:]
