"""Refusals, sent by middleware before any handler runs."""

import json
from collections.abc import Sequence

from starlette.types import Scope, Send


async def refuse(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """In OpenAI's shape, which says who failed: clients of the gateway read error.message."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message[:100]})
        return
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = json.dumps({"src": "overspill", "error": error}).encode()
    content = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*content, *headers]})
    await send({"type": "http.response.body", "body": body})
