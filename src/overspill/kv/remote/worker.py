"""Each worker's transfers between slots of the pool and a Mooncake Store. A call may block for a minute if a server
hangs, so calls run on threads of their own, and a late call is reported before it ends."""

import ctypes
import os
import queue
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from vllm.logger import init_logger

from overspill.kv.errors import OverspillError
from overspill.kv.host_memory import Checksums, HostMemory, Verdict
from overspill.kv.jobs import RemoteJob, RemoteResult, StepReport
from overspill.kv.metrics import OverspillStats
from overspill.kv.sizes import MiB

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only

# Bytes per call: enough to be efficient, and a fraction of the deadline on a slow network.
_CALL_BYTES = 8 * MiB
# Mooncake spins while it waits: a hanging store keeps this many cores busy for a minute.
_GET_THREADS = 2
# A call older than this is late even if other calls make progress.
_MOST_S = 20.0
# Mooncake gives up a transfer after 60 s without cancelling it: bytes may still arrive in its slots.
_GIVEN_UP_S = 50.0
_RETRY_S = 5.0
_TRY_S = 20.0
_CLOSE_S = 2.0
_TRAILER_BYTES = 16
_MISSING = -704
_SO_ATTACH_FILTER, _BPF_RETURN = 26, 6
# Bounds for calls to a hanging master, and quiet logs. Mooncake reads these when a client is created.
_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "1000", "MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_LOG_LEVEL": "ERROR",
    "MC_YLT_LOG_LEVEL": "error",
}  # fmt: skip
# Mooncake's setup holds the GIL until the master answers, so a child process tries it first.
_TRY = """
import sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
sys.exit(client.setup(sys.argv[1], "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[2]) != 0 or client.health_check() != 0)
"""


def split_address(remote: str) -> tuple[str, int]:
    host, _, port = remote.removeprefix("mooncake://").rpartition(":")
    return host, int(port)


class Client:
    """A Mooncake client that contributes no memory to the store, and so refuses all incoming connections."""

    def __init__(self, remote: str, memory: HostMemory) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise OverspillError(
                f"remote needs Mooncake, which cannot be loaded: {error}. Install overspill[mooncake], and libibverbs1 "
                "of the system"
            ) from error
        self._make, self._memory = MooncakeDistributedStore, memory
        self.address = self._host, self._port = split_address(remote)
        self.trailers = np.zeros((memory.num_slots, _TRAILER_BYTES), np.uint8)
        self._client: Any = None
        self._stop = threading.Event()
        self.first_try = threading.Event()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        threading.Thread(target=self._connect, name="overspill-remote-connect", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    def _connect(self) -> None:
        failed = False
        while not self._stop.is_set():
            try:
                self._client = self._set_up()
            except (OSError, OverspillError, subprocess.TimeoutExpired) as error:
                if not failed:
                    logger.warning(
                        "Overspill: the store at %s:%d cannot be reached: %s. It is tried again every %.0f s.",
                        self._host, self._port, error, _RETRY_S,
                    )  # fmt: skip
                failed = True
                self.first_try.set()
                self._stop.wait(_RETRY_S)
            else:
                logger.info("Overspill: KV is shared through the store at %s:%d", self._host, self._port)
                self.first_try.set()
                return

    def _set_up(self) -> Any:
        with socket.create_connection((self._host, self._port), timeout=1) as towards:
            own = str(towards.getsockname()[0])  # loopback if the master runs on this machine
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", own)
        master = f"{self._host}:{self._port}"
        command = [sys.executable, "-c", _TRY, own, master]
        tried = subprocess.run(command, check=False, capture_output=True, timeout=_TRY_S)
        if tried.returncode:
            raise OverspillError("its master does not answer")
        client, before = self._make(), set(_listening())
        if client.setup(own, "P2PHANDSHAKE", 0, 0, "tcp", "", master) != 0:
            raise OverspillError("its master does not answer")
        # Mooncake listens on all interfaces, and any peer that connects may read and write registered memory.
        for descriptor in set(_listening()) - before:
            _refuse_connections(descriptor)
        for address, length in (
            (self._memory.address, self._memory.num_bytes),
            (self.trailers.ctypes.data, self.trailers.nbytes),
        ):
            if (code := client.register_buffer(address, length)) != 0:
                raise OverspillError(f"Mooncake refused to register the pool ({code})")
        return client

    def find(self, keys: list[str]) -> list[int]:
        return list(self._client.batch_is_exist(keys)) if self._client is not None else []

    def get(self, keys: list[str], slots: Sequence[int]) -> list[int]:
        if self._client is None:
            return []
        return list(self._client.batch_get_into_multi_buffers(keys, *self._places(slots)))

    def put(self, keys: list[str], slots: Sequence[int]) -> list[int]:
        if self._client is None:
            return []
        return list(self._client.batch_put_from_multi_buffers(keys, *self._places(slots)))

    def _places(self, slots: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        memory, trailers = self._memory, self.trailers.ctypes.data
        starts = [[memory.address + slot * memory.slot_stride, trailers + slot * _TRAILER_BYTES] for slot in slots]
        return starts, [[memory.slot_bytes, _TRAILER_BYTES]] * len(slots)

    @property
    def value_bytes(self) -> int:
        return self._memory.slot_bytes + _TRAILER_BYTES

    def close(self) -> None:
        """Disconnect from the store; no call may be in flight."""
        self._stop.set()
        if self._client is not None:
            self._client.close()
            self._client = None


def _listening() -> list[int]:
    """File descriptors of this process that listen for connections."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.append(descriptor)
    return found


def _refuse_connections(descriptor: int) -> None:
    """Attach a socket filter that drops every packet: the listener cannot be closed under Mooncake's threads."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0), 8)
    with socket.socket(fileno=os.dup(descriptor)) as one:
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


class _Threads:
    """A pool of daemon threads: a hanging call must not keep the process from exiting."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((future, call))
        return future

    def close(self, deadline: float) -> bool:
        """Stop the threads; True if all calls ended by the deadline."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


@dataclass(slots=True)
class _Call:
    job: RemoteJob
    began: float
    parts: list[Future[RemoteResult]] = field(default_factory=list)
    is_late: bool = False

    def done(self) -> bool:
        return all(part.done() for part in self.parts)


class RemoteWorker:
    """One rank's calls to the store."""

    def __init__(self, remote: str, memory: HostMemory, checksums: Checksums, rank: int, world_size: int) -> None:
        self.client = Client(remote, memory)
        self._memory, self._checksums, self._rank = memory, checksums, rank
        self._rank_name = f"{rank}-of-{world_size}"
        self._finds = _Threads(1, "overspill-remote-find")
        self._gets = _Threads(_GET_THREADS, "overspill-remote-get")
        self._puts = _Threads(1, "overspill-remote-put")
        self._calls: list[_Call] = []
        self._progress = 0.0  # when a find or get last ended
        self._has_failed = False

    @property
    def is_reading(self) -> bool:
        return any(call.job.kind != "store" and not call.is_late and not call.done() for call in self._calls)

    @property
    def is_writing(self) -> bool:
        """Whether a put or a late call is in flight, for which no request waits."""
        return any((call.job.kind == "store" or call.is_late) and not call.done() for call in self._calls)

    @property
    def has_done(self) -> bool:
        """Whether a call has ended or become late since the last report."""
        return any(call.done() or self._is_due(call) for call in self._calls)

    def start(self, job: RemoteJob) -> None:
        call, positions = _Call(job, time.monotonic()), range(len(job.keys))
        self._calls.append(call)
        if job.kind == "find":
            call.parts.append(self._finds.submit(lambda: self._find(job)))
            return
        most = max(1, _CALL_BYTES // self._memory.slot_stride)
        pieces = [positions[first : first + most] for first in range(0, len(positions), most)]
        # Check the slots: damage in RAM must not reach the store, where it would get a digest that matches.
        verdict = self._checksums.check(job.slots) if job.kind == "store" else None
        for piece in pieces:
            if verdict is None:
                call.parts.append(self._gets.submit(lambda piece=piece: self._get(job, piece)))  # type: ignore[misc]
            else:
                call.parts.append(
                    self._puts.submit(lambda piece=piece: self._put(job, piece, verdict))  # type: ignore[misc]
                )

    def _name(self, job: RemoteJob, position: int) -> str:
        return f"{job.prefix}/{self._rank_name}/{job.keys[position].hex()}"

    def _find(self, job: RemoteJob) -> RemoteResult:
        began = time.monotonic()
        codes = self.client.find([self._name(job, position) for position in range(len(job.keys))])
        missing = [position for position in range(len(job.keys)) if codes[position : position + 1] != [1]]
        ended = self._progress = time.monotonic()
        return RemoteResult(missing, failed=not codes or any(code < 0 for code in codes), seconds=ended - began)

    def _get(self, job: RemoteJob, positions: Sequence[int]) -> RemoteResult:
        began = time.monotonic()
        names, slots = [self._name(job, position) for position in positions], [job.slots[p] for p in positions]
        codes = self.client.get(names, slots)
        result = RemoteResult([], failed=not codes or any(code < 0 and code != _MISSING for code in codes))
        for i, (position, slot) in enumerate(zip(positions, slots)):
            if codes[i : i + 1] != [self.client.value_bytes]:
                result.bad.append(position)
            elif not self._is_intact(names[i], slot):
                result.bad.append(position)
                result.corrupt += 1
        ended = self._progress = time.monotonic()
        result.seconds = ended - began
        result.lost = result.failed and result.seconds > _GIVEN_UP_S
        return result

    def _is_intact(self, name: str, slot: int) -> bool:
        digest = self._checksums.digest(slot)
        if self.client.trailers[slot].tobytes() != _trailer(name, digest):
            return False
        self._checksums.note(slot, digest)
        return True

    def _put(self, job: RemoteJob, positions: Sequence[int], verdict: Verdict) -> RemoteResult:
        began = time.monotonic()
        corrupt = set(job.slots) if verdict.error() is not None else set(verdict.corrupt_slots())
        sound = [position for position in positions if job.slots[position] not in corrupt]
        names, slots = [self._name(job, position) for position in sound], [job.slots[p] for p in sound]
        for name, slot in zip(names, slots):
            self.client.trailers[slot] = np.frombuffer(_trailer(name, self._checksums.digest(slot)), np.uint8)
        codes = self.client.put(names, slots) if names else []
        stored = {position for position, code in zip(sound, codes) if code == 0}
        bad = [position for position in positions if position not in stored]
        return RemoteResult(bad, failed=len(stored) < len(sound), seconds=time.monotonic() - began)

    def _is_due(self, call: _Call) -> bool:
        """Whether the call has become late and was not reported yet. A call queued behind others that make progress is
        not late."""
        now, since = time.monotonic(), max(call.began, self._progress)
        is_over_time = now - since > call.job.patience_s or now - call.began > _MOST_S
        return is_over_time and not call.is_late and not call.done()

    def poll(self, report: StepReport, stats: OverspillStats) -> None:
        """Add calls that have ended or become late to the report."""
        for call in self._calls:
            if self._is_due(call):
                call.is_late = True
                report.remote_late.add(call.job.job_id)
        done = [call for call in self._calls if call.done()]
        self._calls = [call for call in self._calls if call not in done]
        for call in done:
            result = self._result(call)
            report.remote.setdefault(call.job.job_id, {})[self._rank] = result
            num_bytes = (len(call.job.slots) - len(result.bad)) * self._memory.slot_bytes
            stats.count("remote_corrupt_blocks", result.corrupt)
            if call.job.kind == "load":
                stats.count("remote_load_bytes", num_bytes)
                if not result.bad:
                    report.remote_speed.add(num_bytes, time.monotonic() - call.began)
            elif call.job.kind == "store":
                stats.count("remote_store_bytes", num_bytes)

    def _result(self, call: _Call) -> RemoteResult:
        whole = RemoteResult([])
        for part in call.parts:
            if (error := part.exception()) is not None:
                # Any of its blocks may be bad.
                whole.add(RemoteResult(list(range(len(call.job.keys))), failed=True))
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning(
                        "Overspill: a call of the store failed: %s. Later errors are counted only.", repr(error)
                    )
            else:
                whole.add(part.result())
        return whole

    def close(self) -> bool:
        """Stop all threads; False if a call is still running, in which case the pool must stay mapped."""
        deadline = time.monotonic() + _CLOSE_S
        ended = [threads.close(deadline) for threads in (self._finds, self._gets, self._puts)]
        if all(ended):
            self.client.close()
        return all(ended)


def _trailer(name: str, digest: int) -> bytes:
    """Checksum stored behind every block; it covers the key, so that content of another key is rejected too."""
    return xxhash.xxh3_128_digest(name.encode() + digest.to_bytes(8, "little"))
