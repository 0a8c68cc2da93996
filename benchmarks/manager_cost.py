"""What the manager costs: its own CPU and memory with one page open, and what its gateway adds to a request.

idle      `overspill manager` as users run it, with one real engine that is loaded and one page open on the
          dashboard, at one sample a second: CPU time of the manager's process, and its memory.
gateway   a number of streams that ask for one answer after the other, straight from a server and through the
          gateway in front of the same server, in turns. The server is a stand-in that sends a token at fixed
          times, so what is added can be told from how long a model takes. It runs without a GPU.

python benchmarks/manager_cost.py --seconds 60 --streams 64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

import record
from overspill.address import free_port
from record import Json, say
from servers import Server, started

NAME = "tiny"
START_SECONDS = 240.0
# Imports, first pages and caches are not what an hour of watching costs.
WARM_SECONDS = 10.0
SIDES = ("direct", "gateway")
SENT_AT = re.compile(rb'"at": ([\d.]+)')


# Idle: the manager as users run it.


@contextlib.contextmanager
def manager(command: list[str], folder: Path, port: int) -> Iterator[Server]:
    ours = [name for name in os.environ if name.startswith("OVERSPILL_")]
    places = {"XDG_STATE_HOME": str(folder / "state"), "HF_HUB_CACHE": str(folder / "hub")}
    # It stops its engines, which are in sessions of their own; hence the patience.
    with started(command, folder / "manager.log", port, dict.fromkeys(ours, "") | places, patience=120) as server:
        try:
            server.wait("/healthz", START_SECONDS)
        except RuntimeError as error:
            raise SystemExit("\n".join([f"the manager: {error}; its last lines:", *server.tail()])) from error
        yield server


def start_model(server: Server) -> Json:
    answer = server.request(f"/api/engines/start/{NAME}", {}, START_SECONDS)
    if answer.is_error:
        raise SystemExit(f"the engine does not start: {answer.text}")
    engine: Json = answer.json()
    return engine


class EventStream(threading.Thread):
    """What a page on the dashboard asks for: itself, its charts with their history, then events."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.num_samples = 0

    def run(self) -> None:
        for path in ("/", "/static/manager.css", "/static/manager.js", "/api/charts", "/api/history"):
            self._server.request(path, seconds=10).raise_for_status()
        url = f"http://127.0.0.1:{self._server.port}/events/dashboard"
        with contextlib.suppress(httpx.TransportError), httpx.stream("GET", url, timeout=60) as events:
            for line in events.iter_lines():
                self.num_samples += line == "event: sample"


@contextlib.contextmanager
def open_page(server: Server, folder: Path, chromium: str | None) -> Iterator[EventStream | None]:
    if chromium is None:
        stream = EventStream(server)
        stream.start()
        yield stream
        return
    command = [
        chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={folder / 'browser'}", "--remote-debugging-port=0", f"http://127.0.0.1:{server.port}/",
    ]  # fmt: skip
    with started(command, folder / "browser.log"):
        yield None


def cpu_seconds(server: Server) -> float:
    """Of one process, without its children."""
    times = server.process.cpu_times()
    return float(times.user + times.system)


def measure_idle(arguments: argparse.Namespace, folder: Path) -> Json:
    port = free_port()
    (folder / "models").mkdir()
    command = [sys.executable, "-m", "overspill", "manager", "--port", str(port)]
    chromium = None if arguments.no_browser else shutil.which("chromium")
    register_model(folder)  # without one, the manager leads to the page that finds models
    with manager([*command, "--models-folder", str(folder / "models")], folder, port) as server:
        if not arguments.no_engine:
            say("starting an engine of the embedded model")
            start_model(server)
        with open_page(server, folder, chromium) as stream:
            time.sleep(WARM_SECONDS)
            shares, sizes = [], []
            began, spent = time.monotonic(), cpu_seconds(server)
            while time.monotonic() - began < arguments.seconds:
                before, spent_before = time.monotonic(), cpu_seconds(server)
                time.sleep(min(5.0, arguments.seconds))
                shares.append((cpu_seconds(server) - spent_before) / (time.monotonic() - before))
                sizes.append(server.process.memory_info().rss)
            seconds = time.monotonic() - began
            share = (cpu_seconds(server) - spent) / seconds
            # Connections without a request are closed after seconds, so this is the page's stream of events.
            if not any(one.status == psutil.CONN_ESTABLISHED for one in server.process.net_connections("tcp")):
                raise SystemExit("no page is open any more: nothing is connected to the manager")
        samples = stream.num_samples if stream is not None else None
    say(f"idle: {share:.2%} of a core, {max(sizes) / 1e6:.1f} MB")
    return {
        "page": "chromium" if chromium else "a client of its events",
        "engine": None if arguments.no_engine else "the embedded model",
        "seconds": seconds,
        "samples_received": samples,
        "cpu_share_of_a_core": share,
        "resident_bytes": max(sizes),
        "cpu_share_by_interval": shares,
        "machine_load": list(os.getloadavg()),
    }


def register_model(folder: Path) -> None:
    from overspill.registry import add_model, open_registry
    from overspill.tiny import make_llama

    settings = {
        "source": str(make_llama(folder / "models" / NAME)), "max_model_len": 2048, "gpu_memory": "64MiB",
        "ram": "4GiB", "dtype": "float32", "max_num_seqs": 4, "enforce_eager": True,
        "vllm_args": ["--skip-tokenizer-init"],
    }  # fmt: skip
    with open_registry(environ={"XDG_STATE_HOME": str(folder / "state")}) as registry:
        add_model(registry, NAME, settings)


# The gateway, beside the server that it stands before.


@dataclass
class Timed:
    first_token: list[float] = field(default_factory=list)
    """Seconds from asking."""
    token: list[float] = field(default_factory=list)
    """Seconds from when the server sent it, of each."""


class Stream:
    """One client that keeps its connection, and asks for one answer after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Stream:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, num_tokens: int, timed: Timed) -> None:
        body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if not status.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a request was refused: {status.splitlines()[0].decode()}")
        seen = 0
        while seen < num_tokens:
            event = await self._reader.readuntil(b"\n\n")
            now = time.perf_counter()
            if not (sent := SENT_AT.findall(event)):
                continue  # a sign of life, on a machine so busy that no token came in time
            timed.token.append(now - float(sent[-1]))
            if not seen:
                timed.first_token.append(now - began)
            seen += 1
        await self._reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")

    def close(self) -> None:
        self._writer.close()


async def ask_all(port: int, arguments: argparse.Namespace, timed: Timed) -> None:
    streams = [await Stream.open(port) for _ in range(arguments.streams)]
    # Not all at once: a burst of first tokens would wait for each other wherever they go.
    draw = random.Random(7)
    starts = [draw.random() * arguments.tokens * arguments.token_ms / 1000 for _ in streams]

    async def one(stream: Stream, start: float) -> None:
        await asyncio.sleep(start)
        for _ in range(arguments.requests):
            await stream.ask(arguments.tokens, timed)

    await asyncio.gather(*(one(stream, start) for stream, start in zip(streams, starts)))
    for stream in streams:
        stream.close()


def measure_gateway(arguments: argparse.Namespace, folder: Path) -> Json:
    port = free_port()
    command = [sys.executable, __file__, "--token-ms", str(arguments.token_ms), "--serve", str(folder), str(port)]
    with manager(command, folder, port) as server:
        ports = {"gateway": port, "direct": int(start_model(server)["url"].rpartition(":")[2])}
        for side in SIDES:
            asyncio.run(ask_all(ports[side], arguments, Timed()))
        rounds: dict[str, list[Timed]] = {side: [] for side in SIDES}
        spent, began = 0.0, time.monotonic()
        for number in range(arguments.rounds):
            for side in SIDES if number % 2 else reversed(SIDES):
                timed, before = Timed(), cpu_seconds(server)
                asyncio.run(ask_all(ports[side], arguments, timed))
                rounds[side].append(timed)
                spent += (cpu_seconds(server) - before) * (side == "gateway")
        seconds = time.monotonic() - began
        sizes = server.process.memory_info().rss
    result: Json = {"seconds": seconds, "machine_load": list(os.getloadavg()), "resident_bytes": sizes}
    num_tokens = arguments.rounds * arguments.requests * arguments.streams * arguments.tokens
    result["gateway_cpu_microseconds_per_token"] = 1e6 * spent / num_tokens
    for what in ("first_token", "token"):
        medians = {side: [statistics.median(getattr(one, what)) for one in rounds[side]] for side in SIDES}
        entry: Json = {
            f"{side}_ms": record.spread([1000 * value for one in rounds[side] for value in getattr(one, what)])
            for side in SIDES
        }
        entry["added_p50_ms"] = entry["gateway_ms"]["median"] - entry["direct_ms"]["median"]
        entry["added_p50_ms_by_round"] = [1000 * (b - a) for a, b in zip(medians["direct"], medians["gateway"])]
        result[what] = entry
        say(f"gateway, {what.replace('_', ' ')}: {entry['added_p50_ms']:+.2f} ms at p50 of {arguments.streams} streams")
    return result


def serve(folder: Path, port: int, token_ms: float) -> None:
    """A manager as it is, except that its engines are stand-ins."""
    from overspill.manager.backend import OwnProcesses
    from overspill.manager.fleet import Options
    from overspill.manager.needs import Memory, Need
    from overspill.manager.web.server import run_until_stopped
    from overspill.manager.web.setup import Setup
    from overspill.registry import add_model, open_registry

    need = Need(least=Memory(ram_bytes=1), takes=Memory(ram_bytes=1))
    program = (sys.executable, __file__, "--token-ms", str(token_ms), "--stand-in")
    options = Options(
        folder=folder / "manager", backend=OwnProcesses(program=program), memory=Memory(ram_bytes=1 << 40),
        reckon=lambda model, evictable: need,
    )  # fmt: skip
    with open_registry(f"sqlite:///{folder}/registry.db") as registry:
        add_model(registry, NAME, {"source": "stand-in/stand-in"})
        run_until_stopped(Setup(folder=folder / "manager", port=port), registry, say, options)


async def stand_in(port: int, token_seconds: float) -> None:
    """A server that sends tokens at fixed times, each with the time at which it was sent."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0"
                )
                body = await reader.readexactly(int(length.partition(b":")[2]))
                if head.startswith(b"POST"):
                    await answer(writer, json.loads(body)["max_tokens"])
                else:
                    told = json.dumps({"object": "list", "data": [{"id": NAME}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(told) + told)
        writer.close()

    async def answer(writer: asyncio.StreamWriter, num_tokens: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        begin = time.perf_counter()
        for i in range(num_tokens):
            await asyncio.sleep(max(0.0, begin + (i + 1) * token_seconds - time.perf_counter()))
            choice = {"index": 0, "text": f" word{i}", "logprobs": None, "finish_reason": None}
            event = {"id": "cmpl-1", "object": "text_completion", "model": NAME, "choices": [choice]}
            data = b"data: " + json.dumps({**event, "at": time.perf_counter()}).encode() + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    server = await asyncio.start_server(handle, "127.0.0.1", port)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    server.close()


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the manager is watched with a page open")
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--rounds", type=int, default=10, help="turns of direct and gateway")
    parser.add_argument("--requests", type=int, default=2, help="answers per stream and turn")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--token-ms", type=float, default=50.0, help="between two tokens of a stream")
    parser.add_argument("--no-engine", action="store_true", help="watch a manager without an engine")
    parser.add_argument("--no-browser", action="store_true", help="a client of the page's events instead of chromium")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--stand-in", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve:
        serve(Path(arguments.serve[0]), int(arguments.serve[1]), arguments.token_ms)
        return
    if arguments.stand_in:
        words = arguments.stand_in  # as for `overspill serve`
        asyncio.run(stand_in(int(words[words.index("--port") + 1]), arguments.token_ms / 1000))
        return
    out = arguments.out or record.default_path("manager-cost")
    hidden = ("serve", "stand_in")
    settings = {name: value for name, value in record.settings(arguments).items() if name not in hidden}
    result = record.header("manager-cost", settings)
    for name, measure in (("gateway", measure_gateway), ("idle", measure_idle)):
        with tempfile.TemporaryDirectory(prefix="manager-cost-") as folder:
            result[name] = measure(arguments, Path(folder))
        record.write(out, result)
    say(f"written to {out}")


if __name__ == "__main__":
    main()
