"""The parts of the disk tier: index, journal, folder, digests and segments, without an engine."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.kv.disk.folder import Folder, clear_folder, default_folder, kept_in
from overspill.kv.disk.index import DiskIndex, Entry
from overspill.kv.disk.journal import KEY_BYTES, Journal, record_type
from overspill.kv.disk.key import Digests, content_key, identity_of
from overspill.kv.disk.segments import DiskWorker, segment_path
from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import Checksums, HostMemory
from overspill.kv.jobs import DiskReadJob, DiskWriteJob, StepReport
from overspill.kv.metrics import OverspillStats

IDENTITY = bytes(range(32))


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def put(index: DiskIndex, number: int, parent: int | None = None) -> Entry:
    (place,) = index.take(1)
    entry = Entry(key(number), None if parent is None else key(parent), 32, place, (number * 7,))
    index.put([entry])
    return entry


# The index.


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    index = DiskIndex(4, 1)
    for number in (1, 2, 3, 4):
        put(index, number, number - 1 or None)
    put(index, 10)
    assert key(4) not in index and all(key(number) in index for number in (1, 2, 3, 10))


def test_a_used_prefix_outlives_an_unused_one() -> None:
    index = DiskIndex(2, 1)
    put(index, 1)
    put(index, 2)
    index.use([key(1)])
    put(index, 3)
    assert key(1) in index and key(2) not in index


def test_content_being_read_is_not_overwritten() -> None:
    index = DiskIndex(2, 1)
    first, second = put(index, 1), put(index, 2)
    index.hold([first.place, second.place])
    assert index.take(1) == []
    index.release([second.place])
    assert index.take(2) == [second.place]
    assert key(1) in index


def test_a_full_disk_keeps_what_fits() -> None:
    index = DiskIndex(8, 1)
    for number in range(1, 5):
        put(index, number)
    taken = index.take(2)
    index.limit(4)
    index.give_back(taken)
    assert len(index) == 4
    assert put(index, 9).place < 4


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("putuseremoveholdcrash"), st.integers(1, 12), st.integers(0, 12))))
def test_the_index_and_its_journal_agree_after_any_history(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain model: a key is where it was put last, no place has two keys, and the journal brings it back."""
    index, written = DiskIndex(5, 1), np.zeros(0, record_type(1))
    digests: dict[int, int] = {}  # what the place really holds
    for step, number, parent in steps:
        if step in "puti" and key(number) not in index:
            places = index.take(1)
            for place in places:
                digests[place] = number
                entry = Entry(key(number), key(parent) if parent else None, 32, place, (number,))
                written = np.concatenate([written, index.put([entry])])
        elif step in "use":
            index.use([key(number)])
        elif step in "removh" and (record := index.remove(key(number))) is not None:
            written = np.concatenate([written, record])
        elif step in "crash":
            index = DiskIndex.load(written, 5, 1)
        found = index.find([key(i) for i in range(1, 13)])
        assert len(found) == len(index) <= 5
        assert len({entry.place for entry in found}) == len(found)
        for entry in found:
            assert entry.digests == (digests[entry.place],) and key(entry.digests[0]) == entry.key
    again = DiskIndex.load(written, 5, 1)
    assert {i for i in range(1, 13) if key(i) in again} == {i for i in range(1, 13) if key(i) in index}
    assert sorted(again.take(5 - len(again))) == sorted(index.take(5 - len(index)))


def test_a_lower_bound_forgets_places_beyond_it() -> None:
    index = DiskIndex(6, 1)
    records = np.concatenate([index.put([Entry(key(i), None, 1, p, (1,))]) for i, p in enumerate(index.take(6), 1)])
    assert len(DiskIndex.load(records, 4, 1)) == 4


# The journal.


def records(*numbers: int) -> np.ndarray:
    made = np.zeros(len(numbers), record_type(1))
    for i, number in enumerate(numbers):
        made[i] = (key(number), key(0), 32, number, (number,))
    return made


def numbers(path: Path, identity: bytes = IDENTITY) -> list[int]:
    journal = Journal(path, identity, 1)
    found = [int(place) for place in journal.open()["place"]]
    journal.close()
    return found


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    journal = Journal(path, IDENTITY, 1)
    journal.open()
    journal.append(records(1, 2))
    journal.append(records(3))
    journal.append(records(4, 5, 6))
    journal.close()
    return path


def test_a_torn_journal_keeps_whole_frames_wherever_it_is_cut(written: Path) -> None:
    whole = written.read_bytes()
    expected = {0: [], 1: [1, 2], 2: [1, 2, 3], 3: [1, 2, 3, 4, 5, 6]}
    seen = set()
    for length in range(len(whole) + 1):
        written.write_bytes(whole[:length])
        found = numbers(written)
        assert found in expected.values()
        seen.add(tuple(found))
        journal = Journal(written, IDENTITY, 1)
        journal.open()
        journal.append(records(7))
        journal.close()
        assert numbers(written) == [*found, 7], f"cut at {length}, an append was lost"
    assert len(seen) == 4


def test_a_flipped_byte_in_the_journal_drops_what_follows(written: Path) -> None:
    whole = written.read_bytes()
    for at in range(0, len(whole), 5):
        written.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        found = numbers(written)
        assert found == [1, 2, 3, 4, 5, 6][: len(found)]
        # Bytes that pad the header are the only ones without a meaning.
        assert len(found) < 6 or 40 <= at < 64


def test_a_journal_of_another_key_is_empty(written: Path) -> None:
    assert numbers(written, bytes(32)) == []


def test_a_rewritten_journal_holds_only_what_is_valid(written: Path) -> None:
    journal = Journal(written, IDENTITY, 1)
    journal.open()
    journal.replace(records(9))
    journal.append(records(10))
    journal.close()
    assert numbers(written) == [9, 10]


# The folder.


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    first = Folder(tmp_path / "kv")
    with pytest.raises(OverspillError, match="in use by another server; stop it, or give this one a disk_path"):
        Folder(tmp_path / "kv")
    with pytest.raises(OverspillError, match="in use by another server"):
        clear_folder(tmp_path / "kv")
    first.close()
    Folder(tmp_path / "kv").close()


def test_a_folder_is_its_owners_only(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    folder = Folder(tmp_path / "kv")
    own = folder.open(IDENTITY, {"weights": "a"})
    assert (tmp_path / "kv").stat().st_mode & 0o777 == own.stat().st_mode & 0o777 == 0o700
    folder.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OverspillError, match=r"KV cannot be kept on disk at .*give another disk_path"):
        Folder(tmp_path / "file" / "kv")


def test_kv_of_other_keys_makes_room_oldest_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    paths = [folder.open(bytes([i]) * 32, {"weights": str(i)}) for i in range(3)]
    for age, path in enumerate(paths):
        (path / "segment").write_bytes(bytes(1 << 20))
        (path / "journal").write_bytes(b"")
        os.utime(path / "journal", (1000 + age, 1000 + age))
    sizes = [kept.num_bytes for kept in kept_in(tmp_path)]
    left = folder.trim(paths[2], 0, sizes[1] + sizes[2])
    assert [path.exists() for path in paths] == [False, True, True]
    assert left == sizes[1]
    folder.close()
    assert clear_folder(tmp_path) == sum(sizes[1:])
    assert kept_in(tmp_path) == []


def test_a_models_name_stays_inside_the_cache_folder(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    for name in ("../../etc", "/models/Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "..", "a\n/b\0c", ""):
        folder = default_folder(name, environ)
        assert folder.parent == tmp_path / "overspill/kv"
        assert folder.name not in ("", ".", "..")
    assert default_folder("Qwen/Qwen3-8B", environ).name == "Qwen-Qwen3-8B"


# Keys.


def test_digests_follow_content_not_names(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"one")
    (tmp_path / "b.safetensors").write_bytes(b"two")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    before = Digests(tmp_path / "digests.json").of(files)
    assert Digests(tmp_path / "digests.json").of(reversed(files)) == before
    (tmp_path / "a.safetensors").write_bytes(b"eno")
    assert Digests(tmp_path / "digests.json").of(files) != before


def test_known_digests_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"one")
    before = Digests(tmp_path / "digests.json").of([file])
    file.chmod(0)
    monkeypatch.setattr(Digests, "_digest", lambda self, file: pytest.fail("read again"))
    assert Digests(tmp_path / "digests.json").of([file]) == before


def test_reading_weights_ends_with_the_engine(tmp_path: Path) -> None:
    file, stop = tmp_path / "a.safetensors", threading.Event()
    file.write_bytes(b"one")
    stop.set()
    with pytest.raises(OverspillError, match="stopped before all weights were read"):
        Digests(tmp_path / "digests.json", stop).of([file])
    assert not (tmp_path / "digests.json").exists()


def test_every_fact_and_adapter_makes_another_key() -> None:
    assert identity_of({"weights": "a", "ranks": 1}) != identity_of({"weights": "b", "ranks": 1})
    plain = key(5)
    assert content_key(plain, b"") == plain
    assert len({content_key(plain, b""), content_key(plain, b"a"), content_key(plain, b"b")}) == 3
    assert all(len(content_key(plain, adapter)) == KEY_BYTES for adapter in (b"", b"a"))


# Segments.


class Disk:
    """A worker's end of the disk, over memory of its own."""

    def __init__(self, folder: Path, *, slots: int = 16, num_places: int = 64) -> None:
        self.memory = HostMemory(slots, 5000)
        self.checksums = Checksums(self.memory, "all")
        self.worker = DiskWorker(self.memory, self.checksums, 0, num_places)
        self.folder = folder
        for slot in range(slots):
            self.memory.slots[slot] = slot + 1
        self.checksums.record(range(slots))

    def write(self, slots: list[int], places: list[int]) -> tuple[list[int | None], StepReport]:
        report = StepReport()
        self.worker.write_now(DiskWriteJob(1, str(self.folder), slots, places), report)
        return report.disk_written[1][0], report

    def read(self, places: list[int], slots: list[int], digests: list[int]) -> list[int]:
        self.worker.read(DiskReadJob(2, str(self.folder), places, slots, [digests]))
        report = StepReport()
        while not report.disk_read:
            self.worker.poll(report, OverspillStats())
        return report.disk_read[2][0]

    def close(self) -> None:
        self.worker.close()
        self.checksums.close()
        self.memory.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.close()


def test_blocks_come_back_from_scattered_places(disk: Disk) -> None:
    slots, places = [0, 1, 2, 3, 4, 5, 6], [9, 3, 4, 60, 5, 63, 0]
    digests, _ = disk.write(slots, places)
    disk.memory.slots[:] = 0
    assert disk.read(places[::-1], [8, 9, 10, 11, 12, 13, 14], digests[::-1]) == []
    assert [int(disk.memory.slots[slot][4999]) for slot in range(8, 15)] == [7, 6, 5, 4, 3, 2, 1]


def test_damaged_missing_and_foreign_blocks_are_found_out(disk: Disk) -> None:
    digests, _ = disk.write([0, 1, 2], [0, 1, 2])
    path = segment_path(disk.folder, 0, 0)
    with path.open("r+b") as file:
        file.seek(1 * 8192 + 4999)
        file.write(b"\xff")
    assert disk.read([0, 1, 2], [5, 6, 7], digests) == [1]
    assert disk.read([0, 2, 1], [5, 6, 7], digests) == [1, 2]  # another place's content
    disk.worker._segments.close()
    os.truncate(path, 8192)
    assert disk.read([0, 1, 2], [5, 6, 7], digests) == [0, 1, 2]  # one system call for all three fails as one
    disk.worker._segments.close()
    path.unlink()
    assert disk.read([0], [5], digests[:1]) == [0]


def test_a_block_damaged_in_ram_is_not_written_as_sound(disk: Disk) -> None:
    assert disk.checksums.check(range(2)).corrupt_slots() == []  # they are recorded by now
    disk.memory.slots[1][17] ^= 1
    digests, _ = disk.write([0, 1], [0, 1])
    assert digests[0] is not None and digests[1] is None


def test_a_disk_without_room_says_where_it_ends(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.kv.disk.segments.SEGMENT_BYTES", 8 * 8192)
    disk.worker._segments = None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    disk.write([0], [0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 8192, hard))
    try:
        digests, report = disk.write([1, 2], [8, 1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert digests[0] is None and digests[1] is not None
    assert report.disk_full_at == 8
    assert not segment_path(disk.folder, 0, 1).exists()


def test_the_old_places_of_a_full_segment_stay_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`disk_bytes` was raised, but the disk has no room for the rest of the last segment."""
    smaller = Disk(tmp_path, num_places=4)
    smaller.write([0, 1], [0, 1])
    smaller.close()

    def refuse(file: int, at: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("overspill.kv.disk.segments.os.posix_fallocate", refuse)
    larger = Disk(tmp_path, num_places=8)
    digests, report = larger.write([2, 3, 4], [2, 3, 4])
    assert digests == [None] * 3 and report.disk_full_at == 4
    digests, report = larger.write([2, 3], [2, 3])
    assert None not in digests and report.disk_full_at is None
    larger.close()


def test_a_folder_that_cannot_be_made_fails_the_write(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", refuse)
        digests, _ = disk.write([0, 1], [0, 1])
        assert digests == [None, None]
        assert disk.read([0], [5], [1]) == [0]
    digests, _ = disk.write([0, 1], [0, 1])
    assert None not in digests


def test_a_filesystem_without_direct_io_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr("overspill.kv.disk.segments.os.open", refuse)
    disk = Disk(tmp_path)
    digests, _ = disk.write([0, 1], [0, 1])
    assert disk.read([0, 1], [5, 6], digests) == []
    disk.close()
