"""The audit log: who did what, on what, from where, when, and how it went. Its size is bounded."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import Integer, Text, delete, select
from sqlalchemy.orm import Mapped, mapped_column

from overspill.registry.database import Registry
from overspill.registry.tables import Base, Word, now

MAX_ENTRIES = 10_000
_MAX_LENGTH = 500


class AuditOutcome(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    """Not allowed, or not possible."""
    FAILED = "failed"
    """Attempted without success."""


class AuditEntry(Base, kw_only=True):
    __tablename__ = "manager_audit"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, init=False)
    at: Mapped[datetime]
    who: Mapped[str] = mapped_column(Text)
    action: Mapped[str] = mapped_column(Text)
    subject: Mapped[str] = mapped_column(Text)
    address: Mapped[str] = mapped_column(Text)
    outcome: Mapped[AuditOutcome] = mapped_column(Word(AuditOutcome))
    detail: Mapped[str | None] = mapped_column(Text)


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
    """Add an entry. `who` is a key's name, a session or "local". Texts are escaped: clients choose parts of them."""
    entry = AuditEntry(
        at=now(),
        who=printable(who),
        action=printable(action),
        subject=printable(subject),
        address=printable(address),
        outcome=AuditOutcome(outcome),
        detail=printable(detail) if detail is not None else None,
    )
    with registry.writing() as session:
        session.add(entry)
        session.flush()
        # Ids grow with time, so the primary key finds the oldest rows.
        session.execute(delete(AuditEntry).where(AuditEntry.id <= entry.id - keep))
    return entry


def list_audit(registry: Registry, limit: int = 100, before: int | None = None) -> list[AuditEntry]:
    """Entries, newest first; `before` is the id of the last entry on the previous page."""
    query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(max(0, min(limit, MAX_ENTRIES)))
    if before is not None:
        query = query.where(AuditEntry.id < min(before, (1 << 31) - 1))
    with registry.reading() as session:
        return list(session.scalars(query))


def printable(text: str) -> str:
    """Escape text into one line: unprintable characters would let a client forge lines, and NUL cannot be stored."""
    shown = text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return shown if len(shown) <= _MAX_LENGTH else shown[: _MAX_LENGTH - 1] + "…"
