"""Python programs for tests, forked from a process that has imported vLLM once.

vLLM takes ten seconds of a core to import, in the server's process and again in the engine core's. While `warm` is on,
`subprocess` forks such a program from a preloaded process in place of executing it, and so do the programs started that
way. Parents, sessions, descriptors, environment and arguments are what they would be; modules of a parent stay loaded.

A child has to belong to the process that started it, and not to the preloaded one: an intermediate process ends before
the program begins, while the starting process is a subreaper and inherits the orphan.
"""

import _posixsubprocess
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import process as mp_process
from multiprocessing import resource_tracker
from multiprocessing import util as mp_util
from pathlib import Path
from typing import Any

import setproctitle

PRELOADED = (
    "overspill.cli",
    "overspill.verify.inprocess",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
_FORKED_MODULES = (
    "overspill", "tests.disk_script", "tests.vllm_specs", "vllm.entrypoints", "vllm.model_executor.models.registry",
)  # fmt: skip
# Code of tests begins with FORKED where a start of its own shows nothing.
FORKED = "# forked\n"
_FORKED_CODE = (FORKED, "from multiprocessing.spawn import spawn_main", "from multiprocessing.forkserver import main")
_PR_SET_CHILD_SUBREAPER = 36
_FREE_FD = 300
# Room for the arguments of programs, which are written over those of the preloaded process.
_ROOM = "-" * 8192

_execute = _posixsubprocess.fork_exec
_MainProcess = type(multiprocessing.current_process())
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Program:
    """An interpreter's arguments, and the surroundings that `fork_exec` would give it."""

    args: list[str]
    env: dict[str, str]
    cwd: str
    fds: dict[int, int]
    """Descriptors of the new program by number, and the ones here that they are copies of."""
    new_session: bool
    process_group: int

    def separate(self) -> None:
        """Before the starting process knows its number, and may send signals to its group."""
        if self.process_group >= 0:
            os.setpgid(0, self.process_group)
        if self.new_session:
            os.setsid()

    def run(self) -> int:
        """Runs in a process of its own, and returns its exit code."""
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update({**_set_by_imports, **self.env})
        sys.path[:] = [*self.env.get("PYTHONPATH", "").split(":"), *_site_path]
        sys.path[:] = [entry for entry in sys.path if entry]
        importlib.invalidate_caches()
        if "HF_HOME" in self.env and "huggingface_hub.constants" in sys.modules:  # which read it when they were loaded
            importlib.reload(sys.modules["huggingface_hub.constants"])
        _write_arguments(self.args)
        if "vllm" in sys.modules:
            sys.modules["vllm.logger"]._configure_vllm_root_logger()  # type: ignore[attr-defined]
        sys.orig_argv[:] = self.args
        words = self.args[1:]
        is_isolated = False
        while words[0] in ("-P", "-u", "-B"):
            is_isolated |= words.pop(0) == "-P"
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ImportError):
            importlib.import_module("sitecustomize")
        option, what, *_ = *words, ""
        try:
            if option == "-m":
                sys.path[:0] = [] if is_isolated else [self.cwd]
                sys.argv[:] = words[1:]
                runpy._run_module_as_main(what)  # type: ignore[attr-defined]
            elif option == "-c":
                sys.path[:0] = [] if is_isolated else [""]
                sys.argv[:] = ["-c", *words[2:]]
                exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
            else:
                sys.path[:0] = [] if is_isolated else [str(Path(option).resolve().parent)]
                sys.argv[:] = words
                _run_script(option)
        except SystemExit as ended:
            if ended.code is None or isinstance(ended.code, int):
                return ended.code or 0
            print(ended.code, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            traceback.print_exc()
            return 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
            return 1
        return 0


def _run_script(path: str) -> None:
    """In `__main__`, whose file the processes that it starts look for."""
    main = sys.modules["__main__"]
    main.__file__ = path
    main.__dict__["__builtins__"] = __builtins__
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def _is_forked(args: Sequence[Any]) -> bool:
    words = [os.fsdecode(word) for word in args]
    if words[0] != sys.executable:
        return False
    option, what, *_ = *(word for word in words[1:] if word not in ("-P", "-u", "-B")), "", ""
    if option.endswith(".py"):
        with contextlib.suppress(OSError):
            return bool({"vllm", "overspill"} & set(re.findall(r"\w+", Path(option).read_text())))
    return (option == "-m" and what.startswith(_FORKED_MODULES)) or (option == "-c" and what.startswith(_FORKED_CODE))


def _fork_exec(
    args: Sequence[Any], executables: Any, close_fds: bool, pass_fds: Sequence[int], cwd: Any, env_list: Any,
    p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
    errpipe_read: int, errpipe_write: int, restore_signals: bool, start_new_session: bool, process_group: int,
    gid: Any, gids: Any, uid: Any, umask: int, preexec_fn: Callable[[], None] | None, *more: Any,
) -> int:  # fmt: skip
    """`_posixsubprocess.fork_exec` that forks the programs `_is_forked` names."""
    if env_list is None:
        env = dict(os.environ)
    else:
        env = dict(os.fsdecode(pair).split("=", 1) for pair in env_list)
    is_ours = gid is None and gids is None and uid is None and umask == -1
    if not is_ours or (_tests is not None and preexec_fn is not None) or not _is_forked(args):
        return _execute(
            args, executables, close_fds, pass_fds, cwd, env_list, p2cread, p2cwrite, c2pread, c2pwrite, errread,
            errwrite, errpipe_read, errpipe_write, restore_signals, start_new_session, process_group, gid, gids, uid,
            umask, preexec_fn, *more,
        )  # fmt: skip
    streams = {number: fd if fd != -1 else number for number, fd in enumerate((p2cread, c2pwrite, errwrite))}
    kept = {fd: fd for fd in pass_fds if fd != errpipe_write}
    program = Program(
        args=[os.fsdecode(word) for word in args],
        env=env,
        cwd=os.fsdecode(cwd) if cwd is not None else os.getcwd(),
        fds={**kept, **streams},
        new_session=start_new_session,
        process_group=process_group,
    )
    if _tests is not None:
        return _tests.start(program)
    if pid := os.fork():
        return pid  # which waits until `_live` has closed the pipe for errors
    program.separate()
    _live(program, preexec_fn)


def _live(program: Program, preexec_fn: Callable[[], None] | None = None) -> Any:
    """Makes the forked process the program's; never returns."""
    try:
        _forget_parent()
        _arrange(program.fds)
        if preexec_fn is not None:
            preexec_fn()
        for number, mode in ((0, "r"), (1, "w"), (2, "w")):
            unbuffered = "-u" in program.args[:4] or bool(program.env.get("PYTHONUNBUFFERED"))
            stream = open(number, mode, closefd=False, errors="backslashreplace" if number == 2 else None)  # noqa: SIM115
            if mode == "w":
                stream.reconfigure(line_buffering=number == 2 or stream.isatty(), write_through=unbuffered)
            setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
        if program.args[1:4] == ["-m", "overspill", "manager"]:
            _start_twin()
        code = program.run()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        code = 1
    os._exit(code & 0xFF)


def _forget_parent() -> None:
    """Signals, exit handlers, children and descriptors of the process that was forked are not the program's."""
    # vLLM thaws all at an engine's end, and looks at whatever it and torch imported.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
    signal.set_wakeup_fd(-1)
    for sign in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError, TypeError):
            if signal.getsignal(sign) not in (signal.SIG_IGN, signal.SIG_DFL):
                signal.signal(sign, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(mp_util._exit_function)  # type: ignore[attr-defined]
    mp_util._finalizer_registry.clear()  # type: ignore[attr-defined]
    mp_process._children = set()  # type: ignore[attr-defined]
    mp_process._current_process = _MainProcess()  # type: ignore[attr-defined]
    mp_process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    subprocess._active.clear()  # type: ignore[attr-defined]
    threading.main_thread().name = "MainThread"


def _arrange(fds: Mapping[int, int]) -> None:
    """Leaves these descriptors open, under their numbers, and no other."""
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE_FD) for number, fd in fds.items()}
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in copies.values():
            with contextlib.suppress(OSError):
                os.close(number)
    for number, copy in copies.items():
        os.dup2(copy, number, inheritable=True)
        os.close(copy)


def _write_arguments(args: Sequence[str]) -> None:
    """As /proc shows them."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, args))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


class _Preloaded:
    """The preloaded process, seen from the tests'; it starts when the first program does."""

    def __init__(self, twin: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = twin

    def _preload(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "import sys; from tests.zygote import serve; serve(int(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(theirs.fileno()), _ROOM]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[1])
        theirs.close()
        self._socket = ours
        assert ours.recv(1) == b"r", "the process that tests start programs from has ended"

    def prepare(self) -> None:
        with self._lock:
            if self._socket is None:
                self._preload()

    def start(self, program: Program) -> int:
        self.prepare()
        with self._lock:
            assert self._socket is not None
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                ours = sorted(set(program.fds.values()))
                # The environment may be larger than a packet.
                with _in_memory(pickle.dumps((program, ours))) as text:
                    socket.send_fds(self._socket, [b"p"], [text, *ours])
                return int(self._socket.recv(64))
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def stop(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


@contextlib.contextmanager
def _in_memory(text: bytes) -> Iterator[int]:
    fd = os.memfd_create("program")
    try:
        os.write(fd, text)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def serve(fd: int) -> None:
    """Starts programs until the socket `fd` is closed; what the preloaded process does."""
    before = dict(os.environ)
    for name in PRELOADED:
        importlib.import_module(name)
    _start_engines_cheaply()
    _set_by_imports.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    entries = before.get("PYTHONPATH", "").split(":")
    _site_path.extend(entry for entry in sys.path if entry not in ("", *entries))
    setproctitle.getproctitle()  # finds its room now, before arguments are written over
    _patch()
    requests = socket.socket(fileno=fd)
    requests.send(b"r")
    _answer(requests)
    os._exit(0)  # whoever closed the socket waits, and taking vLLM apart takes seconds


def _start_engines_cheaply() -> None:
    """What every engine's process would do with the same outcome, and three seconds of a core, is done once."""
    import torch
    from torch._inductor import config as inductor
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler

    from overspill.kv.contract import check_contract
    from tests.engine_cost import keep_kernels

    check_contract(spill=True, park=True, elastic=True)  # reads vLLM's source
    if current_platform.is_cpu():
        keep_kernels()
        current_platform.register_triton_kernel_overrides()
        # Compiles what counts ranks of tokens. A pool of processes that compile would not outlive a fork.
        with inductor.patch(compile_threads=1), torch.inference_mode():
            Sampler.gather_logprobs(torch.zeros(2, 512), 2, torch.zeros(2, dtype=torch.int64))


def _answer(requests: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1, 32)
        if not message:
            return
        if not (parent := os.fork()):
            _start(requests, fds)
        os.waitpid(parent, 0)
        for one in fds:
            os.close(one)


def _start_twin() -> None:
    """A manager's programs are forked from a copy of it that has run nothing yet: SQLite, for one, does not work in a
    fork of a process that has opened a database."""
    global _tests
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        _arrange({theirs.fileno(): theirs.fileno()})
        _answer(theirs)
        os._exit(0)
    theirs.close()
    _tests = _Preloaded(ours)


def _start(requests: socket.socket, fds: Sequence[int]) -> None:
    with open(fds[0], "rb", closefd=False) as text:
        program, theirs = pickle.load(text)
    received = dict(zip(theirs, fds[1:], strict=True))
    program.fds = {number: received[fd] for number, fd in program.fds.items()}
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.001)
    program.separate()
    requests.send(str(os.getpid()).encode())
    _live(program)


_tests: _Preloaded | None = None
_set_by_imports: dict[str, str] = {}
_site_path: list[str] = []


def _patch() -> None:
    subprocess._fork_exec = _posixsubprocess.fork_exec = _fork_exec  # type: ignore[attr-defined]


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Programs that this process starts are forked."""
    global _tests
    _tests = _Preloaded()
    _patch()
    try:
        yield
    finally:
        subprocess._fork_exec = _posixsubprocess.fork_exec = _execute  # type: ignore[attr-defined]
        _tests.stop()
        _tests = None


def prepare() -> None:
    """Imports vLLM now: a loop of events that starts the first program would stand still meanwhile."""
    if _tests is not None:
        _tests.prepare()


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Programs are executed after all, where a start itself is tested."""
    patched = _posixsubprocess.fork_exec
    subprocess._fork_exec = _posixsubprocess.fork_exec = _execute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = _posixsubprocess.fork_exec = patched  # type: ignore[attr-defined]
