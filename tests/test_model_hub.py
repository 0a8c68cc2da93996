"""Models on the hub, here a server of our own that answers ranges as the hub does."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from overspill.figures import Origin
from overspill.launch.launch import Launch
from overspill.model import ModelError, hub
from overspill.model.config import Config
from overspill.model.derived import derive_tensors
from overspill.model.source import read_model
from tests import model_configs as models
from tests.model_tensors import header_of

NAME = "Qwen/Qwen3-30B-A3B"
CONFIG: dict[str, Any] = {**models.qwen3_30b_a3b(), "num_hidden_layers": 3}
TENSORS = derive_tensors(Config(CONFIG, where="config.json"), dtype="bfloat16", is_tied=False, quantization=None)
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@dataclass
class Hub:
    """Files by name; of a weight file only the header is there, and its full size is announced."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    token: str | None = None
    ranges: bool = True
    status: int | None = None
    stalls: bool = False
    redirects_to: str | None = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    tokens_seen: list[str | None] = field(default_factory=list)
    bytes_sent: int = 0

    def add_weights(self, name: str, tensors: list[Any]) -> None:
        header = header_of(tensors)
        self.files[name] = len(header).to_bytes(8, "little") + header
        self.sizes[name] = len(self.files[name]) + sum(tensor.num_bytes for tensor in tensors)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub, name = self.hub, self.path.rpartition("/")[2]
        asked = self.headers.get("Range")
        hub.asked.append((name, asked))
        hub.paths.append(self.path)
        hub.tokens_seen.append(self.headers.get("Authorization"))
        if hub.stalls:
            threading.Event().wait(2)
        if hub.redirects_to is not None:
            return self._answer(302, b"", {"Location": f"{hub.redirects_to}{self.path}"})
        if hub.status is not None:
            return self._answer(hub.status, b"no")
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._answer(401, b"", {"X-Error-Code": "GatedRepo"})
        if not re.fullmatch(rf"/{NAME}/resolve/main/[^/]+", self.path):
            missing = "RevisionNotFound" if NAME in self.path else "RepoNotFound"
            return self._answer(404, b"", {"X-Error-Code": missing})
        if name not in hub.files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        content, size = hub.files[name], hub.sizes.get(name, len(hub.files[name]))
        if asked is None or not hub.ranges:
            # A weight file in full: more than anybody should wait for.
            return self._answer(200, content, {"Content-Length": str(size)}, then_zeros=size - len(content))
        begin, end = map(int, asked.removeprefix("bytes=").split("-"))
        end = min(end, size - 1)
        part = content[begin : end + 1].ljust(end + 1 - begin, b"\0")
        return self._answer(206, part, {"Content-Range": f"bytes {begin}-{end}/{size}"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, then_zeros: int = 0) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        try:
            self.wfile.write(body)
            self.hub.bytes_sent += len(body)
            for _ in range(0, then_zeros, 1 << 16):
                self.wfile.write(bytes(1 << 16))
                self.hub.bytes_sent += 1 << 16
        except OSError:  # they have heard enough
            self.close_connection = True


def serve() -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": state}))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def server() -> Iterator[Hub]:
    """Three shards and an index."""
    for state in serve():
        state.files["config.json"] = json.dumps(CONFIG).encode()
        third = len(TENSORS) // 3
        parts = [TENSORS[:third], TENSORS[third : 2 * third], TENSORS[2 * third :]]
        for shard, tensors in zip(SHARDS, parts, strict=True):
            state.add_weights(shard, tensors)
        placed = {tensor.name: shard for shard, part in zip(SHARDS, parts, strict=True) for tensor in part}
        state.files["model.safetensors.index.json"] = json.dumps({"weight_map": placed}).encode()
        yield state


elsewhere = pytest.fixture(serve, name="elsewhere")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def environ(server: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path)}


def test_headers_are_read_and_weights_are_not(server: Hub, environ: dict[str, str]) -> None:
    facts = read_model(NAME, environ=environ)
    assert (facts.name, facts.folder) == (NAME, None)
    assert facts.weights.source is Origin.MEASURED
    assert facts.weights.total_bytes == sum(tensor.num_bytes for tensor in TENSORS) > 4 * 10**9
    assert sum(facts.weights.expert_bytes) == 3 * 128 * 3 * 2048 * 768 * 2
    assert server.bytes_sent < 2 * 10**6
    assert all(asked is not None for name, asked in server.asked if name in SHARDS)


def test_one_file_needs_no_index(server: Hub, environ: dict[str, str]) -> None:
    expected = read_model(NAME, environ=environ)
    server.files = {"config.json": server.files["config.json"]}
    server.add_weights("model.safetensors", TENSORS)
    assert read_model(NAME, environ=environ) == expected


def test_a_long_header_takes_a_second_request(
    server: Hub, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_model(NAME, environ=environ)
    server.asked.clear()
    monkeypatch.setattr(hub, "FIRST_BYTES", 1000)
    assert read_model(NAME, environ=environ) == expected
    assert {asked for name, asked in server.asked if name == SHARDS[0]} == {
        "bytes=0-999",
        f"bytes=1000-{len(server.files[SHARDS[0]]) - 1}",
    }


def test_a_server_ignoring_ranges_is_not_read_to_the_end(server: Hub, environ: dict[str, str]) -> None:
    expected = read_model(NAME, environ=environ)
    server.ranges, server.bytes_sent = False, 0
    assert read_model(NAME, environ=environ) == expected
    assert server.bytes_sent < 200 * 10**6 < expected.weights.total_bytes


def test_without_weights_on_the_hub_they_are_derived(server: Hub, environ: dict[str, str]) -> None:
    server.files = {"config.json": server.files["config.json"]}
    facts = read_model(NAME, environ=environ)
    assert facts.weights.source is Origin.DERIVED
    assert facts.weights.total_bytes == sum(tensor.num_bytes for tensor in TENSORS)


def test_modelopt_says_in_a_file_of_its_own_how_it_quantised(server: Hub, environ: dict[str, str]) -> None:
    written = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
    }
    server.files["hf_quant_config.json"] = json.dumps(written).encode()
    facts = read_model(NAME, environ=environ)
    assert (facts.quantization, facts.kv_cache_dtype) == ("modelopt_fp4", "fp8_e4m3")


def test_a_gated_model_needs_the_token(server: Hub, environ: dict[str, str]) -> None:
    server.token = "hf_secret"
    with pytest.raises(ModelError, match="accept its conditions on its page and set HF_TOKEN") as caught:
        read_model(NAME, environ=environ)
    with pytest.raises(ModelError, match=r"does not show config\.json"):
        read_model(NAME, environ={**environ, "HF_TOKEN": "hf_wrong"})
    assert "hf_wrong" not in str(caught.value)
    # Copied with its line end, as it often is.
    assert read_model(NAME, environ={**environ, "HF_TOKEN": "hf_secret\n"}).num_layers == 3


def test_the_token_does_not_follow_a_redirect_to_another_host(
    server: Hub, elsewhere: Hub, environ: dict[str, str]
) -> None:
    elsewhere.files, elsewhere.sizes = server.files, server.sizes
    server.redirects_to = elsewhere.url.replace("127.0.0.1", "localhost")
    assert read_model(NAME, environ={**environ, "HF_TOKEN": "hf_secret"}).num_layers == 3
    assert set(server.tokens_seen) == {"Bearer hf_secret"}
    assert set(elsewhere.tokens_seen) == {None}


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [("Qwen/NoSuchModel", "main", "knows no Qwen/NoSuchModel"), (NAME, "v9", r"knows no .* \(revision v9\)")],
)
def test_what_the_hub_does_not_have_is_not_found(
    server: Hub, environ: dict[str, str], name: str, revision: str, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read_model(name, revision=revision, environ=environ)


def test_a_revision_with_a_slash_stays_one_part_of_the_path(server: Hub, environ: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="revision refs/pr/1"):
        read_model(NAME, revision="refs/pr/1", environ=environ)
    assert server.paths == [f"/{NAME}/resolve/refs%2Fpr%2F1/config.json"]


def test_a_repository_without_a_config_is_no_model(server: Hub, environ: dict[str, str]) -> None:
    del server.files["config.json"]
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_model(NAME, environ=environ)


def test_an_error_page_is_no_config(server: Hub, environ: dict[str, str]) -> None:
    server.files["config.json"] = b"<!DOCTYPE html>"
    with pytest.raises(ModelError, match="is not JSON"):
        read_model(NAME, environ=environ)


def test_a_shard_that_the_hub_lacks_is_named(server: Hub, environ: dict[str, str]) -> None:
    del server.files[SHARDS[1]]
    with pytest.raises(ModelError, match=f"names {SHARDS[1]}, which the repository does not hold"):
        read_model(NAME, environ=environ)


def test_a_shard_of_another_size_is_refused(server: Hub, environ: dict[str, str]) -> None:
    server.sizes[SHARDS[1]] -= 1
    with pytest.raises(ModelError, match="its header describes"):
        read_model(NAME, environ=environ)


def test_an_index_that_points_out_of_the_repository_is_refused(server: Hub, environ: dict[str, str]) -> None:
    placed = {"weight_map": {"a": "../../other/resolve/main/model.safetensors"}}
    server.files["model.safetensors.index.json"] = json.dumps(placed).encode()
    with pytest.raises(ModelError, match="in the same folder was expected"):
        read_model(NAME, environ=environ)
    assert {name for name, _ in server.asked} <= {"config.json", "hf_quant_config.json", "model.safetensors.index.json"}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble_is_said_to_be(server: Hub, environ: dict[str, str], status: int) -> None:
    server.status = status
    with pytest.raises(ModelError, match=f"answered {status}"):
        read_model(NAME, environ=environ)


def test_a_hub_that_does_not_answer_is_given_up(
    server: Hub, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.stalls = True
    monkeypatch.setattr(hub, "TIMEOUT", httpx.Timeout(0.2))
    with pytest.raises(ModelError, match=r"did not answer within 0\.2 s"):
        read_model(NAME, environ=environ)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no.such.host.invalid", "nonsense", "http://[::1"])
def test_a_hub_that_is_not_there_is_said_to_be_unreachable(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="could not be reached") as caught:
        read_model(NAME, environ={"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)})
    assert "\n" not in str(caught.value)


def test_offline_means_that_nobody_is_asked(server: Hub, environ: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        read_model(NAME, environ={**environ, "HF_HUB_OFFLINE": "1"})
    assert server.asked == []


def test_the_stored_token_is_used_as_by_vllm(server: Hub, environ: dict[str, str], tmp_path: Path) -> None:
    """`hf auth login` stores it; a logged-in user was refused a gated model."""
    server.token = "hf_stored"
    (tmp_path / "token").write_text("hf_stored\n")
    assert read_model(NAME, environ=environ).num_layers == 3
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "token").rename(elsewhere)
    assert read_model(NAME, environ={**environ, "HF_TOKEN_PATH": str(elsewhere)}).num_layers == 3
    with pytest.raises(ModelError, match="set HF_TOKEN"):
        read_model(NAME, environ={**environ, "HF_TOKEN": "hf_wrong", "HF_TOKEN_PATH": str(elsewhere)})


def test_vllms_flags_say_which_revision_and_with_which_token(
    server: Hub, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    server.token = "hf_given"
    given = {"gpu": "h200", "ram": "64GiB", "max_model_len": "4k"}
    assert Launch.of(NAME, given, ["--hf_token", "hf_given"]).plan.facts.num_layers == 3
    with pytest.raises(ModelError, match="revision v2"):
        Launch.of(NAME, given, ["--hf-token=hf_given", "--revision", "v2"])
    assert any("/resolve/v2/" in path for path in server.paths)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_download_that_was_cut_short_goes_on_from_the_hub(
    server: Hub, environ: dict[str, str], tmp_path: Path, has_index: bool
) -> None:
    """vLLM resumes it; a plan was refused, or made for a part of the weights."""
    snapshot = tmp_path / f"hub/models--{NAME.replace('/', '--')}/snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    names = [*SHARDS[:2], "config.json", *(["model.safetensors.index.json"] if has_index else [])]
    for name in names:
        (snapshot / name).write_bytes(server.files[name])
    whole = read_model(NAME, environ={**environ, "HF_HOME": "/nonexistent"})
    assert read_model(NAME, environ=environ).weights == whole.weights
    with pytest.raises(ModelError, match="its download was cut short, and HF_HUB_OFFLINE"):
        read_model(NAME, environ={**environ, "HF_HUB_OFFLINE": "1"})
