"""How an engine is started: as a process of its own that outlives the manager, or by systemd."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from overspill.manager.engines.process import Identity, identify
from overspill.manager.errors import StartFailed

HOST = "127.0.0.1"
# Of the manager, and of no use to an engine: systemd's notices would come from the wrong process, and a key of vLLM's
# would shut out the gateway.
_LEFT_OUT = ("NOTIFY_SOCKET", "VLLM_API_KEY")
# By the manager: vLLM's log would have a line for each.
_ASKED_OFTEN = "/health,/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    name: str
    port: int
    log_file: Path
    folder: Path
    """Where it is started. It must be empty: vLLM, and we, take a name for a folder of that name if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    identity: Identity
    child: "subprocess.Popen[bytes] | None" = None
    """For its exit code; None for a process that is not ours."""
    url: str | None = None
    unit: str | None = None
    journal: str | None = None
    """The command that shows the unit's log."""


class Backend(Protocol):
    def launch(self, order: Order) -> Launched:
        """Returns when there is a process. Blocks."""

    def stop_unit(self, unit: str) -> None:
        """Asks whoever started it to stop it, so that it is not started again. Blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProcesses:
    """`overspill serve` in a session of its own, without a terminal: neither a Ctrl-C nor the manager's end ends it."""

    program: tuple[str, ...] = (sys.executable, "-P", "-m", "overspill", "serve")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def launch(self, order: Order) -> Launched:
        command = [
            *self.program, order.name, "--host", HOST, "--port", str(order.port), "--quiet",
            "--log-file", str(order.log_file), "--disable-access-log-for-endpoints", _ASKED_OFTEN,
        ]  # fmt: skip
        environment = {name: value for name, value in self.environment.items() if name not in _LEFT_OUT}
        try:
            for folder in (order.log_file.parent, order.folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with order.log_file.open("ab") as log:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    env=environment, cwd=order.folder,
                )  # fmt: skip
        except OSError as error:
            raise StartFailed(f"{order.name} could not be started: {error}") from error
        identity = identify(child.pid)
        if identity is None:
            raise StartFailed(f"{order.name} ended at once, with exit code {child.wait()}")
        return Launched(identity=identity, child=child, url=f"http://{HOST}:{order.port}")

    def stop_unit(self, unit: str) -> None:
        raise StartFailed(f"{unit} was started by systemd, which this manager does not use")
