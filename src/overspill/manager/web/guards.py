"""The guards in front of pages, API and gateway: one ASGI application that checks every request in a fixed order.

Starlette's middleware is weaker: TrustedHostMiddleware cuts `[::1]:7999` at its first colon and reads the first of two
Host headers, and CORSMiddleware answers preflights on all paths, and names the allowed methods to other sites too.
"""

import asyncio
import hmac
import ipaddress
import json
import re
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overspill.address import is_loopback
from overspill.kv.sizes import MiB, format_size
from overspill.manager.gateway import is_gateways
from overspill.manager.messages import error_json
from overspill.manager.web.access import LOCAL, Access, Identity, Revocable, read_cookie
from overspill.manager.web.setup import ADD_KEY, SET_PASSWORD, Setup
from overspill.registry.access import KeyExpired, KeyScope
from overspill.registry.errors import RegistryUnavailable

MAX_BODY_BYTES = 64 * MiB
"""Largest accepted request body; a prompt of a million tokens takes some 5 MB, images in it may take more."""
BODY_PAUSE_S = 20.0
"""Longest wait for the next bytes of a request body."""
TOKEN_HEADER = "X-CSRF-Token"
_SLOWEST_BYTES_PER_S = 16 * 1024
# Served without a login: the login page, its files, and the health check.
_PUBLIC = ("/login", "/static/", "/healthz")
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS", "TRACE"}
# "none" means a typed address or a bookmark. Not "same-site", which other ports of this host are too.
_OWN_SITES = {"same-origin", "none"}
# Codes of the gateway's own errors; clients of OpenAI's API compare them with known strings.
_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    408: "slow_client",
    413: "too_large",
    421: "wrong_host",
    503: "registry_unavailable",
}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?")
# No inline script or style, and no eval: htmx needs allowEval and includeIndicatorStyles off in its configuration.
# uPlot sets styles by script, which the policy does not restrict.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

Header = tuple[bytes, bytes]
_ON_EVERY_ANSWER: list[Header] = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # Not no-referrer: browsers would then send "Origin: null" with the forms of our own pages.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=(), usb=(), payment=()"),
]
_HSTS = (b"strict-transport-security", b"max-age=31536000")
_CLOSE = (b"connection", b"close")
_NO_STORE = (b"cache-control", b"no-store")
# The names of vendored files contain their version, so their content never changes.
_IMMUTABLE = (b"cache-control", b"public, max-age=31536000, immutable")


class Refusal(Exception):
    """Raised to refuse a request; carries the status, message and headers of the answer."""

    def __init__(self, status: int, message: str, headers: Sequence[Header] = ()) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class Guards:
    """ASGI application that checks host, site, CSRF token, identity and then body, and adds security headers.

    Bodies of requests for another host, from another site or from an unknown client are never read; refusals get the
    headers too. Handlers find in request.state: `identity` (None only on public paths), `address` and `is_tls`.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        setup: Setup,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_pause_s: float = BODY_PAUSE_S,
    ) -> None:
        self._app, self._access = app, access
        self._max_body_bytes, self._body_pause_s = max_body_bytes, body_pause_s
        self._public = urlsplit(setup.public_url)
        self._is_tls = self._public.scheme == "https"
        self._own_origins = frozenset({setup.public_url} if setup.public_url else ())
        self._allowed_origins = frozenset(setup.allowed_origins)
        self._names = allowed_names(setup.host, [*setup.allowed_hosts, self._public.hostname or ""])
        self._headers = [*_ON_EVERY_ANSWER, *([_HSTS] if self._is_tls else [])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not is_gateways(scope["path"]):
            headers.pop("x-api-key", None)  # only Anthropic's clients send it, to the gateway
        send = self._with_security_headers(scope, send)
        try:
            require_host(_values(scope, b"host"), self._names)
            if (origin := self._allowed_origin(scope)) is not None:
                is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
                send = _with_cors_headers(send, origin, headers, is_preflight=is_preflight)
                if is_preflight:
                    await _answer(send, 204)
                    return
            self._require_own_page(scope, headers)
            identity = await self._identity(scope, headers)
            self._require_small_body(scope)
        except Refusal as refusal:
            await _refuse(scope, send, refusal)
            return
        address = client_address(scope, is_proxied=bool(self._own_origins))
        scope.setdefault("state", {}).update(identity=identity, address=address, is_tls=self._is_tls)
        if identity is not None and identity is not LOCAL:
            answer = Revocable(receive, send, lambda: self._is_still(identity, headers))
            receive, send = answer.receive, answer.send
        if not (_values(scope, b"content-length") or _values(scope, b"transfer-encoding")):
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, send, max_bytes=self._max_body_bytes, pause_s=self._body_pause_s)
        try:
            await self._app(scope, body.receive, body.send)
        except Exception:
            if not body.is_refused:  # otherwise the error is the app's reaction to the disconnect
                raise

    def _with_security_headers(self, scope: Scope, send: Send) -> Send:
        """Wrap `send` to add security headers that the handler has not set; chunks of a stream pass at no cost."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                present = {name.lower() for name, _ in headers}
                is_vendored = scope["path"].startswith("/static/vendor/") and message["status"] < 300
                added = [*self._headers, _IMMUTABLE if is_vendored else _NO_STORE]
                message = {**message, "headers": headers + [one for one in added if one[0] not in present]}
            await send(message)

        return send_with_headers

    def _allowed_origin(self, scope: Scope) -> str | None:
        """Origin of a gateway request by a script of a site that --allow-origin names; None for any other request."""
        origins = _values(scope, b"origin")
        is_allowed = len(origins) == 1 and origins[0] in self._allowed_origins
        return origins[0] if is_allowed and is_gateways(scope["path"]) else None

    def _require_own_page(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Refuse changes made by a page of another site, or by a browser without our page's token.

        Each check is enough by itself. Programs other than browsers do not send these headers, and need no token.
        """
        path = scope["path"]
        if scope["method"] in _SAFE_METHODS:
            return
        allowed = self._own_origins | self._allowed_origins if is_gateways(path) else self._own_origins
        # A proxy speaks TLS with the browser, but not with us.
        is_public = bool(self._public.netloc) and headers.get("host", "").lower() == self._public.netloc
        scheme = self._public.scheme if is_public else scope.get("scheme", "http")
        if (other := cross_site(headers, scheme, allowed)) is not None:
            raise Refusal(
                403, f"a page of another site ({other[:100]!r}) sent this request; open the manager's own page"
            )
        # Another site's page can send an Authorization header only where the server allows it: here, to the gateway.
        is_browser = "origin" in headers or "sec-fetch-site" in headers or "cookie" in headers
        # The gateway serves scripts of allowed sites, and the login form has no script: neither can send the token.
        if headers.get("authorization") or not is_browser or is_gateways(path) or path.startswith("/login"):
            return
        cookie = read_cookie(headers.get("cookie"), is_tls=self._is_tls)
        token = headers.get(TOKEN_HEADER.lower(), "")
        if cookie is None or not hmac.compare_digest(csrf_token(cookie).encode(), token.encode()):
            raise Refusal(403, f"the header {TOKEN_HEADER} is missing or old; load the page again")

    async def _identity(self, scope: Scope, headers: Mapping[str, str]) -> Identity | None:
        try:
            identity = await self._identify(headers)
            is_protected = identity is not None or await self._access.is_protected()
        except RegistryUnavailable as error:
            raise Refusal(503, f"access cannot be checked: {error}") from error
        except KeyExpired as error:
            raise Refusal(401, str(error), [(b"www-authenticate", b"Bearer")]) from error
        path = scope["path"]
        if path.startswith(_PUBLIC):
            return identity
        if identity is not None:
            if identity.scope is KeyScope.GATEWAY and not is_gateways(path):
                raise Refusal(403, f"{identity.who} is for /v1/ only; use a key for everything")
            if identity.scope is KeyScope.METRICS and not path.startswith("/metrics"):
                raise Refusal(403, f"{identity.who} is for /metrics only; use a key for everything")
            return identity
        if not is_protected:
            # The last secret was removed while the manager ran: a login page would ask for one that nobody has.
            raise Refusal(
                403,
                "other machines can reach the manager, and it has neither a password nor an API key any more; all "
                f"access is refused. Set one on its machine with: {SET_PASSWORD}, or: {ADD_KEY}",
            )
        if scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            raise Refusal(303, "log in", [(b"location", b"/login")])
        needed = "an API key is needed: send it as Authorization: Bearer KEY or as X-API-Key: KEY, or log in"
        raise Refusal(401, needed, [(b"www-authenticate", b"Bearer")])

    async def _identify(self, headers: Mapping[str, str], *, is_use: bool = True) -> Identity | None:
        session_id = read_cookie(headers.get("cookie"), is_tls=self._is_tls)
        authorization = headers.get("authorization") or None
        if authorization is None and (key := headers.get("x-api-key")):  # Anthropic's clients use this header
            authorization = f"Bearer {key}"
        return await self._access.identify(authorization, session_id, is_use=is_use)

    async def _is_still(self, identity: Identity, headers: Mapping[str, str]) -> bool:
        try:
            return await self._identify(headers, is_use=False) == identity
        except (RegistryUnavailable, KeyExpired):
            return False

    def _require_small_body(self, scope: Scope) -> None:
        """Refuse a body whose declared length is too large, before any of it is read."""
        declared = _values(scope, b"content-length")
        if declared and declared[0].isdigit() and int(declared[0]) > self._max_body_bytes:
            raise _too_large(int(declared[0]), self._max_body_bytes)


class _Body:
    """A request body: answers 413 once it is too large and 408 if it stalls; the app then sees a disconnect."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, max_bytes: int, pause_s: float) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._max_bytes, self._pause_s = max_bytes, pause_s
        self._began_at = time.monotonic()
        self._num_bytes = 0
        self.is_refused = False
        self._is_whole = self._has_answered = False

    async def receive(self) -> Message:
        if self.is_refused:
            return {"type": "http.disconnect"}
        if self._is_whole:
            return await self._receive()
        # The deadline also ends the wait for a client that sends a byte now and then.
        deadline = self._began_at + self._pause_s + self._num_bytes / _SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(min(self._pause_s, deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            late = "the request's body did not come in time; send it faster, or in one piece"
            return await self._refuse(Refusal(408, late, [_CLOSE]))
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            if self._num_bytes > self._max_bytes:
                return await self._refuse(_too_large(self._num_bytes, self._max_bytes))
        return message

    async def send(self, message: Message) -> None:
        if not self.is_refused:
            self._has_answered = True
            await self._send(message)

    async def _refuse(self, refusal: Refusal) -> Message:
        self.is_refused = True
        if not self._has_answered:
            await _refuse(self._scope, self._send, refusal)
        return {"type": "http.disconnect"}


# The Host header


def allowed_names(bound_host: str, configured: Iterable[str] = ()) -> frozenset[str]:
    """Names the manager answers to: localhost, its address, the machine's name if others may reach it, --allow-host."""
    names = {"localhost", bound_host, *configured}
    if not is_loopback(bound_host):
        machine = socket.gethostname()
        names |= {machine, f"{machine}.local", socket.getfqdn()}
    return frozenset(name.lower().strip("[]").rstrip(".") for name in names if name)


def host_is_allowed(header: str, names: Collection[str]) -> bool:
    match = _HOST.fullmatch(header)
    if match is None:
        return False
    name = match[1].lower().strip("[]").rstrip(".")
    # Browsers resolve *.localhost to loopback themselves. DNS rebinding needs a name: a page at a numeric address was
    # served from that very address.
    return name in names or name.endswith(".localhost") or parse_address(name) is not None


def require_host(hosts: Sequence[str], names: Collection[str]) -> None:
    if len(hosts) != 1 or not host_is_allowed(hosts[0], names):
        named = repr(hosts[0][:100]) if len(hosts) == 1 else f"{len(hosts)} hosts"
        raise Refusal(421, f"this manager does not answer for {named}; allow that name with --allow-host")


# Other sites


def csrf_token(cookie: str) -> str:
    """CSRF token of the pages that were sent to the browser with this cookie.

    Another site cannot read the cookie, so it cannot compute the token; the server stores nothing.
    """
    return hmac.new(cookie.encode(), b"overspill csrf token", sha256).hexdigest()


def cross_site(headers: Mapping[str, str], scheme: str, own_origins: Collection[str] = ()) -> str | None:
    """The other site a request comes from; None for our own page or a program. Call after checking the Host."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None:
        is_own = origin in own_origins or origin == f"{scheme}://{headers.get('host', '')}"
        return None if is_own else origin
    return site if site is not None and site not in _OWN_SITES else None


def _with_cors_headers(send: Send, origin: str, headers: Mapping[str, str], *, is_preflight: bool) -> Send:
    """Wrap `send` to let the site's script read the answer; no credentials: keys come in a header, cookies are ours."""
    added = [
        (b"access-control-allow-origin", origin.encode()),
        (b"vary", b"origin"),
        (b"cross-origin-resource-policy", b"cross-origin"),
    ]
    if is_preflight:
        # Allow every requested header: clients of OpenAI's API send some of their own.
        wanted = headers.get("access-control-request-headers", "authorization")
        added += [
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", wanted.encode("latin-1")),
            (b"access-control-max-age", b"600"),
        ]
    else:
        added.append((b"access-control-expose-headers", b"retry-after, x-request-id"))

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return send_with_headers


# Addresses, values and answers


def client_address(scope: Scope, *, is_proxied: bool) -> str:
    """The client's address, for the login limit and the audit log. Behind a proxy on this machine: the last entry of
    X-Forwarded-For, which the proxy added itself; a client may have written any entries before it."""
    peer: str = scope["client"][0] if scope.get("client") else ""
    if not is_proxied or not is_loopback(peer):
        return peer
    last = ",".join(_values(scope, b"x-forwarded-for")).rpartition(",")[2].strip().strip("[]")
    return parse_address(last) or peer


def parse_address(text: str) -> str | None:
    """The IP address in canonical form, or None if `text` is not one."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _too_large(num_bytes: int, max_bytes: int) -> Refusal:
    return Refusal(
        413,
        f"the request's body has {format_size(num_bytes)} or more; at most {format_size(max_bytes)} are accepted",
        [_CLOSE],
    )


async def _refuse(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Answer with an error in OpenAI's shape; its source is the gateway on the gateway's paths, else the manager."""
    status, message = refusal.status, str(refusal)
    if status < 400:
        await _answer(send, status, headers=refusal.headers)
        return
    source = "gateway" if is_gateways(scope["path"]) else "manager"
    body = json.dumps(error_json(status, message, _CODES.get(status, "refused"), source)).encode()
    await _answer(send, status, body, [(b"content-type", b"application/json"), *refusal.headers])


async def _answer(send: Send, status: int, body: bytes = b"", headers: Sequence[Header] = ()) -> None:
    length = [(b"content-length", str(len(body)).encode())] if body else []
    await send({"type": "http.response.start", "status": status, "headers": [*length, *headers]})
    await send({"type": "http.response.body", "body": body})
