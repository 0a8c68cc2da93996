"""Headers that tell a browser what a page may do: load from here, and nothing else."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# No inline script or style, and no eval: htmx needs allowEval and includeIndicatorStyles off in its configuration.
# uPlot sets styles by script, which this does not concern.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
_ALWAYS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # Not no-referrer: with that, browsers send "Origin: null" for the forms of our own pages.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=(), usb=(), payment=()"),
)
_HSTS = (b"strict-transport-security", b"max-age=31536000")
_NO_STORE = (b"cache-control", b"no-store")
# Their names hold their version.
_VENDORED = (b"cache-control", b"public, max-age=31536000, immutable")


class SecurityHeaders:
    """ASGI: adds them to every answer; a handler's own value stays. Costs nothing for the parts of a stream."""

    def __init__(self, app: ASGIApp, *, is_tls: bool = False, vendored: str = "/static/vendor/") -> None:
        self._app, self._vendored = app, vendored
        self._added = (*_ALWAYS, _HSTS) if is_tls else _ALWAYS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_vendored = scope["path"].startswith(self._vendored)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                there = {name.lower() for name, _ in headers}
                caching = _VENDORED if is_vendored and message["status"] < 300 else _NO_STORE
                headers += [header for header in (*self._added, caching) if header[0] not in there]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_headers)
