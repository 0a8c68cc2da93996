"""A hub of our own: as much of Hugging Face's HTTP API as a search and huggingface_hub's download need."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

COMMIT = "a" * 40
_PIECE = 64 * 1024


@dataclass
class FakeHub:
    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    piece_s: float = 0.0
    """How long each piece of a file takes."""
    sent: int = 0
    begun_at: list[int] = field(default_factory=list)
    """Where each answer of a large file began."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            place = urlsplit(self.path)
            parts = place.path.strip("/").split("/")
            if place.path == "/api/models":
                text = parse_qs(place.query).get("search", [""])[0].lower()
                found = [{"id": name, "downloads": 7} for name in hub.repositories if text in name.lower()]
                return self.told(found)
            if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in hub.repositories:
                name = "/".join(parts[2:4])
                files = hub.repositories[name].items()
                if parts[4:5] == ["tree"]:
                    listed = [{"type": "file", "path": file, "size": len(content)} for file, content in files]
                    return self.told([{**one, "oid": COMMIT} for one in listed])
                siblings = [{"rfilename": file, "size": len(content)} for file, content in files]
                return self.told({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []})
            files = hub.repositories.get("/".join(parts[:2]), {})
            if len(parts) >= 5 and parts[2] == "resolve" and parts[4] in files:
                return self.file(files[parts[4]])
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound" if files else "RepoNotFound"})

        def file(self, content: bytes) -> None:
            etag = hashlib.sha256(content).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            begin = 0
            if (asked := self.headers.get("Range")) is not None:
                begin = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            if self.command == "GET" and len(content) > _PIECE:
                hub.begun_at.append(begin)
            self.answer(206 if asked is not None else 200, content[begin:], headers)

        def told(self, value: Any) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                for begin in range(0, len(body), _PIECE):
                    self.wfile.write(body[begin : begin + _PIECE])
                    self.wfile.flush()
                    hub.sent += min(_PIECE, len(body) - begin)
                    time.sleep(hub.piece_s if len(body) > _PIECE else 0.0)
            except OSError:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
