"""A server under test: where it is, and what can be known of it before anything is measured."""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from overspill.address import client_context, listening_pid
from overspill.flags import hide_in_value
from overspill.measure import CannotMeasure, MeasureError
from overspill.settings import nearest

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    """Without /v1."""
    model: str
    """As it is served."""
    api_key: str | None = None
    pid: int | None = None
    """A process that, with those below it, is the server."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def is_here(self) -> bool:
        """On this machine, whose memory can be seen."""
        return self.pid is not None or _is_this_machine(urlsplit(self.url).hostname or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as the server lists it."""

    name: str
    root: str | None = None
    max_model_len: int | None = None


def parse_url(text: str) -> str:
    """`127.0.0.1:8000`, `http://host:8000` or `http://host:8000/v1`, as the address without /v1."""
    example = "write for example http://127.0.0.1:8000"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise MeasureError(f"{text!r:.80} is not an address: {error}; {example}") from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.username or " " in text:
        raise MeasureError(f"{hide_in_value(text)!r:.80} is not the address of a server; {example}")
    path = parts.path.rstrip("/").removesuffix("/v1")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{path}"


def find_target(url: str, model: str | None = None, api_key: str | None = None) -> Target:
    """The only model that is served there, if none is named."""
    target = Target(url=url, model=model or "", api_key=api_key)
    name = find_served(target).name
    return Target(url=url, model=name, api_key=api_key, pid=_listening_pid(url))


def find_served(target: Target) -> Served:
    """Raises if nobody answers, the key is refused, or the model is not served there."""
    served = [_served(each) for each in _list(target) if not each.get("parent")]
    names = [each.name for each in served]
    if target.model:
        found = [each for each in served if each.name == target.model]
        if not found:
            raise MeasureError(
                f"{target.url} serves {', '.join(names)}, and not {target.model!r:.80}; {nearest(target.model, names)}"
            )
        return found[0]
    if len(served) > 1:
        raise MeasureError(f"{target.url} serves {', '.join(names)}; name one of them with --model")
    return served[0]


def _served(entry: dict[str, Any]) -> Served:
    length = entry.get("max_model_len")
    return Served(
        name=str(entry["id"]), root=entry.get("root"), max_model_len=length if isinstance(length, int) else None
    )


def _list(target: Target) -> list[dict[str, Any]]:
    answer = ask(target, "/v1/models")
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        how = "another --api-key" if target.api_key else "--api-key, or OVERSPILL_API_KEY"
        raise CannotMeasure(
            f"{target.url} refuses {'this' if target.api_key else 'to answer without a'} key; give {how}"
        )
    not_openai = f"{target.url} answers, and not as an OpenAI server does: /v1/models gave"
    if answer.status_code != httpx.codes.OK:
        raise CannotMeasure(f"{not_openai} status {answer.status_code}. Is it another program's port?")
    try:
        models: list[dict[str, Any]] = [{**each, "id": each["id"]} for each in answer.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotMeasure(f"{not_openai} no list of models. Is it another program's port?") from error
    if not models:
        raise CannotMeasure(f"{target.url} serves no model yet; wait until it does")
    return models


def ask(target: Target, path: str) -> httpx.Response:
    """One GET. Raises `CannotMeasure` if nobody answers."""
    try:
        # A proxy of the environment would be measured too.
        with httpx.Client(
            timeout=_TIMEOUT, headers=target.headers, trust_env=False, verify=client_context(target.url) or True
        ) as client:
            return client.get(target.url + path)
    except httpx.InvalidURL as error:
        raise MeasureError(f"{target.url} is not an address: {error}") from error
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise CannotMeasure(
                f"the certificate of {target.url} is not one that this machine trusts ({error}); name the file of its "
                "authority, or the certificate itself, in SSL_CERT_FILE"
            ) from error
        raise CannotMeasure(
            f"no server answers at {target.url} ({error}); start one with overspill serve MODEL, or name its address"
        ) from error
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
        raise CannotMeasure(
            f"the server at {target.url} does not answer: {why}. Is it another program's port?"
        ) from error


def _is_this_machine(host: str) -> bool:
    with suppress(OSError, ValueError):
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
        if all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return True
        for address in addresses:  # an address that can be bound is one of this machine's
            family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
        return True
    return False


def _listening_pid(url: str) -> int | None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_this_machine(parts.hostname or ""):
        return None
    return listening_pid(port)
