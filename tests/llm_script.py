"""A program that uses vLLM without a server, as `LLM()` does: its engine is its child."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overspill.processes import argv_of

ENGINE = """
import subprocess, sys
engine = ["VLLM::EngineCore", "-c", "import time; time.sleep(3600)"]
print(subprocess.Popen(engine, executable=sys.executable, stdout=subprocess.DEVNULL).pid, flush=True)
"""


@contextmanager
def running_script(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The program, with a secret in its command line, and its engine's process."""
    program = folder / "batch.py"
    program.write_text(ENGINE + "sys.stdin.read()\n")
    command = [sys.executable, program, "--hf-token", "geheim"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        try:
            while argv_of(engine)[:1] != ["VLLM::EngineCore"]:
                time.sleep(0.05)
            yield process, engine
        finally:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
            process.kill()
