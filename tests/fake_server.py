"""An engine's stand-in: a small real HTTP server that speaks enough of vLLM's API, and misbehaves as it is told to.

python tests/fake_server.py BEHAVIOURS NAME --host H --port P --quiet --log-file F

BEHAVIOURS is a JSON file: by model's name, the fields of `Behaviour`. It is read at every start, so that a test can
change it in between.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    start_s: float = 0.0
    dies_at_start: bool = False
    says: str = ""
    """On standard error, when it is started."""
    dies_after_tokens: int | None = None
    dies_inside_event: bool = False
    ignores_sigterm: bool = False
    dies_at_sigterm: bool = False
    """By a signal, instead of ending well."""
    has_child: bool = False
    """In a session of its own, as `overspill serve` has its guard, and deaf to SIGTERM."""
    closes_kept: bool = False
    """A second request on a connection gets no answer: as if it came when the connection was just being closed."""
    token_s: float = 0.0
    served: str | None = None
    certificate: str | None = None
    """A file that holds its key too: it speaks TLS."""
    metrics_file: str | None = None
    """Its /metrics page, read each time it is asked for."""
    metrics_s: float = 0.0
    """How long it takes to tell it."""
    parks: int | None = None
    """It can be parked, which frees so many bytes; a request meanwhile waits."""
    answers_late_s: float = 0.0
    """It is parked at once, and says so later."""
    refuses: str = ""
    """What it answers, with this word in its path, is a refusal: park, or wake."""
    is_spaced: bool = False
    """Its events are as other servers write them: JSON with spaces, and lines that end with CRLF."""
    device: str = "cpu"
    """Of the plan of an elastic engine."""
    gpu: tuple[int, str] = (0, "cpu")
    """Of an elastic engine: its number, and the name of its ledger."""
    plan: dict[str, Any] | None = None
    """That it reports as its own."""
    elastic: dict[str, int] | None = None
    """Of a row in the CPU's ledger: held, floor, most and weight; what each request needs; `late_ms`, from its wake
    until it has its memory; and `slow_ms`, from a grant until then."""
    prefers_taken_port: int | None = None
    """Listens there instead, at the first start only: as if somebody had taken the port meanwhile."""


# vLLM's, as they are there: some with /v1, some without, some both.
ECHOED = (
    "/v1/echo", "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank", "/tokenize", "/detokenize", "/generative_scoring", "/v1/audio/transcriptions",
    "/v1/audio/translations", "/v1/responses", "/v1/messages",
)  # fmt: skip
# The second is between neighbours, and the last as vLLM sends it.
ECHO_HEADERS = "connection: x-private\r\nx-private: 1\r\naccess-control-allow-origin: *\r\n"


class Server:
    def __init__(self, name: str, behaviour: Behaviour) -> None:
        self.name, self.behaviour = behaviour.served or name, behaviour
        self.running = self.aborted = self.answered = self.held = 0
        self.connections: set[asyncio.StreamWriter] = set()
        self.awake = asyncio.Event()
        self.awake.set()

    def control(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """As the middleware of `overspill serve` answers."""
        if headers.get("x-overspill-secret") != "secret of a launch":
            return 403, {"error": "no"}
        if self.behaviour.refuses and self.behaviour.refuses in path:
            return 409, {"error": "not with me"}
        if (method, path) == ("POST", "/overspill/park"):
            self.awake.clear()
        elif (method, path) == ("POST", "/overspill/wake"):
            self.awake.set()
        freed = (self.behaviour.parks or 0) + self.held
        return 200, {"state": "running"} if self.awake.is_set() else {"state": "parked", "freed_bytes": freed}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                line, *rest = head.strip().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (one.partition(":") for one in rest)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = line.split(" ")
                is_first, self.connections = writer not in self.connections, self.connections | {writer}
                if self.behaviour.closes_kept and not is_first:
                    break
                await self.answer(reader, writer, method, path.partition("?")[0], headers, body)
                if headers.get("connection") == "close":
                    break
        writer.close()

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str,
        headers: dict[str, str], body: bytes,
    ) -> None:  # fmt: skip
        if path == "/health":
            await send(writer, 200, b"")
        elif path.startswith("/overspill/"):
            status, told = self.control(method, path, headers)
            if path.endswith("park"):
                await asyncio.sleep(self.behaviour.answers_late_s)
            await send(writer, status, json.dumps(told).encode())
        elif path == "/v1/models":
            await send(writer, 200, json.dumps({"object": "list", "data": [{"id": self.name}]}).encode())
        elif path == "/metrics":
            told = f"fake_running {self.running}\nfake_aborted {self.aborted}\nfake_answered {self.answered}\n"
            await asyncio.sleep(self.behaviour.metrics_s)
            page = self.behaviour.metrics_file
            await send(writer, 200, told.encode() if page is None else Path(page).read_bytes())
        elif path in ECHOED:
            told = {"path": path, "headers": headers, "body": body.decode()}
            await send(writer, 200, json.dumps(told).encode(), ECHO_HEADERS)
        elif path in ("/v1/completions", "/v1/chat/completions"):
            try:
                asked = json.loads(body)
            except ValueError:  # as a number of 100 000 digits
                await send(writer, 400, b'{"error": {"message": "no JSON", "type": "BadRequestError", "code": 400}}')
                return
            await self.complete(reader, writer, asked)
        else:
            await send(writer, 404, b'{"error": {"message": "no such path", "type": "NotFoundError", "code": 404}}')

    async def complete(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        if asked["model"] != self.name:
            await send(writer, 404, b'{"error": {"message": "wrong model", "type": "NotFoundError", "code": 404}}')
            return
        self.running += 1
        is_answered = False
        try:
            words = [f"{self.name}-{i} " for i in range(asked.get("max_tokens", 4))]
            usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
            usage["prompt_tokens_details"] = {"cached_tokens": 2}
            if asked.get("stream"):
                await self.stream(reader, writer, words, usage, asked.get("stream_options") or {})
            else:
                for i, _ in enumerate(words):
                    await self.compute(reader, writer, i, b"")
                message = {"role": "assistant", "content": "".join(words)}
                choice = {"index": 0, "text": "".join(words), "message": message, "finish_reason": "length"}
                told = {"id": "x", "object": "chat.completion", "created": 1, "model": self.name, "choices": [choice]}
                await send(writer, 200, json.dumps({**told, "usage": usage}, separators=(",", ":")).encode())
            is_answered = True
        finally:
            self.running -= 1
            self.answered += is_answered
            self.aborted += not is_answered

    def event(self, told: dict[str, Any]) -> bytes:
        if self.behaviour.is_spaced:
            return f"data: {json.dumps(told)}\r\n\r\n".encode()
        return f"data: {json.dumps(told, separators=(',', ':'))}\n\n".encode()

    async def stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: list[str], usage: dict[str, int],
        options: dict[str, bool],
    ) -> None:  # fmt: skip
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i, word in enumerate(words):
            choice = {"index": 0, "text": word, "delta": {"content": word}, "finish_reason": None}
            event = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": self.name}
            so_far = {"prompt_tokens": 3, "total_tokens": 4 + i, "completion_tokens": 1 + i}
            more = {"usage": so_far} if options.get("continuous_usage_stats") else {}
            data = self.event({**event, "choices": [choice], **more})
            await self.compute(reader, writer, i, data)
            await chunk(writer, data)
        told = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": self.name, "choices": []}
        last = self.event({**told, "usage": usage}) if options.get("include_usage") else b""
        await chunk(writer, last + b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def compute(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, i: int, event: bytes) -> None:
        await self.awake.wait()
        if self.behaviour.dies_after_tokens == i:
            if self.behaviour.dies_inside_event:
                await chunk(writer, event[: len(event) // 2])
                await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(self.behaviour.token_s)
        if reader.at_eof() or writer.transport.is_closing():
            raise ConnectionResetError


async def follow_ledger(
    server: Server, held: int, floor: int, most: int, request: int, weight: int = 1, late_ms: int = 20,
    slow_ms: int = 0,
) -> None:  # fmt: skip
    """As an elastic engine does; it gives back in steps, takes what it had so long after it was woken, and what it is
    granted so long after that."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    from overspill.kv.ledger import Ledger

    ledger = Ledger(Path(os.environ["XDG_STATE_HOME"]) / f"overspill/ledgers/{server.behaviour.gpu[1]}.ledger")
    row = ledger.take(os.getpid(), held=held, floor=floor, most=most, weight=weight)
    server.held = held
    while True:
        if server.awake.is_set():
            used, granted = server.running * request, max(floor, min(most, ledger.read(row).granted or server.held))
            if granted > server.held:
                await asyncio.sleep(slow_ms / 1000)
            server.held = granted if granted > server.held else max(granted, server.held - most // 50)
            ledger.write(row, held=server.held, used=min(used, server.held), wanted=min(most, max(floor, used)))
        else:
            ledger.write(row, held=0, used=0, wanted=0)
            await server.awake.wait()
            await asyncio.sleep(late_ms / 1000)
        await asyncio.sleep(0.02)


async def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


async def send(writer: asyncio.StreamWriter, status: int, body: bytes, more: str = "") -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


def write_status(name: str, url: str, behaviour: Behaviour) -> None:
    """And the secret, as `overspill serve` leaves them."""
    folder = Path(os.environ["XDG_STATE_HOME"]) / "overspill/serving"
    folder.mkdir(parents=True, exist_ok=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    at = folder / f"{os.uname().nodename}-{os.getpid()}"
    now = "2026-01-01T00:00:00+00:00"
    told = {
        "format": 1, "pid": os.getpid(), "process": f"{boot}:{started}", "host": os.uname().nodename, "model": name,
        "source": name, "served_name": name, "url": url, "phase": "ready", "started_at": now, "ready_at": now,
        "can_park": behaviour.parks is not None, "memory": {"weights_bytes": behaviour.parks},
        "session": os.getsid(0),
    }  # fmt: skip
    if behaviour.plan is not None:
        told["plan"] = behaviour.plan
    if behaviour.elastic is not None:
        held = behaviour.elastic["held"]
        told["plan"] = {
            "device": behaviour.device, "elastic": True, "gpu_bytes": held, "resident_kv_bytes": held,
            "ranks": [{"index": behaviour.gpu[0]}],
        }  # fmt: skip
    at.with_suffix(".secret").write_text(json.dumps({"process": told["process"], "secret": "secret of a launch"}))
    new = at.with_suffix(".new")
    new.write_text(json.dumps(told))
    new.replace(at.with_suffix(".json"))


def write_start(name: str, seconds: float) -> None:
    """How long it took, as `overspill serve` keeps it."""
    folder = Path(os.environ["XDG_STATE_HOME"]) / "overspill/serving"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    (folder / f"{os.uname().nodename}-{digest}.start").write_text(json.dumps({"model": name, "seconds": seconds}))


async def serve(name: str, host: str, port: int, behaviour: Behaviour) -> None:
    if behaviour.has_child:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    began = time.monotonic()
    await asyncio.sleep(behaviour.start_s)
    if behaviour.dies_at_start:
        sys.exit("error: the weights are broken")
    tls = None
    if behaviour.certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(behaviour.certificate)
    server = Server(name, behaviour)
    write_start(name, time.monotonic() - began)
    try:
        await asyncio.start_server(server.handle, host, port, limit=1 << 20, ssl=tls)
    except OSError:
        sys.exit(f"error: port {port} is in use: another program listens there. Stop it, or give another --port")
    follows = asyncio.create_task(follow_ledger(server, **behaviour.elastic)) if behaviour.elastic else None
    if (behaviour.parks, behaviour.elastic, behaviour.plan) != (None, None, None):
        write_status(name, f"http://{host}:{port}", behaviour)
    print(f"serves {name} on port {port}", flush=True)
    stop = asyncio.Event()
    if not behaviour.ignores_sigterm:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(
            signal.SIGTERM, (lambda: os.kill(os.getpid(), 9)) if behaviour.dies_at_sigterm else stop.set
        )
    await stop.wait()
    if follows is not None:
        follows.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviours", type=Path)
    parser.add_argument("name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--log-file")
    parser.add_argument("--disable-access-log-for-endpoints")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    given = parser.parse_args()
    told = json.loads(given.behaviours.read_text()) if given.behaviours.exists() else {}
    behaviour = Behaviour(**told.get(given.name, {}))
    if behaviour.ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started = given.behaviours.with_suffix(".starts")
    with started.open("a") as file:
        file.write(f"{given.name} {os.getpid()}\n")
    is_first = started.read_text().count(f"{given.name} ") == 1
    if behaviour.says:
        print(behaviour.says, file=sys.stderr, flush=True)
    port = behaviour.prefers_taken_port if behaviour.prefers_taken_port and is_first else given.port
    asyncio.run(serve(given.name, given.host, port, behaviour))


if __name__ == "__main__":
    main()
