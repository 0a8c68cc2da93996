"""Models of other types through the gateway: embeddings, scores, classes, transcriptions; one of them with vLLM."""

import os
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from overspill.manager.backend import OwnProcesses
from overspill.manager.states import Timing
from overspill.registry import add_model
from overspill.registry.access import KeyScope, create_key
from tests.chat_model import make_chat_model
from tests.fake_server import ECHOED
from tests.managed_here import managed_here
from tests.manager_process import Place
from tests.test_gateway import Served, error_of, with_gateway

# What vLLM has without /v1 only, and clients of this gateway may ask for with it.
ALSO = ("/v1/pooling", "/v1/classify", "/v1/tokenize", "/v1/detokenize", "/v1/generative_scoring")


def test_anthropics_client_raises_what_happens_after_its_stream_began(place: Place) -> None:
    """Without the name of the event it saw an empty answer."""
    place.add("a", behaviour={"start_s": 2.5, "dies_at_start": True})
    with (
        managed_here(place) as here,
        anthropic.Anthropic(base_url=here.url, api_key="x", max_retries=0) as client,
    ):
        asked: Any = {"model": "a", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(anthropic.APIStatusError, match="ended while it was starting"):
            list(client.messages.create(stream=True, **asked))


def test_every_path_of_vllms_reaches_the_model_it_names(place: Place) -> None:
    """Those without /v1 were answered as pages that are not there."""
    place.add("a", aliases="embedder")
    with place.registry() as registry:
        create_key(registry, "owner")
        key, _ = create_key(registry, "phone", KeyScope.GATEWAY)
    with managed_here(place) as here, here.client(**{"x-api-key": key}) as client:
        for path in (*ECHOED, *ALSO):
            answer = client.post(path, json={"model": "embedder", "input": "x"})
            told = answer.json()
            assert (answer.status_code, told["body"]) == (200, '{"model":"a","input":"x"}'), path
            assert told["path"] == (path.removeprefix("/v1") if path in ALSO else path)
            unknown = client.post(path, json={"model": "none"})
            assert error_of(unknown) == (404, "model_not_found", "gateway"), path
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            answer = client.post(path, data={"model": "embedder", "language": "de"}, files={"file": b"RIFF"})
            assert answer.status_code == 200 and "embedder" not in answer.text and "RIFF" in answer.json()["body"]
        assert client.post("/api/keys", json={"name": "x"}).status_code == 401  # such a header is for models only
        assert client.get("/score").status_code == 404
    with managed_here(place) as here, here.client() as client:
        assert error_of(client.post("/score", json={"model": "a"})) == (401, "invalid_api_key", "gateway")


def test_another_site_may_not_use_a_path_without_v1(place: Place) -> None:
    place.add("a")
    with managed_here(place) as here, here.client(origin="https://evil.example") as client:
        assert client.post("/score", json={"model": "a"}).status_code == 403
    assert not place.starts("a")


def test_a_real_embedding_model_is_planned_loaded_and_asked(place: Place, tmp_path: Path) -> None:
    """vLLM on the CPU, with a causal model whose last state is the embedding."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"XDG_CONFIG_HOME": "/nonexistent", "OVERSPILL_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "INFO"}
    environment["OVERSPILL_DATABASE_URL"] = f"sqlite:///{place.folder}/registry.db"
    settings = {
        "source": str(make_chat_model(tmp_path / "tiny")), "max_model_len": 1024, "gpu_memory": "64MiB", "ram": "12GiB",
        "offload_ram": "64MiB", "dtype": "float32", "max_num_seqs": 4, "enforce_eager": True, "aliases": "embedder",
        "vllm_args": ["--runner", "pooling", "--convert", "embed"],
    }  # fmt: skip
    with place.registry() as registry:
        add_model(registry, "tiny", settings)

    async def run(served: Served) -> None:
        async def told(path: str, **asked: object) -> httpx.Response:
            return await served.http.post(f"{served.url}{path}", json={"model": "embedder", **asked}, timeout=600)

        words = ["t5 t6 t7", "t9", "t5 t6 t7"]
        answer = await told("/v1/embeddings", input=words)
        assert answer.status_code == 200, answer.text
        first, other, again = (one["embedding"] for one in answer.json()["data"])
        assert len(first) == 128 and first != other and max(abs(x - y) for x, y in zip(first, again)) < 1e-5
        assert served.engines.traffic("tiny").prompt_tokens == 7
        ranked = (await told("/v1/rerank", query="t5 t6 t7", documents=["t9", "t5 t6 t7"])).json()["results"]
        assert [one["index"] for one in ranked] == [1, 0]
        bare = (await told("/rerank", query="t5 t6 t7", documents=["t9", "t5 t6 t7"])).json()["results"]
        assert [one["index"] for one in bare] == [1, 0]
        assert len((await told("/v1/score", text_1="t5", text_2=["t5", "t9"])).json()["data"]) == 2
        for path in ("/pooling", "/v1/pooling"):
            assert (await told(path, input="t5 t6")).json()["data"], path
        assert (await told("/v1/tokenize", prompt="t5 t6")).json()["tokens"] == [5, 6]
        refused = await told("/v1/chat/completions", messages=[{"role": "user", "content": "t5"}])
        assert refused.status_code >= 400 and refused.json()["error"]["message"]

    backend = OwnProcesses(environment=environment)
    with_gateway(place, run, backend=backend, memory=None, reckon=None, timing=Timing())
