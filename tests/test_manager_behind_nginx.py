"""A model that loads for longer than a proxy waits: a real nginx with an idle timeout of 10 s before the gateway."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from overspill.address import free_port
from tests.managed_here import Here, managed_here
from tests.manager_process import Place

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
if NGINX is None and os.environ.get("CI"):
    raise RuntimeError("the tests behind a proxy need Debian's nginx (apt-get install nginx-light)")
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs Debian's nginx (apt-get install nginx-light)")
LOAD_S = 14.0
CONFIGURATION = """
daemon off; pid {folder}/pid; error_log {folder}/errors; worker_processes 1;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {url}; proxy_http_version 1.1; proxy_read_timeout 10s; }}
  }}
}}
"""


@pytest.fixture
def here(place: Place) -> Iterator[Here]:
    for name in ("a", "b"):
        place.add(name, behaviour={"start_s": LOAD_S})
    place.add("broken", behaviour={"start_s": 2.0, "dies_at_start": True})
    with managed_here(place) as one:
        yield one


@pytest.fixture
def proxy(here: Here, tmp_path: Path) -> Iterator[str]:
    folder, port = tmp_path / "nginx", free_port()
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "conf").write_text(CONFIGURATION.format(folder=folder, port=port, url=here.url))
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "conf")])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            deadline = time.monotonic() + 30
            while True:
                try:
                    assert client.get("/healthz").is_success
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_a_stream_for_a_cold_model_is_answered(proxy: str) -> None:
    with httpx.Client(base_url=proxy, timeout=120, trust_env=False) as client:
        asked = {"model": "a", "prompt": "x", "stream": True}
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            text = answer.read().decode()
    signs, _, tokens = text.partition("data: ")
    assert signs.startswith(": a is starting") and signs.count("\n\n") >= 2
    assert tokens.count('"text":"a-') == 4 and tokens.endswith("data: [DONE]\n\n")


def test_openais_client_reads_past_the_signs(proxy: str) -> None:
    client = openai.OpenAI(base_url=f"{proxy}/v1", api_key="x", max_retries=0, timeout=120)
    stream = client.chat.completions.create(model="b", messages=[{"role": "user", "content": "x"}], stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == "b-0 b-1 b-2 b-3 "
    with pytest.raises(openai.APIError, match="the weights are broken"):
        list(client.completions.create(model="broken", prompt="x", stream=True))


def test_a_whole_answer_waits_only_if_it_is_kept_alive(proxy: str) -> None:
    with httpx.Client(base_url=proxy, timeout=120, trust_env=False) as client:
        assert client.post("/v1/completions", json={"model": "a", "prompt": "x"}).status_code == 504
        kept = client.post(
            "/v1/completions", json={"model": "b", "prompt": "x"}, headers={"x-overspill-keep-alive": "1"}
        )
        assert kept.status_code == 200 and kept.json()["choices"][0]["text"].startswith("b-0")
        failed = client.post(
            "/v1/completions", json={"model": "broken", "prompt": "x"}, headers={"x-overspill-keep-alive": "1"}
        )
        assert "the weights are broken" in failed.json()["error"]["message"]
