"""`overspill serve`, seen from outside: vLLM's real server on the CPU, a real client, and how everything ends."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from overspill.address import free_port
from overspill.processes import below, in_session
from overspill.registry import Run, RunEnd, add_model, list_runs, open_registry
from overspill.serve.engine_report import Phase
from overspill.serve.status import Status, read_statuses
from overspill.tiny import VOCAB, make_llama
from tests.command import run_overspill
from tests.dying_core import DEATH_S, dying_after_loading, engine_cores
from tests.engine import engine, random_prompt

START_S = 240
MAX_MODEL_LEN = 4096
# Weights of 2.75 MiB and 8 MiB of KV do not fit: about half of it has to spill.
TIGHT = ["--gpu-memory", "8MiB", "--ram", "12GiB", "--offload-ram", "64MiB", "--max-model-len", str(MAX_MODEL_LEN)]
TINY = [*TIGHT, "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--enforce-eager"]


def environment(**more: str) -> dict[str, str]:
    left_out = ("OVERSPILL_", "VLLM_ENABLE_V1_MULTIPROCESSING")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**clean, "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200", "VLLM_LOGGING_LEVEL": "INFO", **more}


class Serve:
    """An `overspill serve` that runs."""

    def __init__(self, model: Path | str, *flags: str, folder: Path, quiet: bool = True, **variables: str) -> None:
        self.port = free_port()
        self.home = {"XDG_STATE_HOME": str(folder / "state")}
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notices.bind(f"\0overspill-test-{self.port}")
        self.out, self.err = folder / "out", folder / "err"
        log = ["--quiet", "--log-file", str(folder / "vllm.log")] if quiet else []
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "overspill", "serve", str(model), *TINY, *log, "--port", str(self.port),
                    *(("--served-model-name", "tiny") if isinstance(model, Path) else ()), *flags,
                ],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
                env=environment(NOTIFY_SOCKET=f"@overspill-test-{self.port}", **self.home, **variables),
            )  # fmt: skip
        self.session: int | None = None

    @property
    def told(self) -> str:
        return self.err.read_text()

    def wait_for(self, text: str) -> None:
        """Until serve says it; its guard, and so the session of all it started, is known from then on."""
        deadline = time.monotonic() + START_S
        while text not in self.out.read_text() + self.told:
            assert self.process.poll() is None and time.monotonic() < deadline, self.told
            time.sleep(0.1)
        self.session = below(self.process.pid)[0]

    def started(self) -> list[int]:
        """Living processes of all that serve started."""
        return in_session(self.session) if self.session is not None else []

    def assert_nothing_is_left(self, within: float = 60) -> None:
        deadline = time.monotonic() + within
        while self.started() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not self.started()

    def notices(self) -> list[str]:
        """What systemd would have been told since the last call."""
        told = []
        with contextlib.suppress(BlockingIOError):
            while True:
                told += self._notices.recv(4096).decode().splitlines()
        return told

    def status(self) -> Status | None:
        """What other processes read of it; None if it left nothing."""
        found = read_statuses(self.home)
        assert len(found) <= 1
        return found[0] if found else None

    def runs(self) -> list[Run]:
        with open_registry(environ=self.home) as registry:
            return list_runs(registry)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^overspill_{name}(?:_total)?{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, f"no series overspill_{name}"
        return sum(map(float, found))

    def clean_up(self) -> None:
        self._notices.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
        for pid in self.started():
            os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10)


@contextlib.contextmanager
def serving(model: Path | str, *flags: str, folder: Path, quiet: bool = True, **variables: str) -> Iterator[Serve]:
    running = Serve(model, *flags, folder=folder, quiet=quiet, **variables)
    try:
        yield running
    finally:
        running.clean_up()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, whose words are t3, t4 and so on; a conversation is its messages' words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = make_llama(tmp_path_factory.mktemp("serve") / "tiny")
    special = ["<unk>", "<s>", "</s>"]
    names = [*special, *(f"t{i}" for i in range(len(special), VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """By its name in the registry. tests/test_unpacked.py executes one, as a user would."""
    folder = tmp_path_factory.mktemp("server")
    with open_registry(environ={"XDG_STATE_HOME": str(folder / "state")}) as registry:
        add_model(registry, "tiny", {"source": str(model), "vllm_args": ["--seed", "7"]})
    running = Serve("tiny", folder=folder)
    try:
        running.wait_for("/v1 serves")
        yield running
    finally:
        running.clean_up()


PROMPT = random_prompt(1, 3200)
# Of a tiny model, each may be shorter than the time between two looks.
ENGINE_PHASES = {Phase.LOADING, Phase.PROFILING, Phase.ALLOCATING, Phase.WARMING_UP}
ASKED: dict[str, Any] = {
    "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True, "return_token_ids": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """What an engine answers whose KV is all in one place, in steps and blocks of the same size."""
    with engine(model, max_model_len=MAX_MODEL_LEN, blocks=40, block_size=128, max_num_batched_tokens=2048) as plain:
        return list(plain.ask_one(PROMPT, max_tokens=12).tokens)


def words(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def test_a_client_gets_the_tokens_of_an_engine_without_spill(server: Serve, expected: list[int]) -> None:
    assert len(set(expected)) > 3 and min(expected) > 2  # special tokens are not shown
    client = server.client()
    answer = client.completions.create(model="tiny", prompt=words(PROMPT), **ASKED)
    assert answer.choices[0].text.split() == words(expected).split()
    assert answer.usage is not None and answer.usage.prompt_tokens == len(PROMPT)
    assert server.metric("spill_in_bytes") > 0 and server.metric("spill_out_bytes") > 0
    assert server.metric("store_bytes") > 0 and server.metric("pool_bytes") > 0


def test_a_stream_and_a_conversation_give_the_same(server: Serve, expected: list[int]) -> None:
    client = server.client()
    before = server.metric("spill_in_bytes")
    stream = client.completions.create(model="tiny", prompt=words(PROMPT), stream=True, **{**ASKED, "max_tokens": 40})
    streamed = [part.choices[0].text for part in stream if part.choices]
    assert "".join(streamed).split()[: len(expected)] == words(expected).split() and len(streamed) > 3
    messages: list[Any] = [{"role": "user", "content": words(PROMPT)}]
    chat = client.chat.completions.create(model="tiny", messages=messages, **ASKED)
    assert (chat.choices[0].message.content or "").split() == words(expected).split()
    parts = client.chat.completions.create(model="tiny", messages=messages, stream=True, **ASKED)
    said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert said.split() == words(expected).split()
    assert server.metric("spill_in_bytes") > before


def test_the_start_told_its_phases_and_what_became_of_the_plan(server: Serve) -> None:
    places = {phase: server.told.find(phase) for phase in Phase if phase in server.told}
    assert list(places.values()) == sorted(places.values()) and ENGINE_PHASES & places.keys()
    assert {Phase.STARTING, Phase.STARTED, Phase.READY} <= places.keys()
    assert "as planned: spill:" in server.told and "as planned: idle KV: a pool of 64 MiB" in server.told
    assert "not as planned" not in server.told
    line = server.out.read_text().strip()
    address = rf"http://127\.0\.0\.1:{server.port}/v1 serves tiny, 4,096 tokens"
    assert re.fullmatch(rf"{address}; in RAM: \S+ MiB for spilled KV and 64 MiB for idle KV", line)


def test_the_request_that_serve_prints_is_answered(server: Serve) -> None:
    server.wait_for("try it: ")
    line = re.search(r"try it: (curl .*)$", server.told, re.MULTILINE)
    assert line is not None
    answer = subprocess.run(["bash", "-c", line[1]], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(answer.stdout)["choices"][0]["text"], answer.stdout


def test_systemd_is_told_when_it_answers_and_by_serve_alone(server: Serve) -> None:
    told = server.notices()
    assert any(f"STATUS={phase}" in told[: told.index("READY=1")] for phase in ENGINE_PHASES)
    for pid in server.started():
        assert "NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_text()


def test_serving_a_model_twice_on_a_port_names_the_first_server(server: Serve, model: Path) -> None:
    again = run("serve", str(model), *TINY, "--port", str(server.port))
    assert again.returncode == 1 and f"is already served on http://127.0.0.1:{server.port}" in again.stderr
    assert re.search(r"by process \d+ \(.*vllm", again.stderr)
    known = run("serve", "tiny", *TINY, "--port", str(server.port), **server.home)
    assert known.returncode == 1
    assert f"by overspill serve of tiny, process {server.process.pid}, run 1 of the registry, since " in known.stderr


def test_other_processes_read_the_servers_status_and_phases(server: Serve, model: Path) -> None:
    status = server.status()
    assert status is not None and status.is_alive and status.is_ready and status.error is None
    assert (status.pid, status.model, status.source) == (server.process.pid, "tiny", str(model))
    assert status.url == f"http://127.0.0.1:{server.port}" and status.served_name == "tiny"
    assert status.session == server.session and status.log_file is not None and Path(status.log_file).exists()
    phases = [one.phase for one in status.phases]
    assert phases[0] is Phase.STARTING and phases[-1] is Phase.READY and ENGINE_PHASES.intersection(phases)
    assert [one.at for one in status.phases] == sorted(one.at for one in status.phases)
    assert any(line.startswith("as planned: spill:") for line in status.lines)
    memory, plan = status.memory, status.plan
    assert memory.spilled_bytes and memory.window_bytes and memory.pool_bytes == plan["offload_bytes"] == 64 << 20
    assert memory.resident_kv_bytes and memory.spilled_bytes >= plan["spilled_kv_bytes"] > 0


def test_the_registry_records_the_running_server_and_arguments(server: Serve, model: Path) -> None:
    (recorded,) = server.runs()
    assert recorded.is_running and recorded.model == "tiny" and recorded.pid == server.process.pid
    assert recorded.settings is not None and recorded.settings["source"] == str(model)
    assert recorded.argv[recorded.argv.index("--port") + 1] == str(server.port) and "--seed" in recorded.argv
    listed = json.loads(run("models", "list", "--json", **server.home).stdout)["models"]
    assert [(one["name"], one["running"]) for one in listed] == [("tiny", True)]
    edited = run("models", "edit", "tiny", "--max-model-len", "2k", **server.home)
    assert "these changes need a restart: max_model_len" in edited.stdout
    assert run("models", "rm", "tiny", **server.home).returncode == 1


def test_sigterm_ends_everything(server: Serve) -> None:
    server.notices()
    assert len(server.started()) >= 3  # the guard, the server, the engine
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0
    server.assert_nothing_is_left(within=1)
    assert "stopped" in server.told
    assert server.notices() == ["STOPPING=1"]
    assert server.status() is None
    (recorded,) = server.runs()
    assert recorded.end is RunEnd.STOPPED and recorded.exit_code == 0 and not recorded.is_running
    assert "Starting vLLM server" in run("logs", "tiny", "--lines", "10000", **server.home).stdout  # it outlives it


def test_sigkill_of_serve_ends_the_engine_too(model: Path, tmp_path: Path) -> None:
    with serving(model, folder=tmp_path, quiet=False) as running:
        running.wait_for("/v1 serves")
        assert len(running.started()) >= 3
        running.wait_for("Starting vLLM server")  # vLLM's log, on the terminal, which may come a moment later
        running.process.kill()
        running.process.wait(timeout=10)
        running.assert_nothing_is_left()
        status = running.status()
        assert status is not None and not status.is_alive and status.ended_at is None
        (recorded,) = running.runs()
        assert recorded.end is None and not recorded.is_running
        assert recorded.model == str(model)  # which is not in the registry
        (told,) = json.loads(run("ps", "--json", **running.home).stdout)["engines"]
        assert told["state"] == "failed"
        assert f"overspill serve (process {running.process.pid}) was killed while ready" in told["error"]


@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["idle", "streaming"])
def test_a_dead_engine_ends_serve_with_the_reason(model: Path, tmp_path: Path, streams: bool) -> None:
    with serving(model, folder=tmp_path) as running:
        running.wait_for("/v1 serves")
        (core,) = engine_cores(running.started())
        stream: Iterator[Any] = iter(())
        if streams:
            completions = running.client().completions
            asked = completions.create(
                model="tiny", prompt="t5 t6", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            )
            stream = iter(asked)
            next(stream)
        os.kill(core, signal.SIGKILL)
        with pytest.raises(openai.APIError) if streams else contextlib.nullcontext():
            for _ in stream:
                pass
        assert running.process.wait(timeout=DEATH_S) == 1
        running.assert_nothing_is_left(within=1)
        error = running.told.partition("error: ")[2]
        why = "the engine core was killed by SIGKILL; the kernel counts no OOM kill, so another program or a user"
        assert re.match(rf"vLLM ended after \d+ s: {why}", error)
        assert f"the engine core (process {core}) was killed by SIGKILL" in error.splitlines()[-1]
        assert "EngineDeadError" not in error and "nanobind" not in error
        status = running.status()
        assert status is not None and not status.is_alive and why in (status.error or "")
        (recorded,) = running.runs()
        assert recorded.end is RunEnd.KILLED and recorded.exit_code == 128 + signal.SIGKILL
        assert why in (recorded.detail or "")


def test_a_core_that_fails_after_loading_fails_the_start(model: Path, tmp_path: Path) -> None:
    """vLLM's server has been told by then that the core is ready, and waits for its first answer for ever."""
    with serving(model, folder=tmp_path, **dying_after_loading(tmp_path, "raise ValueError('a flaw')")) as running:
        running.wait_for("starting to listen")
        assert running.process.wait(timeout=DEATH_S) == 1
        running.assert_nothing_is_left(within=1)
        error = running.told.partition("error: ")[2].splitlines()[0]
        assert re.match(r"vLLM ended after \d+ s while starting to listen: ValueError: a flaw$", error)
        status = running.status()
        assert status is not None and status.ready_at is None and error in (status.error or "")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_it_starts_ends_everything(model: Path, tmp_path: Path, sign: signal.Signals) -> None:
    with serving(model, folder=tmp_path) as running:
        running.wait_for("starting vLLM")
        while len(running.started()) < 2:
            time.sleep(0.05)
        time.sleep(4)
        running.process.send_signal(sign)
        assert running.process.wait(timeout=120) == (0 if sign is signal.SIGTERM else -signal.SIGKILL)
        running.assert_nothing_is_left()


FAILING = {
    "a value that vLLM does not take": (["--hf-overrides", "x"], "vLLM does not accept its settings (ModelConfig)"),
    "a model whose weights are missing": (["--hf-overrides", '{"num_hidden_layers": 9}'], "weights"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_start_that_fails_says_why(model: Path, tmp_path: Path, name: str) -> None:
    flags, why = FAILING[name]
    with serving(model, *flags, folder=tmp_path) as running:
        assert running.process.wait(timeout=START_S) == 1
        error = running.told.partition("error: vLLM ended")[2]
        assert why in error.splitlines()[0], running.told
        status = running.status()
        assert status is not None and why in (status.error or "") and status.ready_at is None
        assert "Traceback" not in running.told


# Without vLLM.


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_overspill(*arguments, env=environment(**more))


def test_a_key_protects_the_server_and_is_shown_nowhere(model: Path, tmp_path: Path) -> None:
    with serving(model, "--api-key", "hunter2", folder=tmp_path) as running:
        running.wait_for("/v1 serves")
        assert len(running.started()) > 1
        command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running.started()]
        assert not any(b"hunter2" in line for line in command_lines), "everybody may read them"
        assert "set VLLM_API_KEY in the environment instead" in running.told
        with pytest.raises(openai.AuthenticationError):
            running.client().models.list()
        assert running.client().with_options(api_key="hunter2").models.list().data[0].id == "tiny"
        assert running.runs()[0].is_running
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert (tmp_path / "vllm.log").stat().st_size and kept == []


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_dry_run_hides_secrets(model: Path, as_json: tuple[str, ...]) -> None:
    flags = ["--api-key", "hunter2", "--otlp-traces-endpoint=http://u:hunter2@h", "--hf-overrides", JSON_WITH_SECRET]
    answer = run("serve", str(model), *TINY, "--dry-run", *as_json, *flags)
    assert answer.returncode == 0 and "VLLM_API_KEY" in answer.stdout and "***" in answer.stdout
    assert "warning: --hf-overrides" in answer.stderr, "a message that tells the flag's value"
    assert "hunter2" not in answer.stdout + answer.stderr


JSON_WITH_SECRET = '{"api_key": "hunter2"}'


def test_a_dry_run_prints_a_command_that_can_be_pasted(model: Path) -> None:
    answer = run("serve", str(model), *TINY, "--dry-run", "--served_model_name=a b", "--max-num-seqs", "3")
    assert answer.returncode == 0, answer.stderr
    line = answer.stdout.strip()
    assert "\n" not in line and "8 MiB" in answer.stderr  # the plan, out of the way
    pasted = subprocess.run(
        ["bash", "-c", f"set -- {line}; printf '%s\\n' \"$@\""], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    told = json.loads(run("serve", str(model), *TINY, "--dry-run", "--json", "--served_model_name=a b",
                          "--max-num-seqs", "3").stdout)  # fmt: skip
    # The tests' own environment names a size of the KV cache, which would win over the plan's.
    assert told["environment"] == {"VLLM_CPU_KVCACHE_SPACE": None}
    assert pasted == ["env", "-u", "VLLM_CPU_KVCACHE_SPACE", *told["command"]]
    assert told["command"][-1] == "--served_model_name=a b"
    assert told["command"][told["command"].index("--max-num-seqs") + 1] == "3"
    assert told["plan"]["spilled_kv_bytes"] > 0 and told["plan"]["vllm_args"][0] == "--max-model-len"


def test_flags_of_vllms_own_win_and_are_told(model: Path) -> None:
    flags = ["--gpu-memory-utilization", "0.5", "--max_num_batched_tokens=512", "--", "--kv-cache-memory-bytes", "1M"]
    answer = run("serve", str(model), *TINY, "--dry-run", *flags)
    assert answer.returncode == 0, answer.stderr
    assert "--max-num-batched-tokens 512" in answer.stdout and "2048" not in answer.stdout, "planned with it"
    assert "warning: --kv-cache-memory-bytes 1M replaces the plan's --kv-cache-memory-bytes" in answer.stderr
    assert answer.stdout.count("--kv-cache-memory-bytes") == 1
    assert "warning: --gpu-memory-utilization does nothing on a CPU" in answer.stderr
    assert "--gpu-memory-utilization" not in answer.stdout


MISTAKES: dict[str, tuple[int, list[str], str]] = {
    "a setting twice": (2, ["serve", "{model}", "{tiny}", "--max_model_len", "1000"], "say the same thing twice"),
    "no model": (2, ["serve"], "MODEL"),
    "a flag before the model": (2, ["serve", "--trust-remote-code", "{model}"], "the model comes first"),
    "two models": (2, ["serve", "{model}", "{model}", "{tiny}"], "neither a flag nor a flag's value"),
    "no such folder": (2, ["serve", "/nonexistent/model", "{tiny}"], "nonexistent"),
    "an empty folder": (2, ["serve", "{empty}", "{tiny}"], "config.json"),
    "more RAM than there is": (2, ["serve", "{model}", "{tiny}", "--ram", "60TiB"], "of RAM, and"),
    "no GPU memory": (2, ["serve", "{model}", "{tiny}", "--gpu-memory", "0"], "needs some GPU memory"),
    "not a size": (2, ["serve", "{model}", "--device", "cpu", "--ram", "lots"], "--ram"),
    "a size with a space": (1, ["serve", "{model}", "--device", "cpu", "--gpu-memory", "1 mib", "--ram", "4 gib"],
                            "does not fit"),
    "a negative size": (2, ["serve", "{model}", "--device", "cpu", "--gpu-memory", "-1"], "--gpu-memory"),
    "no tokens": (2, ["serve", "{model}", "--device", "cpu", "--max-model-len", "0"], "not a number of tokens"),
    "not a port": (2, ["serve", "{model}", "{tiny}", "--port", "http"], "not a port"),
    "a port too large": (2, ["serve", "{model}", "{tiny}", "--port", "70000"], "not a port"),
    "not a port, raw": (2, ["serve", "{model}", "{tiny}", "--", "--port", "x"], "not a whole number"),
    "a flag that neither has": (2, ["serve", "{model}", "{tiny}", "--no-such-flag"], "neither Overspill nor vLLM"),
    "a port in use": (1, ["serve", "{model}", "{tiny}", "--port", "{taken}"], "is in use"),
    "no address of this machine": (1, ["serve", "{model}", "{tiny}", "--host", "192.0.2.1"], "no address"),
    "not a host": (2, ["serve", "{model}", "{tiny}", "--host", "no such host"], "is not a host"),
    "an unknown device": (2, ["serve", "{model}", "--device", "tpu"], "--device"),
    "the other build of vLLM": (2, ["serve", "{model}", "--device", "cuda"], "--gpu"),
    "another machine's card": (2, ["serve", "{model}", "--gpu", "24GiB", "--ram", "64GiB"], "--dry-run"),
    "the model as a flag": (2, ["serve", "{model}", "{tiny}", "--", "--model", "other"], "--model"),
    "flags in a file": (2, ["serve", "{model}", "{tiny}", "--config", "flags.yaml"], "--config"),
    "a socket": (2, ["serve", "{model}", "{tiny}", "--uds", "/tmp/socket"], "--uds"),
    "weights to RAM on a CPU": (2, ["serve", "{model}", "{tiny}", "--cpu-offload-gb", "1"], "does nothing"),
    "weights without a size": (2, ["serve", "{model}", "{tiny}", "--offload-backend", "uva"], "--cpu-offload-gb"),
    "prefetch without groups": (2, ["serve", "{model}", "{tiny}", "--offload-backend=prefetch"],
                                "--offload-group-size"),
    "two offloaders": (2, ["serve", "{model}", "--gpu", "24GiB", "--ram", "64GiB", "--dry-run", "--cpu-offload-gb", "4",
                           "--offload_group_size", "2"], "one offloader"),
    "more weights than there are": (2, ["serve", "{model}", "--gpu", "24GiB", "--ram", "64GiB", "--dry-run",
                                        "--cpu-offload-gb", "40"], "--weights-ram is 40 GiB, and the layers of"),
    "weights twice": (2, ["serve", "{model}", "--gpu", "24GiB", "--ram", "64GiB", "--dry-run", "--weights-ram", "1KiB",
                          "--cpu-offload-gb", "1"], "say the same thing twice"),
    "a share of the GPU and a size": (2, ["serve", "{model}", "--gpu", "24GiB", "--ram", "64GiB", "--dry-run",
                                          "--gpu-memory", "8GiB", "--gpu-memory-utilization", "0.5"], "leave one"),
    "not a share": (2, ["serve", "{model}", "{tiny}", "--gpu-memory-utilization", "92"], "above 0 and at most 1"),
    "none at once": (2, ["serve", "{model}", "{tiny}", "--at-once", "0"], "not a whole number above 0"),
    "not a number of GiB": (2, ["serve", "{model}", "--gpu", "24GiB", "--ram", "64GiB", "--dry-run",
                                "--cpu-offload-gb", "all"], "not a number"),
    "it does not fit": (1, ["serve", "{model}", "--device", "cpu", "--gpu-memory", "1MiB", "--ram", "4GiB"],
                        "does not fit"),
    "longer than the model's positions": (1, ["serve", "{model}", "--device", "cpu", "--gpu-memory", "128MiB",
                                              "--ram", "5GiB", "--dtype", "float32", "--max-model-len", "40k"],
                                          "40,960 tokens are more than the 32,768"),
    "no tokenizer": (1, ["serve", "{bare}", "{tiny}", "--port", "{free}"], "there is no tokenizer in "),
    "JSON of a server": (2, ["serve", "{model}", "{tiny}", "--json"], "--dry-run"),
    "a log that cannot be": (2, ["serve", "{model}", "{tiny}", "--log-file", "/proc/none/log"], "--log-file"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_the_right_exit_code(
    model: Path, llama: Path, tmp_path: Path, name: str
) -> None:
    code, arguments, said = MISTAKES[name]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        places = {"{model}": str(model), "{empty}": str(tmp_path), "{taken}": str(taken.getsockname()[1]),
                  "{bare}": str(llama), "{free}": str(free_port())}  # fmt: skip
        given = [word for one in arguments for word in (TINY if one == "{tiny}" else [places.get(one, one)])]
        answer = run(*given, CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == code, answer.stdout + answer.stderr
    assert said in answer.stderr.splitlines()[-1] or name == "no model", answer.stderr
    assert "Traceback" not in answer.stderr and answer.stdout == ""


def test_who_listens_on_a_port_is_named(model: Path) -> None:
    code = """
import socket, time
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
time.sleep(99)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        answer = run("serve", str(model), *TINY, "--port", port)
        listener.kill()
    assert answer.returncode == 1
    assert f"port {port} is in use: process {listener.pid} ({sys.executable}" in answer.stderr


PAGE = Path(__file__).parents[1] / "docs/serve.md"


def test_what_the_page_says_to_try_without_a_gpu_works(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Try it without a GPU")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    serve, curl = [
        shlex.split(one.replace("\\\n", " ")) for one in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    ]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    port = free_port()
    words = [sys.executable, "-m", *serve, "--port", str(port)]
    home = environment(XDG_STATE_HOME=str(tmp_path / "state"))
    with subprocess.Popen(words, cwd=tmp_path, env=home, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert f"http://127.0.0.1:{port}/v1 serves tiny" in running.stdout.readline()
            url = curl[1].replace(":8000/", f":{port}/")
            headers = dict([curl[curl.index("-H") + 1].split(": ")])
            asked = urllib.request.Request(url, curl[curl.index("-d") + 1].encode(), headers)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert len(set(json.load(answer)["choices"][0]["token_ids"])) > 3
        finally:
            running.send_signal(signal.SIGTERM)
            assert running.wait(timeout=60) == 0


def test_documented_flags_match_the_help() -> None:
    page = PAGE.read_text()
    table = page.partition("## Flags")[2].partition("\n## ")[0]
    told = run("serve", "--help")
    assert "Example: overspill serve" in told.stdout
    flags = set(re.findall(r"^\s+(--[a-z-]+)", told.stdout, re.MULTILINE)) - {"--help"}
    assert flags and set(re.findall(r"^\| `(--[a-z-]+)`", table, re.MULTILINE)) == flags
