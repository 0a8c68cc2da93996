"""Which headers go through the gateway, and which are between two neighbours only."""

from collections.abc import Iterable

Header = tuple[bytes, bytes]

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
# The client's keys are the gateway's business, and a compressed answer could not be told apart into events.
_NOT_PASSED_ON = _HOP_BY_HOP | {
    b"host", b"content-length", b"authorization", b"x-api-key", b"cookie", b"expect", b"accept-encoding", b"origin",
}  # fmt: skip
_NOT_PASSED_BACK = _HOP_BY_HOP | {b"date", b"server", b"set-cookie"}
# vLLM lets every site read its answers; who may read the gateway's is not for an engine to say.
_NOT_FOR_ENGINES = b"access-control-"


def passed_on(headers: Iterable[Header]) -> list[Header]:
    """To the engine."""
    given = list(headers)
    named = _named_by_connection(given)
    return [(name, value) for name, value in given if name not in _NOT_PASSED_ON and name not in named]


def passed_back(headers: Iterable[Header], *, length: int | None = None) -> list[Header]:
    """To the client; with the length of a body that was read whole."""
    given = list(headers)
    named = _named_by_connection(given)
    left = [
        (name, value)
        for name, value in given
        if name not in _NOT_PASSED_BACK and name not in named and not name.startswith(_NOT_FOR_ENGINES)
    ]
    if length is None:
        return left
    return [*((name, value) for name, value in left if name != b"content-length"), (b"content-length", b"%d" % length)]


def _named_by_connection(headers: list[Header]) -> set[bytes]:
    return {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
