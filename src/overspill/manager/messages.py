"""Gateway messages: errors as OpenAI's clients expect them, forwarded headers, and the few parts of bodies read.

A prompt may be tens of megabytes of token numbers. Parsing them into objects would block the interpreter, and so all
streams, for seconds: the rest of the JSON is skipped, and passed on unchanged.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from overspill.manager.errors import NoRoom, NotServed, QueueFull, StartFailed, StillLoading, Stopped
from overspill.registry import RegistryError, UnknownModel
from overspill.upstream import data_of

Header = tuple[bytes, bytes]

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
# The gateway itself checks the client's keys, and could not split a compressed answer into events.
_NOT_PASSED_ON = _HOP_BY_HOP | {
    b"host", b"content-length", b"authorization", b"x-api-key", b"cookie", b"expect", b"accept-encoding", b"origin",
}  # fmt: skip
_NOT_PASSED_BACK = _HOP_BY_HOP | {b"date", b"server", b"set-cookie"}
# vLLM lets every site read its answers; an engine must not decide who may read the gateway's.
_NOT_FOR_ENGINES = b"access-control-"
_MOST_PARTS = 100
_NONE: Mapping[str, Any] = MappingProxyType({})
_LONGEST_PART_HEAD_BYTES = 4096
_USAGE = re.compile(rb'"usage":\s*\{')
_EVENT = re.compile(rb"^data:\s*\{", re.MULTILINE)
_FIRST = re.compile(rb'"role":\s*"assistant"')
# Lines end with LF or CRLF, and an event with an empty line.
_BETWEEN_EVENTS = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")
_COUNTS = {
    "prompt_tokens": re.compile(rb'"(?:prompt|input)_tokens":\s*(\d+)'),
    "completion_tokens": re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)'),
    "cached_tokens": re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)'),
}
_MOST_DIGITS = 9
_USAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
"""Paths whose streams report usage only on request."""


class Source(StrEnum):
    GATEWAY = "gateway"
    ENGINE = "engine"
    UPSTREAM = "upstream"


class GatewayError(Exception):
    """Error in the form that OpenAI's clients expect, with its source: the gateway, an engine or an upstream."""

    def __init__(
        self, status: int, message: str, *, code: str, source: Source = Source.GATEWAY, param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.source, self.param, self.retry_after_s = source, param, retry_after_s

    @property
    def body(self) -> bytes:
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        return json.dumps(error_json(self.status, self.message, self.code, self.source, self.param, kind)).encode()

    @property
    def headers(self) -> list[Header]:
        headers = json_headers(self.body)
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        return headers


def error_json(
    status: int, message: str, code: str, source: str, param: str | None = None, kind: str | None = None
) -> dict[str, Any]:
    """JSON of every refusal, in OpenAI's form."""
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}, "source": source}


def error_event(error: bytes, path: str) -> bytes:
    """An error's JSON object as an event of a stream, in the form of OpenAI's clients, or of Anthropic's."""
    if not path.startswith("/v1/messages"):
        return b"data: " + error + b"\n\n"
    return b'event: error\ndata: {"type": "error", ' + error.lstrip()[1:] + b"\n\n"


def one_shape(status: int, body: bytes, source: Source = Source.ENGINE) -> bytes:
    """Body of an engine's refusal in the common form; vLLM has several forms."""
    try:
        if isinstance(msgspec.json.decode(body)["error"]["message"], str):
            return body
    except (msgspec.MsgspecError, KeyError, TypeError):
        pass
    message = error_message(body) or f"the {source} answered {status}"
    return GatewayError(status, message, code=f"{source}_error", source=source).body


def error_message(body: bytes) -> str:
    """Message in an engine's refusal, as far as it can be parsed."""
    try:
        told = msgspec.json.decode(body)
        error = told.get("error", told)
        return str(error.get("message") or error.get("detail") or "") if isinstance(error, dict) else str(error)
    except (msgspec.MsgspecError, AttributeError):
        return body[:200].decode("utf-8", "replace")


def json_headers(body: bytes) -> list[Header]:
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]


_CODES: dict[type[NotServed], tuple[str, Source]] = {
    StartFailed: ("engine_failed", Source.ENGINE),
    NoRoom: ("no_room", Source.GATEWAY),
    QueueFull: ("queue_full", Source.GATEWAY),
    StillLoading: ("engine_starting", Source.ENGINE),
    Stopped: ("engine_stopped", Source.GATEWAY),
}


def converted(error: NotServed | RegistryError) -> GatewayError:
    message = str(error)
    if isinstance(error, UnknownModel):
        return GatewayError(404, message, code="model_not_found", param="model")
    if isinstance(error, RegistryError):
        return GatewayError(503, message, code="registry_unavailable", retry_after_s=5.0)
    if error.log_lines:
        message = "\n".join([message, "the last lines of its log:", *error.log_lines])
    code, source = _CODES.get(type(error), ("not_served", Source.GATEWAY))
    return GatewayError(503, message, code=code, source=source, param="model", retry_after_s=error.retry_after_s)


def passed_on(headers: Iterable[Header]) -> list[Header]:
    """Headers to forward to the engine."""
    return _without(headers, _NOT_PASSED_ON)


def passed_back(headers: Iterable[Header], *, length: int | None = None) -> list[Header]:
    """Headers to return to the client, with `length` as content length if the body was read whole."""
    left = [one for one in _without(headers, _NOT_PASSED_BACK) if not one[0].startswith(_NOT_FOR_ENGINES)]
    if length is None:
        return left
    return [*(one for one in left if one[0] != b"content-length"), (b"content-length", b"%d" % length)]


def _without(headers: Iterable[Header], names: frozenset[bytes]) -> list[Header]:
    """Headers except these names and those listed in the `connection` header."""
    given = list(headers)
    more = {part.strip().lower() for name, value in given if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in given if name not in names and name not in more]


class _Request(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    stream_options: msgspec.Raw = msgspec.Raw()


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None


_REQUEST = msgspec.json.Decoder(_Request)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Asked:
    """Parts of a request body that the gateway reads."""

    model: str
    is_stream: bool = False
    stream_options: bytes = b""
    """Raw JSON; empty if there are none."""

    @property
    def wants_usage(self) -> bool:
        try:
            options = msgspec.json.decode(self.stream_options or b"null", type=_StreamOptions | None)
            return options is not None and options.include_usage
        except msgspec.MsgspecError:  # the engine will refuse the request
            return True


def asked_of(body: bytes, content_type: bytes) -> Asked:
    if (boundary := _boundary(content_type)) is not None:
        begin, end = _model_part(body, boundary)
        asked = Asked(body[begin:end].decode("utf-8", "replace"))
    else:
        asked = _asked_in_json(body)
    if not asked.model:
        raise _no_model()
    return asked


def with_usage(body: bytes, asked: Asked, path: str) -> bytes | None:
    """Request body that also asks for usage of a stream; None if it asks already, or cannot."""
    if not asked.is_stream or path not in _USAGE_PATHS or asked.wants_usage:
        return None
    if not asked.stream_options:
        begin = body.index(b"{") + 1
        return body[:begin] + b'"stream_options":{"include_usage":true},' + body[begin:]
    return msgspec.json.encode({**_FIELDS.decode(body), "stream_options": {"include_usage": True}})


def end_of_events(data: bytes) -> int:
    """End of the last whole event; 0 if there is none."""
    return max(data.rfind(end) + len(end) if end in data else 0 for end in (b"\n\n", b"\n\r\n"))


def without_usage(events: bytes) -> bytes:
    """Events (whole ones) without the usage event that only clients get who asked for it; the rest unchanged."""
    if _USAGE.search(events) is None:
        return events
    return b"".join(one for one in _BETWEEN_EVENTS.split(events) if not _tells_only_usage(one))


def _tells_only_usage(event: bytes) -> bool:
    if _USAGE.search(event) is None:
        return False
    try:
        return msgspec.json.decode(data_of(event), type=_Chunk).choices == []
    except msgspec.MsgspecError:
        return False


def rewritten(body: bytes, content_type: bytes, model: str, changes: Mapping[str, Any] = _NONE) -> bytes:
    """Request body with the engine's name for the model and a variant's changes; `asked_of` has checked it before."""
    if (boundary := _boundary(content_type)) is not None:
        if changes:
            raise GatewayError(
                400, "a variant needs a JSON request, and this one is a form; name the model without the variant",
                code="variant_of_form", param="model",
            )  # fmt: skip
        begin, end = _model_part(body, boundary)
        return body[:begin] + model.encode() + body[end:]
    fields: dict[str, Any] = _FIELDS.decode(body)
    try:
        inside = {
            name: msgspec.json.decode(fields[name])
            for name, one in changes.items()
            if name in fields and isinstance(one, dict)
        }
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"the request is not JSON: {error}", code="bad_json") from None
    kept = {name: value for name, value in fields.items() if name not in changes}
    return msgspec.json.encode({**kept, **_merged(inside, changes), "model": model})


def _merged(value: object, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7396): null removes a field, and objects are merged."""
    before = value if isinstance(value, dict) else {}
    return {name: one for name, one in before.items() if name not in changes} | {
        name: _merged(before.get(name), one) if isinstance(one, dict) else one
        for name, one in changes.items()
        if one is not None
    }


def _asked_in_json(body: bytes) -> Asked:
    try:
        given = _REQUEST.decode(body)
        name = bytes(given.model)
        model = msgspec.json.decode(name, type=str) if name.startswith(b'"') else ""
        return Asked(model, is_stream=bytes(given.stream) == b"true", stream_options=bytes(given.stream_options))
    except msgspec.ValidationError:
        raise GatewayError(400, "the request is not a JSON object", code="bad_json") from None
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"the request is not JSON: {error}", code="bad_json") from None


def _boundary(content_type: bytes) -> bytes | None:
    """Boundary of multipart/form-data, in which recordings are sent; None for everything else, which is JSON."""
    if not content_type.lower().startswith(b"multipart/form-data"):
        return None
    header = Message()
    header["content-type"] = content_type.decode("latin-1")
    boundary = header.get_boundary()
    if not boundary:
        raise GatewayError(400, "the request is multipart/form-data without a boundary", code="bad_form")
    return boundary.encode("latin-1", "replace")


def _model_part(body: bytes, boundary: bytes) -> tuple[int, int]:
    """Start and end of the model's name in a multipart body."""
    dashes = b"--" + boundary
    at = body.find(dashes)
    for _ in range(_MOST_PARTS if at >= 0 else 0):
        at += len(dashes)
        head_end = body.find(b"\r\n\r\n", at, at + _LONGEST_PART_HEAD_BYTES)
        begin = head_end + 4
        end = body.find(b"\r\n" + dashes, begin)
        if head_end < 0 or end < 0:
            break
        if _name(body[at:head_end]) == "model":
            return begin, end
        at = end + 2
    raise _no_model()


def _name(head: bytes) -> object:
    # Browsers send file names as raw UTF-8, which is not valid in a header.
    return HeaderParser().parsestr(head.decode("latin-1").lstrip()).get_param("name", header="content-disposition")


def _no_model() -> GatewayError:
    return GatewayError(400, 'the request names no model; give one as "model"', code="model_missing", param="model")


@dataclass(slots=True)
class Usage:
    """Token counts of one answer so far: each `usage` is cumulative, and the last one counts.

    With `continuous_usage_stats` vLLM sends one with every token.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_events: int = 0

    @property
    def answered(self) -> int | None:
        """Answer tokens; for a stream that broke off before its usage came, one per event."""
        return self.completion_tokens if self.completion_tokens is not None else (self.num_events or None)

    def read_events(self, events: bytes) -> None:
        # The first event of a chat answer holds no token.
        self.num_events += len(_EVENT.findall(events)) - len(_FIRST.findall(events))
        self.read(events)

    def read(self, answer: bytes) -> None:
        """Read a part of the answer, which for a stream must be whole events."""
        begin = max((found.start() for found in _USAGE.finditer(answer)), default=None)
        if begin is None:
            return
        for name, pattern in _COUNTS.items():
            # A text of somebody else's: what no answer can have is not its count, and would not fit in the registry.
            if (match := pattern.search(answer, begin)) and len(match[1]) <= _MOST_DIGITS:
                setattr(self, name, int(match[1]))
