"""A small server of OpenAI's completions, as a process of its own: it answers from the prompt alone, can be slow, can
refuse, and can be killed without an engine to wait for."""

import argparse
import hashlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    given: argparse.Namespace

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {})
        elif self.path != "/v1/models" or self.given.models == "-":
            self._send(404, {"detail": "Not Found"})
        elif self.given.key and self.headers["Authorization"] != f"Bearer {self.given.key}":
            self._send(401, {"error": {"message": "Unauthorized"}})
        else:
            models: list[dict[str, Any]] = [
                {"id": name, "max_model_len": self.given.length} for name in self.given.models.split(",")
            ]
            models += [{"id": name, "parent": models[0]["id"]} for name in self.given.adapters]
            self._send(200, {"data": models})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["prompt"]
        digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
        with self.given.log.open("a") as log:
            log.write(f"{digest.hex()}\n")
        if len(prompt) == self.given.refuse:
            self._send(400, {"error": {"message": "this prompt is not welcome"}})
            return
        if len(prompt) == self.given.fail:
            self._send(429, {"error": {"message": "too much"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = [digest[i % len(digest)] for i in range(min(asked["max_tokens"], self.given.most))]
        for number, token in enumerate(tokens):
            choice: dict[str, Any] = {"index": 0, "text": f" t{token}"}
            if not self.given.no_ids:
                choice |= {"token_ids": [token], **({"prompt_token_ids": prompt} if not number else {})}
            self._event({"choices": [choice]})
            time.sleep(self.given.pause)
        if not self.given.no_usage:
            self._event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}})
        self._chunk(b"data: [DONE]\n\n")
        time.sleep(self.given.pause_at_end)
        self._chunk(b"")

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(data)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--models", default="tiny")
    parser.add_argument("--adapters", nargs="*", default=[])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--key")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--pause-at-end", type=float, default=0.0, help="with a stream that has said [DONE]")
    parser.add_argument("--most", type=int, default=1 << 20, help="tokens of an answer")
    parser.add_argument("--no-ids", action="store_true")
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--refuse", type=int, help="prompts of this length")
    parser.add_argument("--fail", type=int, help="prompts of this length, with 429")
    Handler.given = parser.parse_args()
    Server(("127.0.0.1", Handler.given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
