"""`overspill run`: a chat in the shell, with a server that runs already or one of its own."""

import contextlib
import http.server
import json
import os
import platform
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from overspill.processes import below, identity
from overspill.registry import RunEnd, list_runs, open_registry
from overspill.serve.engine_report import Phase
from overspill.serve.status import Status, folder_of, read_statuses, write_status
from tests.chat_model import make_chat_model
from tests.test_serve import START_S, TINY, environment
from tests.zygote import FORKED

WAIT_S = 60
_AGAIN_S = 10  # a chat ends well within it
PROMPT = ">>> "


class StandIn(http.server.BaseHTTPRequestHandler):
    """A server of a model: answers with words, as many and as slowly as the test says."""

    asked: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    words, word_s, refuses, broken, last = 3, 0.0, "", threading.Event(), b""
    keys: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        StandIn.asked.append((self.path, body))
        StandIn.keys.append(self.headers["authorization"])
        if StandIn.refuses and (self.path.endswith("chat/completions") or "template" not in StandIn.refuses):
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": StandIn.refuses}}).encode())
            return
        self.send_response(200)
        self.end_headers()
        try:
            for i in range(StandIn.words):
                choice = {"delta": {"content": f"w{i} "}} if "chat" in self.path else {"text": f"w{i} "}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                time.sleep(StandIn.word_s)
            self.wfile.write(StandIn.last)
        except OSError:
            StandIn.broken.set()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def server(home: dict[str, str]) -> Iterator[http.server.ThreadingHTTPServer]:
    """One that runs, as `overspill ps` knows it by its status file."""
    StandIn.asked, StandIn.words, StandIn.word_s, StandIn.refuses = [], 3, 0.0, ""
    StandIn.broken, StandIn.last = threading.Event(), b"data: [DONE]\n\n"
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    now = "2026-01-01T00:00:00+00:00"
    folder = folder_of(home)
    assert folder is not None
    write_status(
        Status(
            pid=os.getpid(), process=identity(os.getpid()), host=platform.node(), model="mine", source="mine",
            served_name="served", url=f"http://127.0.0.1:{served.server_port}", started_at=now, ready_at=now,
        ),
        folder,
    )  # fmt: skip
    try:
        yield served
    finally:
        served.shutdown()
        served.server_close()


def piped(*words: str, text: str, home: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "overspill", "run", *words], input=text, capture_output=True, text=True, timeout=START_S,
        env=environment(**home), check=False,
    )  # fmt: skip


# Ctrl-C is a signal to whoever's terminal it is.
_OWN_TERMINAL = f"""{FORKED}
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = sys.argv[1:]
from overspill.cli import main
main()
"""


class Shell:
    """`overspill` in a terminal."""

    def __init__(self, *words: str, home: dict[str, str]) -> None:
        self._terminal, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, "overspill", *words], stdin=child, stdout=child, stderr=child,
            env=environment(**home, TERM="dumb"), start_new_session=True,
        )  # fmt: skip
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str, within: float = WAIT_S) -> str:
        """What came until the text did, which is then behind us."""
        deadline = time.monotonic() + within
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._terminal], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self._terminal, 4096).decode(errors="replace")
                except OSError:  # the terminal is closed
                    assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait(self, pressing: str = "") -> int:
        """The exit code. Python's `input` misses a Ctrl-C that comes just after its prompt, so it is pressed again."""
        began = pressed = time.monotonic()
        with contextlib.suppress(OSError):
            while self.process.poll() is None:
                assert time.monotonic() < began + START_S, self.seen
                if pressing and time.monotonic() > pressed + _AGAIN_S:
                    self.type(pressing)
                    pressed = time.monotonic()
                if select.select([self._terminal], [], [], 0.2)[0]:
                    self.seen += os.read(self._terminal, 4096).decode(errors="replace")
        return self.process.wait(timeout=WAIT_S)

    def close(self) -> None:
        os.close(self._terminal)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=WAIT_S)


@contextlib.contextmanager
def shell(*words: str, home: dict[str, str]) -> Iterator[Shell]:
    made = Shell("run", *words, home=home)
    try:
        yield made
    finally:
        made.close()


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


@pytest.mark.usefixtures("server")
def test_a_piped_question_gets_one_answer(home: dict[str, str]) -> None:
    done = piped("mine", text="who are\nyou?\n", home=home)
    assert (done.returncode, done.stdout) == (0, "w0 w1 w2 \n"), done.stderr
    assert "mine is already running" in done.stderr
    assert [(path, contents(body), body["model"]) for path, body in StandIn.asked] == [
        ("/v1/chat/completions", ["who are\nyou?"], "served")
    ]
    assert read_statuses(home)[0].is_ready, "it is left running"


@pytest.mark.usefixtures("server")
def test_flags_for_a_running_server_are_not_used(home: dict[str, str]) -> None:
    done = piped("mine", "--max-model-len", "4k", text="hello", home=home)
    assert done.returncode == 0 and "the flags given here are not used" in done.stderr


@pytest.mark.usefixtures("server")
def test_a_running_server_gets_its_key(home: dict[str, str]) -> None:
    StandIn.keys.clear()
    assert piped("mine", text="hello", home={**home, "VLLM_API_KEY": "secret"}).returncode == 0
    assert piped("mine", "--api-key", "other", text="hello", home=home).returncode == 0
    assert StandIn.keys == ["Bearer secret", "Bearer other"]


@pytest.mark.usefixtures("server")
def test_an_empty_pipe_is_a_mistake(home: dict[str, str]) -> None:
    done = piped("mine", text=" \n", home=home)
    assert done.returncode == 2 and "no question on standard input" in done.stderr and not StandIn.asked


WRONG = {
    "a flag": (["{model}", "--max-modle-len", "4k"], "did you mean --max-model-len?"),
    "a value": (["{model}", "--max-model-len", "lots"], "'lots' is not a number of tokens"),
    "a card": (["{model}", "--gpu", "rtx4090", "--ram", "8GiB"], "use overspill serve --dry-run for the command"),
    "a model": (["./nosuch"], "nosuch does not exist"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_needs_no_question(home: dict[str, str], tmp_path: Path, name: str) -> None:
    """It was told that its question is missing, and only with one what is wrong."""
    words, why = WRONG[name]
    model = make_chat_model(tmp_path / "model")
    done = piped(*(word.format(model=model) for word in words), text="", home=home)
    assert done.returncode == 2 and why in done.stderr and "question" not in done.stderr


@pytest.mark.usefixtures("server")
def test_a_piece_that_is_not_json_fails_the_pipe(home: dict[str, str]) -> None:
    StandIn.last = b'event: x\ndata: {"choices": [{"delta": {"content": "w3"}}]}\n\ndata: {"cho\n\n'
    done = piped("mine", text="hello", home=home)
    assert (done.returncode, done.stdout) == (1, "w0 w1 w2 w3\n")
    assert "error: a chunk of the answer is not in OpenAI's format" in done.stderr and "Trace" not in done.stderr


@pytest.mark.usefixtures("server")
def test_a_refused_question_fails_the_pipe(home: dict[str, str]) -> None:
    StandIn.refuses = "too long"
    done = piped("mine", text="hello", home=home)
    assert (done.returncode, done.stdout) == (1, "") and "served refuses this: too long" in done.stderr


@pytest.mark.usefixtures("server")
def test_a_conversation_has_a_memory(home: dict[str, str]) -> None:
    with shell("mine", home=home) as chat:
        chat.wait_for(PROMPT)
        chat.type("one\n")
        assert "w0 w1 w2" in chat.wait_for(PROMPT)
        chat.type("two\n")
        chat.wait_for(PROMPT)
        StandIn.refuses = "too long"
        chat.type("three\n")
        assert "too long" in chat.wait_for(PROMPT)
        StandIn.refuses = ""
        chat.type("four\n")
        chat.wait_for(PROMPT)
        chat.type("/clear\n")
        chat.wait_for(PROMPT)
        chat.type("five\n")
        chat.wait_for(PROMPT)
        chat.type("/bye\n")
        assert chat.wait() == 0
    said = "w0 w1 w2 "
    assert [contents(body) for _, body in StandIn.asked] == [
        ["one"], ["one", said, "two"], ["one", said, "two", said, "three"], ["one", said, "two", said, "four"],
        ["five"],
    ]  # fmt: skip


@pytest.mark.usefixtures("server")
def test_ctrl_c_stops_an_answer_and_then_the_chat(home: dict[str, str]) -> None:
    StandIn.words, StandIn.word_s = 10_000, 0.05
    with shell("mine", home=home) as chat:
        chat.wait_for(PROMPT)
        chat.type("go on\n")
        chat.wait_for("w2 ")
        chat.type("\x03")
        chat.wait_for(PROMPT)
        assert StandIn.broken.wait(WAIT_S), "the engine is not left computing"
        StandIn.words = 1
        chat.type("and?\n")
        chat.wait_for(PROMPT)
        first, partial, second = contents(StandIn.asked[1][1])
        assert (first, second) == ("go on", "and?") and partial.startswith("w0 w1 w2 ")
        time.sleep(0.3)  # the prompt is shown, and perhaps not read yet; see `wait`
        chat.type("\x03")
        assert chat.wait(pressing="\x03") == 0


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("key", ["\x04", "/bye\n"])
def test_a_chat_ends_by_its_keys(home: dict[str, str], key: str) -> None:
    with shell("mine", home=home) as chat:
        chat.wait_for(PROMPT)
        chat.type(key)
        assert chat.wait() == 0


@pytest.mark.usefixtures("server")
def test_a_model_without_a_template_goes_on_with_the_text(home: dict[str, str]) -> None:
    StandIn.refuses = "As of transformers v4.44, default chat template is no longer allowed"
    done = piped("mine", text="Once upon", home=home)
    assert done.returncode == 0 and done.stdout == "w0 w1 w2 \n" and "no chat template" in done.stderr
    path, body = StandIn.asked[-1]
    assert path == "/v1/completions" and body["prompt"] == "Once upon"


def test_a_server_that_is_gone_ends_the_chat(home: dict[str, str], server: http.server.ThreadingHTTPServer) -> None:
    with shell("mine", home=home) as chat:
        chat.wait_for(PROMPT)
        server.shutdown()
        server.server_close()
        chat.type("hello\n")
        assert chat.wait() == 1 and "the server of served is gone" in chat.seen


def test_run_starts_a_server_and_takes_it_along(home: dict[str, str], tmp_path: Path) -> None:
    """vLLM's own, on a free port; it ends with the chat."""
    model = make_chat_model(tmp_path / "model")
    flags = [word for word in TINY if word not in ("--max-model-len", "4096")]
    with shell(str(model), *flags, home=home) as chat:
        planned = chat.wait_for(PROMPT, within=START_S)
        assert "model, " in planned and "answers at about" in planned and "--max-model-len auto chooses" in planned
        # The engine's own phases, which may be shorter than the time between two looks.
        assert any(phase in planned for phase in list(Phase)[1:-1]) and "/v1 serves" in planned
        running = below(chat.process.pid)
        assert running and read_statuses(home)[0].is_ready
        chat.type("t5 t6 t7\n")
        assert " t" in chat.wait_for(PROMPT).partition("t5 t6 t7")[2]
        chat.type("\x04")
        assert chat.wait() == 0
    assert not any(identity(pid) for pid in running) and not read_statuses(home)
    with open_registry(environ=home) as registry:
        assert [run.end for run in list_runs(registry)] == [RunEnd.STOPPED]


def test_overspill_alone_leads_to_the_page(home: dict[str, str]) -> None:
    if listens(7999):
        pytest.skip("a manager runs here")
    first = Shell(home=home)
    try:
        first.wait_for("overspill run MODEL")
        first.wait_for("is being opened")
        first.wait_for("http://127.0.0.1:7999")
        with urllib.request.urlopen("http://127.0.0.1:7999/add", timeout=30) as page:
            assert "Add a model" in page.read().decode()
        second = Shell(home=home)
        second.wait_for("The page, to find, start and try models: http://127.0.0.1:7999")
        assert second.wait() == 0, "one manager is enough"
        second.close()
        first.type("\x03")
        assert first.wait() == 0
    finally:
        first.close()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
