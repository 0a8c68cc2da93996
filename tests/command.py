"""The `overspill` command in this process: its words, environment, output and exit code are those of a process."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

from overspill.cli import app, main


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_overspill(
    *words: str, env: Mapping[str, str], cwd: Path | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """For commands that end by themselves and start no engine. A process takes half a second more."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "stdin", io.StringIO(text)),
        patch.object(sys, "argv", ["overspill", *words]),
        patch.dict(os.environ, env, clear=True),
        _in(cwd or Path.cwd()),
    ):
        try:
            main(lambda: app(list(words)))
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                err.write(f"{ended.code}\n")
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
