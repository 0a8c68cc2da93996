"""The audit log: who did what, on what, from where, when, and how it went. Its size is bounded."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import delete, select

from overspill.registry.database import Registry
from overspill.registry.tables import AuditRow, copied, now

MAX_ENTRIES = 10_000
_MAX_LENGTH = 500


class AuditOutcome(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    """Not allowed, or not possible."""
    FAILED = "failed"
    """Tried, and it went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    id: int
    at: datetime
    who: str
    action: str
    subject: str
    address: str
    outcome: AuditOutcome
    detail: str | None


def record(
    registry: Registry,
    *,
    who: str,
    action: str,
    subject: str = "",
    address: str = "",
    outcome: AuditOutcome = AuditOutcome.DONE,
    detail: str | None = None,
    keep: int = MAX_ENTRIES,
) -> AuditEntry:
    """`who` is a key's name, a session, or "local". Texts are made fit to print: clients choose parts of them."""
    row = AuditRow(
        at=now(),
        who=_printable(who),
        action=_printable(action),
        subject=_printable(subject),
        address=_printable(address),
        outcome=AuditOutcome(outcome),
        detail=_printable(detail) if detail is not None else None,
    )
    with registry.writing() as session:
        session.add(row)
        session.flush()
        # Numbers grow with time, so this finds its rows by the primary key.
        session.execute(delete(AuditRow).where(AuditRow.id <= row.id - keep))
        return _entry(row)


def list_audit(registry: Registry, limit: int = 100, before: int | None = None) -> list[AuditEntry]:
    """The newest first; `before` is the number of the last entry of the page above."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(max(0, min(limit, MAX_ENTRIES)))
    if before is not None:
        query = query.where(AuditRow.id < min(before, (1 << 31) - 1))
    with registry.reading() as session:
        return list(map(_entry, session.scalars(query)))


def _printable(text: str) -> str:
    """One line. What is not printable would let a client forge lines, or, as NUL, not be kept at all."""
    shown = text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return shown if len(shown) <= _MAX_LENGTH else shown[: _MAX_LENGTH - 1] + "…"


def _entry(row: AuditRow) -> AuditEntry:
    return copied(AuditEntry, row, outcome=AuditOutcome(row.outcome))
