"""Who is let in, and how often somebody may try."""

import asyncio
from typing import Any

import pytest

from overspill.manager.web.access import _MAX_ADDRESSES, IDLE, LOCAL, LONGEST, Access, LoginLimit
from overspill.registry import Registry, RegistryUnavailable
from overspill.registry.access import (
    KeyScope,
    create_key,
    list_keys,
    list_sessions,
    remove_key,
    sessions_were_seen,
    set_password,
)
from overspill.registry.tables import now
from tests.guarded_app import Clock

PASSWORD = "four words, not together"


# Keys, password, sessions


def test_loopback_clients_are_local_until_a_key_is_created(registry: Registry) -> None:
    async def story() -> None:
        access = Access(registry, is_loopback=True)
        assert await access.identify(None, None) is LOCAL
        assert await access.identify("Bearer none", None) is LOCAL, "OpenAI's clients always send something"
        secret, _ = create_key(registry, "laptop", KeyScope.GATEWAY)
        access.forget()
        assert await access.identify(None, None) is None
        assert await access.identify("Bearer none", None) is None
        known = await access.identify(f"bearer  {secret}", None)
        assert known is not None and (known.who, known.scope) == ("key laptop", KeyScope.GATEWAY)
        for wrong in (secret[:-1] + ("a" if secret[-1] != "a" else "b"), secret[:-1], f"{secret} {secret}", ""):
            assert await access.identify(f"Bearer {wrong}", None) is None
        assert await access.identify(f"Basic {secret}", None) is None

    asyncio.run(story())


def test_removing_the_last_key_does_not_admit_other_machines(registry: Registry) -> None:
    async def story() -> None:
        access = Access(registry, is_loopback=False)
        secret, _ = create_key(registry, "laptop")
        assert await access.identify(f"Bearer {secret}", None) is not None
        remove_key(registry, "laptop")
        access.forget()
        assert await access.identify(f"Bearer {secret}", None) is None
        assert await access.identify(None, None) is None

    asyncio.run(story())


def test_a_key_removed_by_another_process_ends_in_two_seconds(registry: Registry) -> None:
    async def story() -> None:
        clock = Clock()
        access = Access(registry, is_loopback=True, clock=clock)
        secret, _ = create_key(registry, "laptop")
        create_key(registry, "other")
        assert await access.identify(f"Bearer {secret}", None) is not None
        remove_key(registry, "laptop")
        clock.now += 2.1
        assert await access.identify(f"Bearer {secret}", None) is None

    asyncio.run(story())


def test_on_a_busy_server_nobody_waits_for_the_registry(registry: Registry) -> None:
    """It is read again beside the requests, which go on with what is known for less than two seconds."""

    async def story() -> None:
        clock = Clock()
        access = Access(registry, is_loopback=False, clock=clock)
        secret, _ = create_key(registry, "laptop")
        assert await access.identify(f"Bearer {secret}", None) is not None
        remove_key(registry, "laptop")
        clock.now += 1.5
        assert await access.identify(f"Bearer {secret}", None) is not None
        assert access._refreshing is not None
        await access._refreshing
        assert await access.identify(f"Bearer {secret}", None) is None

    asyncio.run(story())


def test_wrong_keys_by_the_thousand_do_not_reach_the_database(registry: Registry) -> None:
    async def story() -> None:
        secret, _ = create_key(registry, "laptop")
        access = Access(registry, is_loopback=False, clock=Clock())
        reads = 0

        def count() -> Any:
            nonlocal reads
            reads += 1
            return Access._read(access)

        access._read = count  # type: ignore[method-assign]
        wrong = [f"Bearer {secret[:-5]}{number:05}" for number in range(5000)]
        answers = await asyncio.gather(*(access.identify(one, None) for one in wrong if one != f"Bearer {secret}"))
        assert set(answers) == {None} and reads == 1

    asyncio.run(story())


def test_a_login_has_a_session_until_logout(registry: Registry) -> None:
    async def story() -> None:
        set_password(registry, PASSWORD)
        access = Access(registry, is_loopback=True)
        assert await access.log_in("wrong", "10.0.0.7") is None
        assert await access.log_in("x" * 100_000, "10.0.0.7") is None
        session_id = await access.log_in(PASSWORD, "10.0.0.7")
        assert session_id is not None
        known = await access.identify(None, session_id)
        assert known is not None and known.who.startswith("session ") and known.scope is KeyScope.ALL
        assert session_id not in known.who
        assert await access.identify("Bearer wrong", session_id) is None, "a wrong key is not overlooked"
        assert await access.identify(None, session_id + "x") is None
        await access.log_out(known)
        assert await access.identify(None, session_id) is None

    asyncio.run(story())


def test_a_full_key_may_log_in_and_a_gateway_key_may_not(registry: Registry) -> None:
    async def story() -> None:
        everything, _ = create_key(registry, "all")
        gateway, _ = create_key(registry, "gateway", KeyScope.GATEWAY)
        access = Access(registry, is_loopback=True)
        session_id = await access.log_in(everything, "")
        assert session_id is not None
        known = await access.identify(None, session_id)
        assert known is not None and known.who.endswith("by key all")
        assert await access.log_in(gateway, "") is None
        remove_key(registry, "all")
        access.forget()
        assert await access.identify(None, session_id) is None

    asyncio.run(story())


@pytest.mark.parametrize("age", [IDLE, LONGEST])
def test_an_idle_or_old_session_is_invalid_and_removed(
    registry: Registry, age: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.manager.web import access as module

    async def story() -> None:
        set_password(registry, PASSWORD)
        access = Access(registry, is_loopback=True)
        session_id = await access.log_in(PASSWORD, "")
        assert session_id is not None
        began = now()
        # Idle is counted from the last use, which is not in the database yet; old, whatever it is used for.
        over = 2 * age if age is IDLE else age + age / 100
        for offset, is_known in ((age - age / 100, True), (over, False)):
            if age is LONGEST:
                (login,) = list_sessions(registry)
                sessions_were_seen(registry, {login.digest: began + offset})
            access.forget()
            monkeypatch.setattr(module, "now", lambda offset=offset: began + offset)
            assert (await access.identify(None, session_id) is not None) == is_known
        await access.note_use()
        assert list_sessions(registry) == [], "it is removed from the database as well"

    asyncio.run(story())


def test_key_use_is_noted_and_a_brief_outage_locks_nobody_out(registry: Registry) -> None:
    async def story() -> None:
        clock = Clock()
        secret, _ = create_key(registry, "laptop")
        access = Access(registry, is_loopback=False, clock=clock)
        assert await access.identify(f"Bearer {secret}", None) is not None
        await access.note_use()
        assert list_keys(registry)[0].last_used_at is not None

        def fail() -> Any:
            raise RegistryUnavailable("locked")

        access._read = fail  # type: ignore[method-assign]
        clock.now += 30
        assert await access.identify(f"Bearer {secret}", None) is not None
        clock.now += 60
        with pytest.raises(RegistryUnavailable):
            await access.identify(f"Bearer {secret}", None)

    asyncio.run(story())


def test_waiters_share_one_try_at_an_unavailable_registry(registry: Registry) -> None:
    """Each waiter made its own try, one after the other: the last of twenty waited five minutes."""

    async def story() -> None:
        clock = Clock()
        secret, _ = create_key(registry, "laptop")
        access = Access(registry, is_loopback=False, clock=clock)
        key = f"Bearer {secret}"
        assert await access.identify(key, None) is not None
        tries, own = 0, access._read

        def fail() -> Any:
            nonlocal tries
            tries += 1
            raise RegistryUnavailable("locked")

        access._read = fail  # type: ignore[method-assign]
        clock.now += 3
        assert None not in await asyncio.gather(*(access.identify(key, None) for _ in range(20))) and tries == 1
        assert await access.identify(key, None) is not None and tries == 1, "nor does who comes a moment later"
        clock.now += 1.5
        assert await access.identify(key, None) is not None
        assert access._refreshing is not None, "it is tried again beside the requests"
        await access._refreshing
        assert tries == 2
        clock.now += 60
        refused = await asyncio.gather(*(access.identify(key, None) for _ in range(20)), return_exceptions=True)
        assert {str(one) for one in refused} == {"locked"} and tries == 3
        access._read = own  # type: ignore[method-assign]
        assert await access.identify(key, None) is not None, "as soon as it answers"

    asyncio.run(story())


def test_a_logout_counts_right_after_a_registry_failure(registry: Registry) -> None:
    async def story() -> None:
        set_password(registry, PASSWORD)
        clock = Clock()
        access = Access(registry, is_loopback=False, clock=clock)
        session_id = await access.log_in(PASSWORD, "")
        assert session_id is not None
        known = await access.identify(None, session_id)
        assert known is not None
        own = access._read

        def fail() -> Any:
            raise RegistryUnavailable("locked")

        access._read = fail  # type: ignore[method-assign]
        clock.now += 3
        assert await access.identify(None, session_id) == known
        access._read = own  # type: ignore[method-assign]
        await access.log_out(known)
        assert await access.identify(None, session_id) is None

    asyncio.run(story())


# Login limit


def tries(limit: LoginLimit, address: str, count: int) -> int:
    """How many of so many at once were let through."""
    return sum(limit.try_now(address) == 0 for _ in range(count))


def test_waits_double_after_five_tries_and_success_forgives() -> None:
    clock = Clock()
    limit = LoginLimit(clock)
    assert tries(limit, "10.0.0.7", 100) == 5, "at once, no more than one after the other"
    waits = []
    for _ in range(12):
        waits.append(limit.try_now("10.0.0.7"))
        clock.now += waits[-1]
        assert limit.try_now("10.0.0.7") == 0
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 900, 900]
    assert tries(limit, "10.0.0.8", 3) == 3, "others do not wait"
    clock.now += 900
    assert limit.try_now("10.0.0.7") == 0
    limit.succeeded("10.0.0.7")
    assert tries(limit, "10.0.0.7", 10) == 5


def test_thousands_of_addresses_are_throttled_in_bounded_memory() -> None:
    clock = Clock()
    limit = LoginLimit(clock)
    limit.succeeded("10.0.0.7")
    let_through = 0
    for number in range(20_000):
        let_through += limit.try_now(f"2001:db8:{number:x}::1") == 0
        clock.now += 0.01
    assert let_through < 200, "20000 tries within 200 s"
    assert limit.try_now("10.0.0.7") == 0, "the owner is not locked out"
    slow = LoginLimit(clock)
    for number in range(3 * _MAX_ADDRESSES):
        clock.now += 3
        assert slow.try_now(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}") == 0
    assert len(slow._by_address) == _MAX_ADDRESSES


def test_login_limits_group_ipv6_networks_and_mapped_ipv4() -> None:
    limit = LoginLimit(Clock())
    assert sum(limit.try_now(f"2001:db8::{number:x}") == 0 for number in range(100)) == 5
    assert tries(limit, "10.0.0.9", 5) == 5 and limit.try_now("::ffff:10.0.0.9") > 0
    assert tries(limit, "not an address", 9) == 5
