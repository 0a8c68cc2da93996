"""Bodies of requests: the model that one names, and another name in its place; nothing else of it is read or changed.

A prompt may be tens of megabytes of token numbers. Made into objects, they would take the interpreter for seconds, in
which no stream goes on: so the rest of JSON is skipped over, and passed on as the bytes it came as.
"""

from email.message import Message
from email.parser import HeaderParser

import msgspec

from overspill.manager.gateway.errors import GatewayError

_MOST_PARTS = 100
_LONGEST_PART_HEAD_BYTES = 4096


class _Asked(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


_ASKED = msgspec.json.Decoder(_Asked)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def model_of(body: bytes, content_type: bytes) -> str:
    if (boundary := _boundary(content_type)) is not None:
        begin, end = _model_part(body, boundary)
        name = body[begin:end].decode("utf-8", "replace")
    else:
        name = _model_in_json(body)
    if not name:
        raise _no_model()
    return name


def renamed(body: bytes, content_type: bytes, model: str) -> bytes:
    """For an engine that serves its model by another name; `model_of` has been there before."""
    if (boundary := _boundary(content_type)) is not None:
        begin, end = _model_part(body, boundary)
        return body[:begin] + model.encode() + body[end:]
    return msgspec.json.encode({**_FIELDS.decode(body), "model": model})


def _model_in_json(body: bytes) -> str:
    try:
        given = bytes(_ASKED.decode(body).model)
        return msgspec.json.decode(given, type=str) if given.startswith(b'"') else ""
    except msgspec.ValidationError:
        raise GatewayError(400, "the request is not a JSON object", code="bad_json") from None
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"the request is not JSON: {error}", code="bad_json") from None


def _boundary(content_type: bytes) -> bytes | None:
    """Of multipart/form-data, as recordings are sent in; None for all else, which is JSON."""
    if not content_type.lower().startswith(b"multipart/form-data"):
        return None
    header = Message()
    header["content-type"] = content_type.decode("latin-1")
    boundary = header.get_boundary()
    if not boundary:
        raise GatewayError(400, "the request is multipart/form-data without a boundary", code="bad_form")
    return boundary.encode("latin-1", "replace")


def _model_part(body: bytes, boundary: bytes) -> tuple[int, int]:
    """Where its value begins and ends."""
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
    # Browsers send names of files as they are, which as UTF-8 is no text of a header.
    told = HeaderParser().parsestr(head.decode("latin-1").lstrip())
    return told.get_param("name", header="content-disposition")


def _no_model() -> GatewayError:
    return GatewayError(400, 'the request names no model; give one as "model"', code="model_missing", param="model")
