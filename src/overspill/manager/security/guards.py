"""All guards around the manager's app, in the order that matters, and the one that asks who is there."""

from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from overspill.manager.security.access import LOCAL, Access, Identity
from overspill.manager.security.answers import GATEWAY, refuse
from overspill.manager.security.binding import ADD_KEY, SET_PASSWORD
from overspill.manager.security.bodies import MAX_BODY_BYTES, PAUSE_S, BodyGuard
from overspill.manager.security.clients import client_address
from overspill.manager.security.cookies import read_cookie
from overspill.manager.security.csrf import CsrfGuard
from overspill.manager.security.headers import SecurityHeaders
from overspill.manager.security.hosts import HostGuard, allowed_names
from overspill.manager.security.origins import OriginHeaders
from overspill.manager.security.revocation import Revocable
from overspill.registry.access import KeyScope
from overspill.registry.errors import RegistryUnavailable

# The page to log in, what it is made of, and whether the manager lives.
PUBLIC = ("/login", "/static/", "/healthz")


class AccessGuard:
    """ASGI: nobody gets in unknown. Handlers find who it is in request.state.identity, None at most on public paths."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        is_tls: bool = False,
        is_proxied: bool = False,
        public: tuple[str, ...] = PUBLIC,
    ) -> None:
        self._app, self._access, self._public = app, access, public
        self._is_tls, self._is_proxied = is_tls, is_proxied

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            identity = await self._identify(scope)
            is_protected = identity is not None or await self._access.is_protected()
        except RegistryUnavailable as error:
            await refuse(scope, send, 503, f"nobody can be let in: {error}")
            return
        path = scope["path"]
        if not path.startswith(self._public):
            if identity is None:
                await self._turn_away(scope, send, is_protected=is_protected)
                return
            if identity.scope is KeyScope.GATEWAY and not path.startswith(GATEWAY):
                await refuse(scope, send, 403, f"{identity.who} is for {GATEWAY} only; use a key for everything")
                return
        address = client_address(scope, is_proxied=self._is_proxied)
        scope.setdefault("state", {}).update(identity=identity, address=address, is_tls=self._is_tls)
        if scope["type"] == "http" and identity is not None and identity is not LOCAL:
            answer = Revocable(receive, send, lambda: self._is_still(identity, scope))
            receive, send = answer.receive, answer.send
        await self._app(scope, receive, send)

    async def _is_still(self, identity: Identity, scope: Scope) -> bool:
        try:
            return await self._identify(scope, is_use=False) == identity
        except RegistryUnavailable:
            return False

    async def _identify(self, scope: Scope, *, is_use: bool = True) -> Identity | None:
        headers = dict(scope["headers"])
        authorization, cookie = (headers.get(name, b"").decode("latin-1") for name in (b"authorization", b"cookie"))
        session_id = read_cookie(cookie, is_tls=self._is_tls)
        return await self._access.identify(authorization or None, session_id, is_use=is_use)

    async def _turn_away(self, scope: Scope, send: Send, *, is_protected: bool) -> None:
        if not is_protected:
            # The last one was removed while it ran: a page to log in would ask for what nobody has.
            await refuse(
                scope, send, 403,
                "other machines can reach the manager, and it has neither a password nor an API key any more; nobody "
                f"is let in. Set one on its machine with: {SET_PASSWORD}, or: {ADD_KEY}",
            )  # fmt: skip
            return
        accepted = dict(scope["headers"]).get(b"accept", b"")
        if scope["type"] == "http" and scope["method"] == "GET" and b"text/html" in accepted:
            await send({"type": "http.response.start", "status": 303, "headers": [(b"location", b"/login")]})
            await send({"type": "http.response.body", "body": b""})
            return
        asked_for = [(b"www-authenticate", b"Bearer")]
        await refuse(
            scope, send, 401, "an API key is needed: send it as Authorization: Bearer KEY, or log in", asked_for
        )


def guarded(
    app: ASGIApp,
    access: Access,
    *,
    bound_host: str,
    public_url: str = "",
    allowed_hosts: Iterable[str] = (),
    allowed_origins: Collection[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    body_pause_s: float = PAUSE_S,
) -> ASGIApp:
    """Refusals get the headers too; nothing is read of a request for another host, from another site, or of nobody."""
    is_tls = public_url.startswith("https://")
    public_name = [urlsplit(public_url).hostname or ""] if public_url else []
    app = BodyGuard(app, max_bytes=max_body_bytes, pause_s=body_pause_s)
    app = AccessGuard(app, access=access, is_tls=is_tls, is_proxied=bool(public_url))
    app = CsrfGuard(app, is_tls=is_tls, allowed_origins=allowed_origins, public_url=public_url)
    app = OriginHeaders(app, allowed=allowed_origins)
    app = HostGuard(app, names=allowed_names(bound_host, [*allowed_hosts, *public_name]))
    return SecurityHeaders(app, is_tls=is_tls)
