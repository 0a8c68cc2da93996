"""What another site may make a browser do here: nothing.

Two checks, each enough by itself: where a request comes from, as the browser says, and a token that only our own pages
hold. Programs that are no browser send neither header, and need no token.
"""

import hmac
from collections.abc import Collection, Mapping
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from overspill.manager.security.answers import GATEWAY, refuse
from overspill.manager.security.cookies import read_cookie

TOKEN_HEADER = "X-CSRF-Token"
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS", "TRACE"}
# "none" is the user's own doing: typed, or from a bookmark. Not "same-site": other ports of this host are that.
_OWN_SITES = {"same-origin", "none"}


def csrf_token(cookie: str) -> str:
    """The token of pages that were sent to the browser with this cookie.

    Another site cannot read the cookie, so it cannot compute the token; nothing has to be kept on the server.
    """
    return hmac.new(cookie.encode(), b"overspill csrf token", sha256).hexdigest()


def token_matches(cookie: str | None, token: str | None) -> bool:
    return bool(cookie and token) and hmac.compare_digest(csrf_token(cookie or "").encode(), (token or "").encode())


def cross_site(headers: Mapping[str, str], scheme: str, own_origins: Collection[str] = ()) -> str | None:
    """Where a request comes from, if that is another site; None if it is our own page, or no browser.

    `headers` have lower-case names. The Host has been checked before (overspill.manager.security.hosts).
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None:
        if origin in own_origins or origin == f"{scheme}://{headers.get('host', '')}":
            return None
        return origin
    return site if site is not None and site not in _OWN_SITES else None


def is_browser(headers: Mapping[str, str]) -> bool:
    """Browsers send one of these with everything that is not a plain GET."""
    return "origin" in headers or "sec-fetch-site" in headers or "cookie" in headers


class CsrfGuard:
    """ASGI: refuses what changes something and comes from another site, or from a browser without our page's token.

    `token_free` are the beginnings of paths whose requests are not made by our pages' scripts: the gateway, which
    browser programs of `allowed_origins` use, and the login form. Where they come from is checked all the same.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_tls: bool = False,
        token_free: tuple[str, ...] = (GATEWAY, "/login"),
        allowed_origins: Collection[str] = (),
        public_url: str = "",
    ) -> None:
        self._app, self._is_tls = app, is_tls
        self._token_free, self._allowed = token_free, frozenset(allowed_origins)
        # A proxy speaks TLS with the browser, and not with us.
        self._own = frozenset({public_url} if public_url else ())
        self._public_scheme, _, self._public_host = public_url.partition("://")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] not in _SAFE_METHODS):
            refusal = self._refusal(scope)
            if refusal is not None:
                await refuse(scope, send, 403, refusal)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        allowed = self._own | self._allowed if scope["path"].startswith(GATEWAY) else self._own
        is_public = bool(self._public_host) and headers.get("host", "").lower() == self._public_host
        scheme = self._public_scheme if is_public else scope.get("scheme", "http").replace("ws", "http")
        other = cross_site(headers, scheme, allowed)
        if other is not None:
            return f"a page of another site ({other[:100]!r}) sent this request; open the manager's own page"
        # Browsers do not send this header for other sites unless a server allows it; this one does for the gateway.
        if headers.get("authorization") or not is_browser(headers) or scope["path"].startswith(self._token_free):
            return None
        cookie = read_cookie(headers.get("cookie"), is_tls=self._is_tls)
        if token_matches(cookie, headers.get(TOKEN_HEADER.lower())):
            return None
        return f"the header {TOKEN_HEADER} is missing or old; load the page again"
