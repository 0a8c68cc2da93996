"""One engine: a task without locks that looks at the processes, compares with the wish, and takes the next step."""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overspill.kv.ledger import Account
from overspill.manager import logs
from overspill.manager.backend import Backend, EngineProcess, identify
from overspill.manager.errors import StartFailed
from overspill.manager.needs import NOTHING, Memory, gpus_of, holds_of, on_gpus
from overspill.manager.records import Past, Record, Records, end_killed_run, file_name, how_it_ended
from overspill.manager.states import Seen, State, Step, Timing, Wanted, decide
from overspill.processes import listeners, signal_name
from overspill.registry import Registry, RegistryError
from overspill.serve.control import HEADER, PATH, secret_of
from overspill.serve.status import Status, last_start, leave_reason, take_reason
from overspill.upstream import Upstream, address, read_names

logger = logging.getLogger(__name__)

_FAILURE_LINES = 12
_LAUNCHES = 3
_LEAST_FREE_BYTES = 64 * 1024
# Messages of `overspill serve` and vLLM.
_PORT_TAKEN = re.compile(r"port \d+ is in use|took the port meanwhile|[Aa]ddress already in use")
_SAID_ERROR = re.compile(r"^(?:overspill: )?error: (?P<said>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    reason: str
    log_lines: tuple[str, ...]
    at: float
    """Time of the failure on the monotonic clock."""
    count: int
    """Number of failures in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Surroundings shared by all engines."""

    backend: Backend
    folder: Path
    records: Records[Record]
    pasts: Records[Past]
    upstream: Upstream
    timing: Timing
    registry: Registry
    changed: Callable[["Engine"], None]


@dataclass(eq=False, slots=True)
class Engine:
    name: str
    world: World
    wanted: Wanted = Wanted.DOWN
    state: State = State.STOPPED
    since: float = field(default_factory=time.time)
    ready_since: float | None = None
    """Time on the monotonic clock, like the next two."""
    ended_at: float = float("-inf")
    last_used: float = float("-inf")
    last: Record | None = None
    """Record of the running process, or of the last one."""
    is_managed: bool = False
    status: Status | None = None
    served: tuple[str, ...] = ()
    failure: Failure | None = None
    stop_reason: str = ""
    """Why the engine is being or was last stopped; shown to requests that the stop cuts off."""
    in_flight: int = 0
    held: int = 0
    """Number of users, such as measurements, that forbid stopping the engine for another model."""
    is_draining: bool = False
    is_leaving: bool = False
    """Whether the engine drains because somebody stops it, and so takes no new requests."""
    start_s: float | None = None
    """Duration of the last successful start, as kept by `overspill serve`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Model settings to start the engine with."""
    holds: Memory = NOTHING
    """Memory held now; less while parked."""
    account: Account | None = None
    """Row of an elastic engine's KV in the GPU's ledger; while parked, the row from before."""
    refusal: str = ""
    """Why the last attempt to park or wake the engine failed; empty if it did not."""
    refused_at: float = float("-inf")
    _takes: Memory = NOTHING
    """Memory held while awake, by the plan."""
    _freed: Memory = NOTHING
    """Memory freed by the last park, as the engine reported it."""
    _is_parked: bool = False
    _knows_parked: bool = False
    _stops_instead: bool = False
    _process: EngineProcess | None = None
    _child: "subprocess.Popen[bytes] | None" = None
    _handle: int | None = None
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None
    _launches: int = 0
    _failures: int = 0
    _answered_at: float | None = None
    _launched_at: float = float("-inf")
    _root_gone_at: float | None = None
    _scanned_at: float = float("-inf")
    _is_launching: bool = False
    _is_ending: bool = False
    _past: Past | None = None
    _was_asked_to_end: bool = False

    # Wishes: none of them waits, and each may be repeated.

    def want_up(self, settings: dict[str, Any], takes: Memory) -> None:
        if self.wanted is Wanted.UP and not self._is_ending:
            return
        self.wanted, self.settings, self._takes = Wanted.UP, settings, takes
        self.holds = takes
        self.failure, self.stop_reason, self._launches = None, "", 0
        self.is_managed = True
        self._observe_wish()

    def want_awake(self) -> None:
        """Wake a parked engine."""
        self.wanted, self.stop_reason, self.refusal, self.holds = Wanted.UP, "", "", self._awake_takes
        self._observe_wish()

    def want_parked(self, reason: str, *, or_stop: bool) -> None:
        """Park a ready engine; with `or_stop`, stop it if parking fails."""
        logger.info("Overspill: %s is being parked: %s", self.name, reason)
        self.wanted, self.stop_reason, self.refusal, self._stops_instead = Wanted.PARKED, reason, "", or_stop
        self._observe_wish()

    def want_down(self, reason: str) -> None:
        if self.wanted is Wanted.DOWN and self.failure is None:
            return
        if self.wanted is not Wanted.DOWN:
            logger.info("Overspill: %s is being stopped: %s", self.name, reason)
        self.wanted, self.failure, self.stop_reason = Wanted.DOWN, None, reason
        self._observe_wish()

    def remember(self, past: Past) -> None:
        """Restore the state that an earlier manager left; to be called before anything else is known."""
        self._past, self.start_s = past, last_start(self.name).seconds
        if past.state == State.FAILED:
            self.failure = Failure(reason=past.error, log_lines=past.log_lines, at=time.monotonic(), count=0)
            self.state, self.since = State.FAILED, past.since
        elif past.state == State.STOPPED:
            self.stop_reason, self.since = past.stop_reason, past.since

    def _leave_past(self) -> None:
        failure = self.failure
        past = Past(
            name=self.name, state=str(self.state), since=self.since, stop_reason=self.stop_reason,
            pid=self.record.pid if self.record is not None else None,
            error=failure.reason if failure is not None else "",
            log_lines=failure.log_lines if failure is not None else (),
        )  # fmt: skip
        try:
            self.world.pasts.write(self.name, past)
        except OSError as error:  # a full disk: the next manager shows less
            logger.warning("Overspill: the state of %s cannot be saved: %s", self.name, error)

    def adopt(self, record: Record, *, is_managed: bool) -> None:
        """Take over a running process that was found, unless the engine has one already."""
        if self._process is not None:
            return
        self._take(EngineProcess(record.identity), None, record)
        self.wanted, self.is_managed, self.failure, self.stop_reason = Wanted.UP, is_managed, None, ""
        self.settings, self.holds, self._takes = record.settings, record.holds, record.holds
        self._observe_wish()

    def update(self, status: Status | None) -> None:
        """Apply the engine's current status file."""
        if status == self.status:
            return
        self.status = status
        if status is not None:
            if self.last is not None and self.last.log_file is None:
                self.last = replace(self.last, log_file=status.log_file)
            if status.plan:
                self._takes = holds_of(status.plan)
                self._recount()
            if status.session is not None and self._process is not None:
                self._process.sessions.add(status.session)
            if self.record is not None and self.record.url is None:
                self._woken.set()
        self._publish()

    def follow(self, account: Account | None) -> None:
        """Apply the engine's current row of the GPU's ledger."""
        is_parked = account is not None and not account.held
        if account != self.account and not is_parked:
            self.account = account
            self._recount()

    def _recount(self) -> None:
        if self._process is not None:
            self.holds = self._awake_takes - self._freed if self._is_parked else self._awake_takes

    @property
    def _awake_takes(self) -> Memory:
        """Planned memory, adjusted to the KV that an elastic engine holds or may take by now."""
        if self.account is None or self.status is None:
            return self._takes
        grown = self._kv_bytes - int(self.status.plan.get("resident_kv_bytes") or 0)
        return self._takes + on_gpus(grown, self.gpus)

    @property
    def could_release(self) -> Memory:
        """KV memory that an elastic engine gives back when others need it."""
        if self.account is None or not self.is_sharing or self.is_draining:
            return NOTHING
        return on_gpus(max(0, self._kv_bytes - self.account.floor), self.gpus)

    @property
    def promised(self) -> Memory:
        """KV memory that the engine was granted and has not taken yet."""
        if self.account is None or not self.is_sharing:
            return NOTHING
        return on_gpus(self._kv_bytes - self.account.held, self.gpus)

    @property
    def _kv_bytes(self) -> int:
        """Bytes of KV that the engine holds, or was granted and may take at any moment."""
        return max(self.account.held, self.account.granted) if self.account is not None else 0

    @property
    def gpus(self) -> list[int]:
        """GPU index of each rank."""
        return gpus_of(self.status.plan if self.status is not None else {})

    @property
    def is_sharing(self) -> bool:
        """Whether the engine's KV follows the manager's grants; a measured engine is left undisturbed."""
        return self.account is not None and self.state is State.READY and not self.held

    def is_taking_memory(self, accounts: Collection[Account]) -> bool:
        """Whether the engine starts or wakes, is about to, or was just woken and its ledger row is not current yet."""
        if self.state is State.READY:
            return self.account is not None and self.account not in accounts
        return self.state is State.STARTING or self.wanted is Wanted.UP

    @property
    def record(self) -> Record | None:
        """Record of the running process."""
        return self.last if self._process is not None else None

    @property
    def url(self) -> str | None:
        """Address from the status file, since flags may switch TLS on; before that, the address given at launch."""
        reported = self.status.url if self.status is not None else None
        return reported or (self.record.url if self.record is not None else None)

    @property
    def log_file(self) -> Path:
        return Path(self.last.log_file) if self.last is not None and self.last.log_file is not None else self.own_log

    @property
    def own_log(self) -> Path:
        """Log of processes that this manager starts."""
        return self.world.folder / "logs" / f"{file_name(self.name)}.log"

    @property
    def log_hint(self) -> str:
        """Hint on where the last process logs; empty if the log file is known."""
        if self.last is None or self.last.log_file is not None:
            return ""
        if self.last.journal is not None:
            return f"systemd keeps the log of {self.last.unit or self.name}; see: {self.last.journal}"
        return (
            f"{self.name} was started outside the manager, and its log is wherever it was started; to see it here "
            "too, use overspill serve --log-file FILE"
        )

    @property
    def starting_s(self) -> float:
        """Seconds since the launch while the engine starts, else 0."""
        return time.monotonic() - self._launched_at if self.state is State.STARTING and self.has_process else 0.0

    @property
    def can_park(self) -> bool:
        return self.status is not None and self.status.can_park and self.has_process

    @property
    def parking_frees(self) -> Memory:
        """Memory that parking frees: as measured the last time, or else by what the workers report holding."""
        if self._freed != NOTHING and (self._is_parked or self.account is None):
            return self._freed
        memory = self.status.memory if self.status is not None else None
        if memory is None:
            return NOTHING
        kv_bytes = memory.resident_kv_bytes if self.account is None else self.account.held
        return self._on_device(sum(part or 0 for part in (memory.weights_bytes, kv_bytes, memory.window_bytes)))

    def _on_device(self, num_bytes: int) -> Memory:
        """Memory for bytes of all ranks; on a CPU it is RAM, and KV that engines share is counted as GPU 0's."""
        if self.account is not None and self.status is not None and self.status.plan.get("device") == "cpu":
            shared = min(num_bytes, self.account.held)
            return on_gpus(shared, ram_bytes=num_bytes - shared)
        return on_gpus(num_bytes // len(self.gpus), self.gpus) if self._takes.gpu_bytes else Memory(ram_bytes=num_bytes)

    @property
    def has_process(self) -> bool:
        return self._process is not None

    @property
    def retry_after_s(self) -> float:
        """Seconds until a request may start the engine again after a failure."""
        if self.failure is None:
            return 0.0
        return max(0.0, self.failure.at + self.world.timing.back_off(self.failure.count) - time.monotonic())

    def run(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._live(), name=f"engine {self.name}")

    async def leave(self) -> None:
        """Stop watching the engine, which keeps running."""
        while self._is_launching:  # a process without a record would be lost
            await asyncio.sleep(0.01)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._forget_handle()
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0  # nobody waits for this child any more

    async def until(self, *states: State) -> State:
        while self.state not in states:
            self._changed.clear()
            await self._changed.wait()
        return self.state

    # The loop

    async def _live(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._step(await self._look())
            except OSError as error:  # a full disk, a folder that is gone
                if self._process is not None:
                    # The engine runs, but after a crash of the manager its record would be missing.
                    logger.warning("Overspill: %s cannot be monitored: %s", self.name, error)
                    await asyncio.sleep(1.0)
                else:
                    self._fail(f"{self.name} could not be started: {error}", ())
            except Exception:
                # A manager that stops looking would show outdated states.
                logger.exception("Overspill: monitoring %s failed, will retry", self.name)
                await asyncio.sleep(1.0)

    async def _step(self, seen: Seen) -> None:
        if seen is Seen.ABSENT and self._was_asked_to_end:
            self._bury()  # a requested end is not a failure, whatever is wanted by now
        is_launched = self._process is not None
        decision = decide(self.wanted, seen, launched=is_launched, failed=self.failure is not None)
        self._enter(decision.state)
        match decision.step:
            case Step.LAUNCH:
                await self._launch()
            case Step.PARK:
                await self._park()
            case Step.WAKE:
                await self._wake()
            case Step.END:
                await self._end()
            case Step.GIVE_UP:
                await self._give_up()
            case Step.WAIT:
                if seen is Seen.ABSENT:
                    self._bury()
                await self._pause()

    async def _look(self) -> Seen:
        process, timing = self._process, self.world.timing
        if process is None:
            return Seen.ABSENT
        if self._child is not None:
            self._child.poll()  # otherwise it stays a zombie
        if not process.root.is_alive:
            left = await asyncio.to_thread(process.living)
            if not left and (self._child is None or self._child.poll() is not None):
                return Seen.ABSENT
            self._root_gone_at = self._root_gone_at or time.monotonic()
            if time.monotonic() - self._root_gone_at > timing.stop_patience_s:
                await process.kill()
            return Seen.ENDING
        self._root_gone_at = None
        if self._is_ending:
            return Seen.ENDING
        if await self._answers(process):
            self._answered_at = time.monotonic()
            await self._find_out_whether_parked()
            return self._present
        if self._answered_at is None:
            if time.monotonic() - self._scanned_at > 1.0:  # note its sessions, should it be killed
                await asyncio.to_thread(process.living)
                self._scanned_at = time.monotonic()
            is_late = time.monotonic() - self._launched_at > timing.start_s
            return Seen.SILENT if is_late and self.is_managed else Seen.LOADING
        if time.monotonic() - self._answered_at <= timing.silent_s:
            return self._present
        # An engine somebody else started may be paused in a debugger: it is not ours to end, so wait for it.
        return Seen.SILENT if self.is_managed else Seen.LOADING

    async def _answers(self, process: EngineProcess) -> bool:
        if (url := self.url) is None:
            return False
        answer = await self.world.upstream.ask(url, "/health", self.world.timing.health_s)
        if answer is None or answer[0] != 200:
            return False
        if self._answered_at is None:
            # Another program may have taken the port, and answer too.
            living = await asyncio.to_thread(process.living)
            if address(url)[1] not in [one.port for one in await asyncio.to_thread(listeners, living)]:
                return False
            models = await self.world.upstream.ask(url, "/v1/models", self.world.timing.health_s)
            self.served = read_names(models) or ()  # requests to the engine must use one of these
        return True

    @property
    def _present(self) -> Seen:
        return Seen.PARKED if self._is_parked else Seen.SERVING

    async def _find_out_whether_parked(self) -> None:
        """Ask an engine until it answers once whether it is parked: an earlier manager may have parked it."""
        if self._knows_parked or not self.can_park:
            return
        told = await self._control("GET", "state")
        self._knows_parked = told is not None
        self._is_parked = self._is_parked and told is None
        if told is not None and told.get("state") == "parked":
            self._note_parked(told)
            self.wanted = Wanted.PARKED if self.wanted is Wanted.UP else self.wanted

    async def _park(self) -> None:
        told = await self._control("POST", "park")
        if told is not None and told.get("state") == "parked":
            self._note_parked(told)
            return
        self._knows_parked = told is not None
        self._refuse(f"{self.name} could not be parked: {_reason(told)}")
        if self.wanted is not Wanted.PARKED:
            return  # the wish changed meanwhile
        if self._stops_instead:
            self.want_down(self.stop_reason)
        else:
            self.wanted, self.stop_reason = Wanted.UP, ""

    async def _wake(self) -> None:
        told = await self._control("POST", "wake")
        if told is not None and told.get("state") == "running":
            self._is_parked = False
            return
        self._knows_parked = told is not None
        self._refuse(f"{self.name} could not be woken: {_reason(told)}")
        if self.wanted is Wanted.UP:
            self.wanted, self.holds = Wanted.PARKED, self._awake_takes - self._freed

    def _note_parked(self, told: Mapping[str, Any]) -> None:
        self._is_parked = self._knows_parked = True
        self._freed = self._on_device(int(told.get("freed_bytes", 0)))
        self.holds, self.ended_at = self._awake_takes - self._freed, time.monotonic()

    def _refuse(self, why: str) -> None:
        self.refusal, self.refused_at = why, time.monotonic()
        logger.warning("Overspill: %s", why)

    async def _control(self, method: str, action: str) -> dict[str, Any] | None:
        """The engine's JSON answer to a control request; None if there is none."""
        status, url = self.status, self.url
        secret = await asyncio.to_thread(secret_of, status) if status is not None else None
        if url is None or secret is None:
            return None
        headers, patience_s = [(HEADER.encode(), secret.encode())], self.world.timing.park_s
        answer = await self.world.upstream.ask(url, f"{PATH}{action}", patience_s, headers=headers, method=method)
        if answer is not None:
            self._answered_at = time.monotonic()  # parking may take longer than an engine may be silent
        with contextlib.suppress(ValueError):
            told = json.loads(answer[1]) if answer is not None else None
            return told if isinstance(told, dict) else None
        return None

    async def _launch(self) -> None:
        self._launches += 1
        logs.begin(self.own_log)
        self._is_launching = True
        try:
            empty = self.world.folder / "empty"
            launched = await asyncio.to_thread(self.world.backend.launch, self.name, self.own_log, empty)
            record = Record(
                name=self.name,
                pid=launched.identity.pid,
                process=launched.identity.process,
                url=launched.url,
                log_file=str(self.own_log) if launched.unit is None else None,
                settings=self.settings,
                holds=self.holds,
                started_at=time.time(),
                unit=launched.unit,
                journal=launched.journal,
            )
            self._take(EngineProcess(launched.identity), launched.child, record)
            await asyncio.to_thread(self.world.records.write, self.name, record)
        except StartFailed as error:
            self._fail(str(error), ())
        finally:
            self._is_launching = False

    async def _end(self) -> None:
        process = self._process
        assert process is not None
        self._is_ending, self._was_asked_to_end = True, self.wanted is Wanted.DOWN
        try:
            await self._terminate(process)
        except Exception:
            # Otherwise the engine would count as ending for ever, and never be killed.
            self._is_ending = False
            raise

    async def _terminate(self, process: EngineProcess) -> None:
        if self.wanted is Wanted.UP:
            self.stop_reason = f"it had not answered for {self._patience_s:g} s"
            logger.warning("Overspill: %s is being terminated: %s", self.name, self.stop_reason)
        try:  # for the engine's record of the run, which only the engine writes
            await asyncio.to_thread(leave_reason, process.root.pid, process.root.process, self.stop_reason)
        except OSError as error:
            logger.warning("Overspill: why %s was stopped cannot be recorded in its run: %s", self.name, error)
        if self.record is not None and self.record.unit is not None:
            with contextlib.suppress(StartFailed):
                await asyncio.to_thread(self.world.backend.stop_unit, self.record.unit)
        if not await process.end(self.world.timing.stop_patience_s):
            logger.warning("Overspill: %s did not exit after SIGTERM, and was killed", self.name)
            try:
                args = self.world.registry, self.name, process.root, self.stop_reason
                await asyncio.to_thread(end_killed_run, *args)
            except RegistryError as error:
                logger.warning("Overspill: why %s was killed cannot be recorded in its run: %s", self.name, error)

    @property
    def _patience_s(self) -> float:
        """Seconds for which the engine may be silent now."""
        return self.world.timing.start_s if self._answered_at is None else self.world.timing.silent_s

    @property
    def _served_s(self) -> float:
        """Seconds from ready to the last answer: an engine that hung since did not serve."""
        if self.ready_since is None or self._answered_at is None:
            return 0.0
        return self._answered_at - self.ready_since

    async def _give_up(self) -> None:
        """Handle processes that ended without a request from here, or were ended for their silence."""
        process, is_silent = self._process, self._is_ending
        assert process is not None
        code = self._child.poll() if self._child is not None else None
        hint = self.log_hint
        lines = [hint] if hint else await asyncio.to_thread(logs.tail, self.log_file, 60)
        known = await asyncio.to_thread(how_it_ended, self.world.registry, self.name, process.root)
        was_loading, patience_s, served_s = self._answered_at is None, self._patience_s, self._served_s
        self._bury()
        # An engine ended for its silence ends as cleanly as on request, but has failed all the same.
        if not is_silent and was_loading and self._launches < _LAUNCHES and _PORT_TAKEN.search("\n".join(lines)):
            return  # it is launched again, with another port
        if not is_silent and ((known is not None and known[0]) or code == 0):
            self.wanted, self.stop_reason, self.holds = Wanted.DOWN, "it was stopped from outside", NOTHING
            return
        when = "while it was starting" if was_loading else "while it was serving"
        how = f" with exit code {code}" if code is not None and code > 0 else ""
        how = f", killed by {signal_name(-code)}" if code is not None and code < 0 else how
        if is_silent:
            how = f" after it had not answered for {patience_s:g} s, and was ended"
        # After a requested end the record only repeats the reason.
        said, shown = _said(lines)
        why = said or (known[1].splitlines()[0] if known is not None and known[1] and not known[0] else "")
        why = why or ("" if lines else _no_room_for(self.log_file))
        self._fail(f"the engine of {self.name} ended {when}{how}" + (f": {why}" if why else ""), shown, served_s)

    def _fail(self, reason: str, lines: tuple[str, ...], served_s: float = 0.0) -> None:
        self._failures = 0 if served_s > self.world.timing.back_off_s else self._failures + 1
        self.failure = Failure(reason=reason, log_lines=lines, at=time.monotonic(), count=self._failures)
        self.wanted, self.holds = Wanted.DOWN, NOTHING
        self._bury()
        self._enter(State.FAILED)

    def _take(self, process: EngineProcess, child: "subprocess.Popen[bytes] | None", record: Record) -> None:
        self._process, self._child, self.last = process, child, record
        self._launched_at = time.monotonic()
        self._answered_at = self._root_gone_at = None
        self._is_ending = self._was_asked_to_end = False
        self._is_parked = self._knows_parked = False
        self._freed, self.refusal = NOTHING, ""
        with contextlib.suppress(OSError):
            self._handle = os.pidfd_open(record.pid)
            asyncio.get_running_loop().add_reader(self._handle, self._died)
            if identify(record.pid) != record.identity:
                self._died()

    def _died(self) -> None:
        self._forget_handle()
        self._woken.set()

    def _forget_handle(self) -> None:
        if self._handle is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None

    def _bury(self) -> None:
        """Clean up after the last process has ended."""
        if self._process is None:
            return
        if self.url is not None:
            self.world.upstream.drop(self.url)
        self._forget_handle()
        with contextlib.suppress(OSError):
            self.world.records.remove(self.name)
            take_reason(self._process.root.pid, None)  # a killed engine has not taken its reason
        self._process = self._child = self.status = self._answered_at = self.account = None
        self.served, self.ended_at = (), time.monotonic()
        self._is_ending = self._was_asked_to_end = self._is_parked = False
        if self.wanted is Wanted.DOWN:
            self.holds, self.is_managed = NOTHING, False
        self._publish()

    def _enter(self, state: State) -> None:
        if state is self.state:
            return
        is_seen_again = self._past is not None and self.record is not None and self._past.pid == self.record.pid
        self.state, self.since, self.start_s = state, time.time(), last_start(self.name).seconds
        if state is State.READY and self.last is not None:
            if is_seen_again and self._past is not None and self._past.state == State.READY:
                self.since = self._past.since
            self._past = None
        if state is State.READY:
            self.ready_since = self.last_used = time.monotonic()
        elif state is not State.STOPPING:
            # Kept while stopping: without its service time the end would count as a failed start.
            self.ready_since = None
        if state in (State.STOPPED, State.FAILED, State.PARKED):
            self.is_draining = self.is_leaving = False
        if state in (State.READY, State.STOPPED, State.FAILED):
            self._leave_past()
        if state is State.PARKED:
            # For the TTL: the last use of an engine that was found parked is unknown.
            self.last_used = self.last_used if self.last_used > float("-inf") else time.monotonic()
        self._publish()

    def _observe_wish(self) -> None:
        """Show the new state at once; the loop does the rest."""
        is_there = self._process is not None or self._is_launching
        seen = Seen.ABSENT if not is_there else Seen.LOADING if self._answered_at is None else self._present
        seen = Seen.ENDING if self._is_ending else seen
        self._enter(decide(self.wanted, seen, launched=is_there, failed=self.failure is not None).state)
        self._woken.set()
        self.run()

    def _publish(self) -> None:
        self._changed.set()
        self.world.changed(self)

    async def _pause(self) -> None:
        timing = self.world.timing
        waits = {
            State.STARTING: timing.look_starting_s, State.READY: timing.look_ready_s,
            State.PARKED: timing.look_ready_s, State.STOPPING: 0.1,
        }  # fmt: skip
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(waits.get(self.state)):
                await self._woken.wait()


def _reason(told: Mapping[str, Any] | None) -> str:
    return str(told.get("error", told)) if told is not None else "it does not answer"


def _no_room_for(log: Path) -> str:
    """Reason for an empty log if the disk is full, else an empty string."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(log.parent).free < _LEAST_FREE_BYTES:
            return f"the disk that holds its log ({log.parent}) is full; free some space"
    return ""


def _said(lines: list[str]) -> tuple[str, tuple[str, ...]]:
    """The error that `overspill serve` printed, if any, and the log lines to show with it."""
    shown = [line for line in lines if line.strip()]
    for at in reversed(range(len(shown))):
        if (match := _SAID_ERROR.match(shown[at])) is not None:
            # Where the lines that matter are repeated after the error, only those are shown.
            if any(line.startswith("the last lines of ") for line in shown[at + 1 : at + 2]):
                shown = [line.strip() for line in shown[at + 2 :]]
            return match["said"], tuple(shown[-_FAILURE_LINES:])
    return "", tuple(shown[-_FAILURE_LINES:])
