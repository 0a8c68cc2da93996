"""Secrets as they are kept: API keys and session ids by SHA-256, passwords by scrypt."""

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error

_KEY_PREFIX = "osk"
_PREFIX_BYTES, _SECRET_BYTES = 6, 32
_KEY = re.compile(rf"{_KEY_PREFIX}_([a-z0-9]{{{2 * _PREFIX_BYTES}}})_([A-Za-z0-9_-]{{43}})")
# 32 MiB and some tenths of a second for each try: of the choices that OWASP's password storage cheat sheet calls equal,
# one that leaves the manager small.
_LOG2_N, _R, _P, _SALT_BYTES, _HASH_BYTES = 15, 8, 3, 16, 32
_MAX_MEMORY = 128 << 20
_SCRYPT = re.compile(r"scrypt\$(\d{1,2})\$(\d{1,2})\$(\d{1,2})\$([\w-]+=*)\$([\w-]+=*)")


def new_key() -> tuple[str, str]:
    """The whole key, which is shown once and never kept, and its prefix, by which it is looked up and named."""
    prefix = secrets.token_hex(_PREFIX_BYTES)
    return f"{_KEY_PREFIX}_{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}", prefix


def key_prefix(key: str) -> str | None:
    """None for what cannot be a key, so that nothing is hashed or looked up for it."""
    match = _KEY.fullmatch(key)
    return match[1] if match is not None else None


def new_session_id() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: str) -> str:
    """Of a secret with 256 random bits.

    One round of SHA-256, without salt: nobody can try 2^256 secrets, however fast the hash, and no two are alike, so
    what salt and slowness do for passwords is of no use here. A request to the gateway costs microseconds, not
    tenths of a second.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def same(one: str, other: str) -> bool:
    """In a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


def hash_password(password: str) -> str:
    """With its own salt, and slow: people choose passwords that can be guessed."""
    salt = secrets.token_bytes(_SALT_BYTES)
    hashed = _scrypt(password, salt, _LOG2_N, _R, _P)
    return f"scrypt${_LOG2_N}${_R}${_P}${urlsafe_b64encode(salt).decode()}${urlsafe_b64encode(hashed).decode()}"


def password_matches(password: str, kept: str) -> bool:
    """As slow as hashing it; what is kept names its own parameters, so they may change later."""
    match = _SCRYPT.fullmatch(kept)
    if match is None:
        return False
    try:
        salt, expected = urlsafe_b64decode(match[4]), urlsafe_b64decode(match[5])
        hashed = _scrypt(password, salt, int(match[1]), int(match[2]), int(match[3]))
    except (Base64Error, ValueError):
        return False
    return hmac.compare_digest(hashed, expected)


def _scrypt(password: str, salt: bytes, log2_n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(
        password.encode(errors="surrogatepass"),
        salt=salt,
        n=1 << log2_n,
        r=r,
        p=p,
        maxmem=_MAX_MEMORY,
        dklen=_HASH_BYTES,
    )
