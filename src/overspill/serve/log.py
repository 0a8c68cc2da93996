"""vLLM's log on its way: to the terminal, to a file, and its end kept for when something goes wrong."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from overspill.folders import state_folder
from overspill.kv.errors import OverspillError

# When the engine core dies, the server writes a traceback for each request, and the core's own stands before them.
_KEPT_LINES = 10_000


def open_log(given: Path | None, port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """A new, empty file: the one given, or one in the XDG state folder for each port."""
    folder = state_folder(environment)
    if given is None and folder is None:
        raise OverspillError("there is no home folder for vLLM's log; name a file with --log-file")
    path = given or (folder or Path()) / f"serve-{port}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        raise OverspillError(f"vLLM's log cannot be written to {path}: {error.strerror}; use --log-file") from error
    return path


class Log:
    def __init__(self, source: IO[bytes], terminal: IO[bytes] | None, file: Path | None) -> None:
        self._source, self._terminal = source, terminal
        # Appended to: who limits its size empties it, and serve's own words may go there too.
        self._file: IO[bytes] | None = file.open("ab") if file is not None else None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._copy, name="overspill-log", daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """The last ones, once vLLM has ended."""
        self._thread.join(timeout=5)
        return list(self._lines)

    def _copy(self) -> None:
        with self._source, self._file or contextlib.nullcontext():
            for line in self._source:
                self._lines.append(line.decode(errors="replace").rstrip())
                self._terminal = _written(self._terminal, line)
                self._file = _written(self._file, line)


def _written(sink: IO[bytes] | None, line: bytes) -> IO[bytes] | None:
    """A full disk or a closed terminal is no reason to stop vLLM, which waits for what it logs to be read."""
    if sink is not None:
        try:
            sink.write(line)
            sink.flush()
        except (OSError, ValueError):
            return None
    return sink
