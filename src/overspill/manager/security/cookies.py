"""The manager's one cookie: a session's id, or, where nobody has to log in, a number that only this browser knows."""

import secrets

_MAX_LENGTH = 100


def cookie_name(*, is_tls: bool) -> str:
    """With TLS, browsers accept __Host- from this very host only, and send it over TLS only."""
    return "__Host-overspill" if is_tls else "overspill"


def set_cookie(value: str, *, is_tls: bool, max_age_s: int | None = None) -> str:
    """The value of a Set-Cookie header. Without an age, a browser forgets it when it is closed.

    Cookies know no ports: other servers on this host are sent it too. So it is worth nothing alone where a browser asks
    (overspill.manager.security.csrf).
    """
    parts = [f"{cookie_name(is_tls=is_tls)}={value}", "Path=/", "HttpOnly", "SameSite=Strict"]
    if is_tls:
        parts.append("Secure")
    if max_age_s is not None:
        parts.append(f"Max-Age={max_age_s}")
    return "; ".join(parts)


def clear_cookie(*, is_tls: bool) -> str:
    return set_cookie("", is_tls=is_tls, max_age_s=0)


def read_cookie(header: str | None, *, is_tls: bool) -> str | None:
    """Ours, out of a Cookie header; None if it is missing, or there twice: then somebody else has set one."""
    name = cookie_name(is_tls=is_tls)
    pairs = (part.strip().partition("=") for part in (header or "").split(";"))
    found = {value for key, _, value in pairs if key == name}
    value = found.pop() if len(found) == 1 else ""
    return value if 0 < len(value) <= _MAX_LENGTH and value.isascii() and value.isprintable() else None


def new_browser_id() -> str:
    return secrets.token_urlsafe(32)
