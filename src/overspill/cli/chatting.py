"""`overspill run`: plan, start and chat in the shell."""

import asyncio
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.flags import SERVING, Model, failing, launch_of, passed_on, to_stderr, with_settings
from overspill.cli.launching import require_startable
from overspill.errors import CannotServe
from overspill.flags import into_environment, read_flags
from overspill.kv.errors import OverspillError
from overspill.processes import on_stop_signals
from overspill.settings import AUTO
from overspill.upstream import DONE, Connection, Events, Upstream, UpstreamLost, error_text

if TYPE_CHECKING:
    from overspill.serve.status import Status

_PROMPT = ">>> "
_HELP = "Type a question. /clear forgets the conversation, /bye or Ctrl-D ends it; Ctrl-C stops an answer."
_CHAT, _COMPLETE = "/v1/chat/completions", "/v1/completions"
_MOST_REFUSAL_BYTES = 1 << 20
_POLL_S = 0.5


@with_settings(SERVING)
def run(
    given: dict[str, Any],
    context: typer.Context,
    model: Model,
    log_file: Annotated[Path | None, typer.Option(help="A file for vLLM's log.")] = None,
) -> None:
    """Chat with a model in the shell, planning and starting the model unless it runs already. A question piped to
    standard input gets one answer. Defaults here: --max-model-len auto, --offload-ram 0, and a free port as --port.
    """
    from overspill.address import free_port
    from overspill.planning.report import plan_in_short
    from overspill.serve.log import open_log
    from overspill.serve.run import run_server

    with failing(CannotServe):
        if (there := _running(model)) is not None:
            if context.args or any(value is not None for value in given.values()):
                to_stderr(
                    f"warning: {model} is already running, with its own settings; the flags given here are not used"
                )
            to_stderr(f"{model} is already running at {there.url}, and keeps running after this chat")
            from overspill.manager.web.client import is_parked

            if is_parked(there):
                to_stderr(f"warning: {model} is parked, and answers when it is woken: overspill wake {model}")
            typed = into_environment(read_flags(context.args))[1]
            key = {**os.environ, **typed}.get("VLLM_API_KEY")
            _chat(Conversation(there.url, there.served_name, key), _question())
            return
        # A single conversation keeps its idle KV on the GPU; a port of its own lets several chats run at once.
        defaults = {"max_model_len": AUTO, "offload_ram": 0, "port": free_port()}
        launch = launch_of(model, given, *passed_on(context), defaults=defaults, is_server=True)
        prepared = launch.prepared()
        for line in (*plan_in_short(launch.plan), *(f"warning: {warning}" for warning in prepared.warnings)):
            to_stderr(line)
        require_startable(launch, prepared, context.args)
        question = _question()  # read only once the command is known to be valid
        log = open_log(log_file, prepared.address.port)
        to_stderr(f"vLLM's log: {log}")
        key = prepared.full_environment().get("VLLM_API_KEY")
        conversation = Conversation(prepared.address.url, prepared.served_name, key)
        run_server(
            prepared, force=bool(launch.settings["force"]), quiet=True, log_file=log,
            during=lambda: _chat(conversation, question),
        )  # fmt: skip


def _question() -> str | None:
    """The question on standard input; None if that is a terminal."""
    if sys.stdin.isatty():
        return None
    try:
        question = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise OverspillError(
            f"the question on standard input is not text in {error.encoding}: {error.reason}"
        ) from error
    if not question:
        raise OverspillError("there is no question on standard input; write one there, or use a terminal")
    return question


def _running(model: str) -> "Status | None":
    """This user's server of the model on this machine, once it is ready; None if none runs, or it ends before."""
    from overspill.serve.reporter import HEARTBEAT_S
    from overspill.serve.status import read_statuses

    last, said = None, 0.0
    while True:
        here = [one for one in read_statuses() if one.is_alive and one.host == platform.node()]
        found = next((one for one in reversed(here) if model in (one.model, one.served_name)), None)
        if found is None or found.is_ready:
            return found
        if found.phase != last or time.monotonic() - said > HEARTBEAT_S:
            to_stderr(f"{model} is being started by process {found.pid}: {found.phase}")
            last, said = found.phase, time.monotonic()
        time.sleep(_POLL_S)


class _Stopped(KeyboardInterrupt):
    """Raised by a signal that ends programs; asyncio lets no other kind of exception out of a handler."""


class Conversation:
    """A chat with one server, and its messages so far."""

    def __init__(self, url: str, served_name: str, api_key: str | None = None) -> None:
        self._url, self._model = url, served_name
        self._headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))
        self._path = _CHAT
        self.messages: list[dict[str, str]] = []

    def ask(self, runner: asyncio.Runner, question: str) -> None:
        """Print the answer as it arrives. Ctrl-C cuts it off; the part received so far stays in the conversation."""
        self.messages.append({"role": "user", "content": question})
        said: list[str] = []
        try:
            runner.run(self._answer(said))
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
                print(flush=True)
            else:
                self.messages.pop()

    async def _answer(self, said: list[str]) -> None:
        upstream = Upstream()
        try:
            for path in dict.fromkeys((self._path, _COMPLETE)):
                body = json.dumps({"model": self._model, "stream": True, **self._asked(path)}).encode()
                connection, head = await upstream.request(self._url, "POST", path.encode(), self._headers, body)
                try:
                    if head.status == HTTPStatus.OK:
                        async for piece in _pieces(connection):
                            said.append(piece)
                            print(piece, end="", flush=True)
                        return
                    refused = error_text(await connection.read_all(_MOST_REFUSAL_BYTES))
                finally:
                    connection.close()  # makes the engine stop computing
                if "chat template" not in refused or path == _COMPLETE:
                    raise CannotAnswer(f"{self._model} refuses this: {refused}")
                self._path = _COMPLETE
                to_stderr("note: the model has no chat template, so it continues your text instead of answering it")
        except UpstreamLost as error:
            raise CannotServe(f"the server of {self._model} is gone: {error}") from error
        finally:
            upstream.close()

    def _asked(self, path: str) -> dict[str, Any]:
        if path == _CHAT:
            return {"messages": self.messages}
        return {"prompt": self.messages[-1]["content"], "max_tokens": 256}  # a completion may go on for ever


class CannotAnswer(CannotServe):
    """Raised when the server refuses one question; the conversation continues without it."""


async def _pieces(connection: Connection) -> AsyncIterator[str]:
    """Pieces of text in a stream of events, including the thoughts of a reasoning model."""
    events = Events()
    while (part := await connection.read()) is not None:
        for data in events.feed(part):
            if not data or data == DONE:
                continue
            try:
                found = json.loads(data)
                choices = found.get("choices", ())
            except (ValueError, AttributeError) as error:
                raise CannotAnswer(f"a chunk of the answer is not in OpenAI's format: {data[:80]!r}") from error
            if "error" in found:
                raise CannotAnswer(error_text(data))
            for choice in choices:
                delta = choice.get("delta", {})
                piece = delta.get("content") or delta.get("reasoning") or choice.get("text")
                if piece:
                    yield piece


def _chat(conversation: Conversation, question: str | None) -> None:
    with asyncio.Runner() as runner, on_stop_signals(_stop), contextlib.suppress(_Stopped, EOFError):
        # Python's own Ctrl-C handler instead of one that ends the chat, and with it the server.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if question is not None:
            with contextlib.suppress(KeyboardInterrupt):
                conversation.ask(runner, question)
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (which gives `input` its editing and history)
        print(_HELP)
        while True:
            try:
                line = input(_PROMPT).strip()
            except KeyboardInterrupt as interrupt:
                print()
                if isinstance(interrupt, _Stopped):
                    raise
                return
            if line == "/bye":
                return
            if line == "/clear":
                conversation.messages.clear()
            elif line.startswith("/"):
                print(_HELP)
            elif line:
                _ask(conversation, runner, line)


def _ask(conversation: Conversation, runner: asyncio.Runner, question: str) -> None:
    try:
        conversation.ask(runner, question)
    except CannotAnswer as error:
        to_stderr(f"error: {error}")
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, _Stopped):
            raise


def _stop() -> None:
    raise _Stopped
