"""Errors as OpenAI's clients expect them, which also say who failed: the gateway, or the engine behind it."""

import json
import math
from enum import StrEnum

from overspill.manager.errors import NoRoom, NotServed, QueueFull, StartFailed, StillLoading, Stopped
from overspill.registry import RegistryError, UnknownModel


class Source(StrEnum):
    GATEWAY = "gateway"
    ENGINE = "engine"


class GatewayError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        source: Source = Source.GATEWAY,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.source, self.param, self.retry_after_s = source, param, retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's words."""
        if self.status == 404:
            return "not_found_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error, "source": str(self.source)}).encode()

    @property
    def event(self) -> bytes:
        """For a stream that has begun: OpenAI's clients raise it."""
        return b"data: " + self.body + b"\n\n"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        return headers


_CODES: dict[type[NotServed], tuple[int, str, Source]] = {
    StartFailed: (503, "engine_failed", Source.ENGINE),
    NoRoom: (503, "no_room", Source.GATEWAY),
    QueueFull: (503, "queue_full", Source.GATEWAY),
    StillLoading: (503, "engine_starting", Source.ENGINE),
    Stopped: (503, "engine_stopped", Source.GATEWAY),
}


def from_not_served(error: NotServed) -> GatewayError:
    status, code, source = _CODES.get(type(error), (503, "not_served", Source.GATEWAY))
    message = str(error)
    if isinstance(error, StartFailed) and error.log_lines:
        message = "\n".join([message, "the last lines of its log:", *error.log_lines])
    return GatewayError(status, message, code=code, source=source, param="model", retry_after_s=error.retry_after_s)


def from_registry(error: RegistryError) -> GatewayError:
    if isinstance(error, UnknownModel):
        return GatewayError(404, str(error), code="model_not_found", param="model")
    return GatewayError(503, str(error), code="registry_unavailable", retry_after_s=5.0)
