"""API keys, the password, sessions and the audit log, on a SQLite file and on a PostgreSQL server."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from overspill.registry import Registry, RegistryError, UnknownRecord, open_registry
from overspill.registry.access import (
    MAX_SESSIONS,
    KeyScope,
    create_key,
    digest,
    end_session,
    end_sessions_before,
    hash_password,
    key_prefix,
    keys_were_used,
    list_keys,
    list_sessions,
    new_key,
    new_session_id,
    password_hash,
    password_matches,
    remove_key,
    remove_password,
    sessions_were_seen,
    set_password,
    start_session,
)
from overspill.registry.audit import AuditOutcome, list_audit, record
from overspill.registry.tables import now
from tests.postgresql import new_database

PASSWORD = "four words, not together"


@pytest.fixture(params=["sqlite", "postgresql"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    url = f"sqlite:///{tmp_path}/registry.db" if request.param == "sqlite" else new_database()
    with open_registry(url) as registry:
        yield registry


def everything_kept(registry: Registry) -> str:
    """All texts of the manager's tables."""
    with registry.reading() as session:
        tables = ("manager_keys", "manager_passwords", "manager_sessions", "manager_audit")
        return repr([session.execute(text(f"SELECT * FROM {table}")).all() for table in tables])


def test_a_key_is_shown_once_and_kept_as_a_hash(registry: Registry) -> None:
    secret, key = create_key(registry, "laptop", KeyScope.GATEWAY)
    assert list_keys(registry) == [key]
    assert key.digest == digest(secret) and key.prefix == key_prefix(secret) and key.scope is KeyScope.GATEWAY
    kept = everything_kept(registry)
    assert key.digest in kept and key.prefix in kept
    random_part = secret.removeprefix(f"osk_{key.prefix}_")
    assert len(random_part) == 43 and random_part not in kept


def test_keys_have_names_of_their_own(registry: Registry) -> None:
    create_key(registry, "laptop")
    with pytest.raises(RegistryError, match="there is a key laptop already"):
        create_key(registry, "laptop")
    for name in ("", "a b", "-x", "a\nb", "x" * 101, "nul\0"):
        with pytest.raises(RegistryError, match="is not a name for a key"):
            create_key(registry, name)
    with pytest.raises(UnknownRecord, match="did you mean laptop"):
        remove_key(registry, "laptob")
    remove_key(registry, "laptop")
    assert list_keys(registry) == []
    with pytest.raises(UnknownRecord, match="there are none"):
        remove_key(registry, "nul\0")


def test_when_keys_were_used_is_noted(registry: Registry) -> None:
    _, key = create_key(registry, "laptop")
    create_key(registry, "other")
    at = now()
    keys_were_used(registry, {key.prefix: at, "gone": at})
    assert [key.last_used_at for key in list_keys(registry)] == [at, None]


def test_a_password_is_kept_with_salt_and_compared_slowly(registry: Registry) -> None:
    assert password_hash(registry) is None
    set_password(registry, PASSWORD)
    kept = password_hash(registry)
    assert kept is not None and kept.startswith("scrypt$") and PASSWORD not in everything_kept(registry)
    assert password_matches(PASSWORD, kept) and not password_matches(PASSWORD + " ", kept)
    set_password(registry, PASSWORD)
    assert password_hash(registry) != kept, "the same password has another salt"
    assert remove_password(registry) and not remove_password(registry)
    assert password_hash(registry) is None


@pytest.mark.parametrize("password", ["short", "x" * 1001])
def test_a_password_of_a_bad_length_is_refused(registry: Registry, password: str) -> None:
    with pytest.raises(RegistryError, match=f"10 to 1000 characters, and this one has {len(password)}"):
        set_password(registry, password)
    assert password_hash(registry) is None


def test_a_kept_hash_that_is_damaged_matches_nothing() -> None:
    good = hash_password(PASSWORD)
    for damaged in ("", "plain", good[:-5], good.replace("scrypt", "md5"), "scrypt$60$8$3$AAAA$AAAA", good + "$"):
        assert not password_matches(PASSWORD, damaged)
        assert not password_matches("", damaged)


def test_only_what_looks_like_a_key_has_a_prefix() -> None:
    secret, prefix = new_key()
    assert key_prefix(secret) == prefix
    for wrong in ("", secret[:-1], secret + "x", secret.upper(), "sk-1234", f" {secret}", secret.replace("_", "-", 1)):
        assert key_prefix(wrong) is None
    assert len({new_key()[0] for _ in range(100)}) == 100


def test_sessions_begin_are_seen_and_end(registry: Registry) -> None:
    ids = [new_session_id() for _ in range(3)]
    logins = [start_session(registry, one, "password", "10.0.0.7") for one in ids]
    assert {login.digest for login in list_sessions(registry)} == {digest(one) for one in ids}
    assert not any(one in everything_kept(registry) for one in ids)
    later = now() + timedelta(hours=1)
    sessions_were_seen(registry, {logins[0].digest: later})
    end_session(registry, logins[1].digest)
    end_sessions_before(registry, created=now() - timedelta(days=1), seen=later - timedelta(minutes=1))
    assert [login.digest for login in list_sessions(registry)] == [logins[0].digest]
    end_sessions_before(registry, created=now() + timedelta(minutes=1), seen=now() - timedelta(days=1))
    assert list_sessions(registry) == []


def test_a_new_password_ends_all_sessions_a_removed_key_its_own(registry: Registry) -> None:
    _, key = create_key(registry, "laptop")
    start_session(registry, "a", key.who, "")
    start_session(registry, "b", "password", "")
    remove_key(registry, "laptop")
    assert [login.who for login in list_sessions(registry)] == ["password"]
    set_password(registry, PASSWORD)
    assert list_sessions(registry) == []


def test_the_number_of_sessions_is_bounded(registry: Registry) -> None:
    for number in range(MAX_SESSIONS + 3):
        start_session(registry, f"id{number}", "password", "")
    kept = {login.digest for login in list_sessions(registry)}
    assert len(kept) == MAX_SESSIONS
    assert digest(f"id{MAX_SESSIONS + 2}") in kept and digest("id0") not in kept


def test_the_audit_log_says_who_did_what_and_how_it_went(registry: Registry) -> None:
    record(registry, who="key laptop", action="stop", subject="qwen", address="10.0.0.7")
    record(registry, who="local", action="start", subject="x", outcome=AuditOutcome.FAILED, detail="no room")
    newest, oldest = list_audit(registry)
    assert (oldest.who, oldest.action, oldest.subject, oldest.address) == ("key laptop", "stop", "qwen", "10.0.0.7")
    assert (newest.outcome, newest.detail) == (AuditOutcome.FAILED, "no room")
    assert abs(newest.at - now()) < timedelta(minutes=1)
    assert list_audit(registry, before=newest.id) == [oldest]
    assert list_audit(registry, limit=1) == [newest]
    assert list_audit(registry, before=1 << 60, limit=-5) == []


def test_the_audit_log_is_bounded(registry: Registry) -> None:
    for number in range(12):
        record(registry, who="local", action=f"act {number}", keep=5)
    assert [entry.action for entry in list_audit(registry)] == [f"act {number}" for number in range(11, 6, -1)]


def test_what_clients_write_into_the_audit_log_stays_one_line(registry: Registry) -> None:
    entry = record(registry, who="a\nb\0", action="\x1b[31m", subject="\ud800", address="x" * 10_000, detail="naïve ✓")
    assert (entry.who, entry.action, entry.subject, entry.detail) == (r"a\nb\x00", r"\x1b[31m", r"\ud800", "naïve ✓")
    assert len(entry.address) == 500
    assert list_audit(registry) == [entry]
