"""Sites whose scripts may use the gateway: what a browser must be told so that they may (CORS).

For /v1 and the sites of --allow-origin only. Nothing is said of credentials: keys come as a header, and the page's
cookie is not for others.
"""

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overspill.manager.security.answers import GATEWAY

_METHODS = b"GET, HEAD, POST"
_KNOWN_FOR_S = b"600"
_READABLE = b"retry-after, x-request-id"


class OriginHeaders:
    """ASGI: answers a browser's question beforehand, and lets the site's script read what comes, refusals too."""

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, frozenset(one.encode() for one in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = self._origin(scope)
        if origin is None:
            await self._app(scope, receive, send)
            return
        added = [
            (b"access-control-allow-origin", origin),
            (b"vary", b"origin"),
            (b"cross-origin-resource-policy", b"cross-origin"),
        ]
        asked = dict(scope["headers"])
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in asked:
            added += [
                (b"access-control-allow-methods", _METHODS),
                # All that it asks for: clients of OpenAI's API send headers of their own.
                (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"authorization")),
                (b"access-control-max-age", _KNOWN_FOR_S),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": added})
            await send({"type": "http.response.body", "body": b""})
            return
        added.append((b"access-control-expose-headers", _READABLE))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _origin(self, scope: Scope) -> bytes | None:
        """Of a request to the gateway, if it is one of those that are allowed."""
        if scope["type"] != "http" or not scope["path"].startswith(GATEWAY):
            return None
        given = [value for name, value in scope["headers"] if name == b"origin"]
        return given[0] if len(given) == 1 and given[0] in self._allowed else None
