"""Refusals, sent by middleware before any handler runs."""

import json
from collections.abc import Sequence

from starlette.types import Scope, Send

GATEWAY = "/v1/"
# As the gateway's own errors have them; clients of OpenAI's API compare them with texts.
_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    408: "slow_client",
    413: "too_large",
    421: "wrong_host",
    503: "registry_unavailable",
}


async def refuse(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """In OpenAI's shape. On the gateway's paths just as its own errors, which say who failed."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message[:100]})
        return
    kind = "invalid_request_error" if status < 500 else "server_error"
    is_gateway = scope["path"].startswith(GATEWAY)
    code = _CODES.get(status, "refused") if is_gateway else status
    error = {"message": message, "type": kind, "param": None, "code": code}
    who = {"source": "gateway"} if is_gateway else {"src": "overspill"}
    body = json.dumps({"error": error, **who}).encode()
    content = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*content, *headers]})
    await send({"type": "http.response.body", "body": body})
