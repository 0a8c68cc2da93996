"""TLS towards engines, which may have a certificate of their own making."""

import ssl
from functools import cache
from urllib.parse import urlsplit

from overspill.address import is_loopback


def client_context(url: str) -> ssl.SSLContext | None:
    """For a connection to `url`; None if it is not encrypted."""
    parts = urlsplit(url)
    return _context(is_verified=not is_loopback(parts.hostname or "")) if parts.scheme == "https" else None


@cache
def _context(*, is_verified: bool) -> ssl.SSLContext:
    """A certificate is for the names by which clients call an engine; here it is this machine's own, and nobody is
    between. Others are checked against the system's authorities, or those of SSL_CERT_FILE."""
    context = ssl.create_default_context()
    if not is_verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
