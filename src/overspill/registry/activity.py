"""The request log of the manager's gateway: one row per request, the newest requests only."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import Double, Integer, Text, delete, func, insert, select
from sqlalchemy.orm import Mapped, mapped_column

from overspill.registry.access import Key, list_keys
from overspill.registry.audit import printable
from overspill.registry.database import Registry
from overspill.registry.tables import Base, Word, now

MAX_REQUESTS = 100_000
MAX_AGE = timedelta(days=30)


class RequestOutcome(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"
    """The client disconnected, or stopped reading the answer."""
    FAILED = "failed"
    """The gateway or the engine refused the request, or the answer broke off."""


class Request(Base, kw_only=True):
    __tablename__ = "manager_requests"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, init=False)
    at: Mapped[datetime]
    """When the request's headers had arrived."""
    model: Mapped[str] = mapped_column(Text)
    """Model name as the client wrote it; empty if the request named none."""
    who: Mapped[str] = mapped_column(Text)
    path: Mapped[str] = mapped_column(Text)
    outcome: Mapped[RequestOutcome] = mapped_column(Word(RequestOutcome))
    reason: Mapped[str | None] = mapped_column(Text, default=None)
    http_status: Mapped[int | None] = mapped_column(Integer, default=None)
    prompt_tokens: Mapped[int | None] = mapped_column(Integer, default=None)
    completion_tokens: Mapped[int | None] = mapped_column(Integer, default=None)
    """Tokens of the answer, or those that had arrived before it broke off."""
    cached_tokens: Mapped[int | None] = mapped_column(Integer, default=None)
    """Prompt tokens found on the GPU or in RAM; None if the engine does not report them."""
    spilled_tokens: Mapped[int | None] = mapped_column(Integer, default=None)
    """Lower bound of the request's tokens that had no room on the GPU."""
    waited_s: Mapped[float] = mapped_column(Double, default=0.0)
    """Seconds until the model was ready."""
    ttft_s: Mapped[float | None] = mapped_column(Double, default=None)
    """Seconds to the first token, for streams only."""
    duration_s: Mapped[float] = mapped_column(Double, default=0.0)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second: of a stream after its first token, else of the whole answer."""
        if not self.completion_tokens:
            return None
        streamed = self.ttft_s is not None
        tokens = self.completion_tokens - streamed
        seconds = self.duration_s - (self.ttft_s if self.ttft_s is not None else self.waited_s)
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in FIELDS}
        changed = {"at": self.at.isoformat(), "outcome": str(self.outcome), "tokens_per_s": self.tokens_per_s}
        return {**values, **changed}


FIELDS = tuple(field.name for field in fields(Request))


def add_requests(registry: Registry, requests: Sequence[Request], keep: int = MAX_REQUESTS) -> None:
    """Insert requests in one transaction, and delete the oldest rows beyond `keep`."""
    rows = [{name: getattr(one, name) for name in FIELDS if name != "id"} for one in requests]
    for row in rows:
        row |= {name: printable(row[name]) for name in ("model", "who", "path")}
        row["reason"] = printable(row["reason"]) if row["reason"] is not None else None
    with registry.writing() as session:
        session.execute(insert(Request), rows)
        newest = session.scalar(select(func.max(Request.id))) or 0
        session.execute(delete(Request).where(Request.id <= newest - keep))


def forget_old_requests(registry: Registry, age: timedelta = MAX_AGE) -> None:
    with registry.writing() as session:
        session.execute(delete(Request).where(Request.at < now() - age))


def list_requests(
    registry: Registry, *, model: str = "", who: str = "", outcome: str = "", before: int | None = None,
    limit: int = 100,
) -> list[Request]:  # fmt: skip
    """Matching requests, newest first; `before` is the id of the last one on the previous page."""
    wanted = {"model": model, "who": who, "outcome": outcome}
    query = select(Request).filter_by(**{name: value for name, value in wanted.items() if value})
    if before is not None:
        query = query.where(Request.id < min(before, (1 << 31) - 1))
    query = query.order_by(Request.id.desc()).limit(max(0, min(limit, MAX_REQUESTS)))
    with registry.reading() as session:
        return list(session.scalars(query))


def request_choices(registry: Registry) -> tuple[list[str], list[str]]:
    """Models and clients with requests in the log, sorted."""
    with registry.reading() as session:
        models, clients = (list(session.scalars(select(column).distinct())) for column in (Request.model, Request.who))
    return sorted(models), sorted(clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def use_by_client(registry: Registry) -> dict[str, Use]:
    """Totals over all requests in the log, by client as in `Key.who`."""
    counted = (func.count(), func.sum(Request.prompt_tokens), func.sum(Request.completion_tokens))
    with registry.reading() as session:
        rows = session.execute(select(Request.who, *counted).group_by(Request.who)).all()
    return {
        who: Use(requests=number, prompt_tokens=int(prompt or 0), completion_tokens=int(completion or 0))
        for who, number, prompt, completion in rows
    }


def keys_and_use(registry: Registry) -> list[tuple[Key, Use]]:
    """All keys, sorted by name, each with its use."""
    used = use_by_client(registry)
    return [(key, used.get(key.who, Use())) for key in list_keys(registry)]
