"""A small server with vLLM's answers: a test copies it to a file `vllm`, and starts it with the words of `vllm serve`.

How it behaves comes from a variable, so that its command line is like the real one's.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    options: argparse.Namespace

    def do_GET(self) -> None:
        if self.options.hangs:
            time.sleep(3600)
        answers = {
            "/v1/models": {"object": "list", "data": [{"id": name} for name in self.options.models]},
            "/version": {"version": "0.32.0"},
        }
        if self.path == "/v1/models" and self.options.needs_key:
            self._send(401, {"error": "Unauthorized"})
        elif self.options.huge:
            self._send(200, {"data": [{"id": "x" * 4_000_000}]})
        else:
            self._send(200 if self.path in answers else 404, answers.get(self.path, {}))

    def _send(self, status: int, told: object) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--hangs", "--huge", "--needs-key", "--ignores-sigterm", "--has-child"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--models", nargs="*", default=["qwen"])
    options = parser.parse_args(json.loads(os.environ["LOOKALIKE"]))
    Handler.options = options
    if options.ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.has_child:
        # As vLLM's engine is called; it does not end with its server.
        child = ["VLLM::EngineCore", "-c", "import time; held = bytearray(32 << 20); time.sleep(3600)"]
        subprocess.Popen(child, executable=sys.executable)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
