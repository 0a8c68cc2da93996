"""Grants: never more than the card, floors kept, needs met where there is room, and at rest on constant demand."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overspill.kv.ledger import Account
from overspill.manager.grants import committed, divide, next_grants, shares

# A busy machine is no fault of these.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def account(
    *, held: int = 0, granted: int = 0, wanted: int = 0, floor: int = 0, most: int = 1000, weight: int = 1
) -> Account:
    return Account(
        pid=1, started=1, granted=granted, held=held, used=0, wanted=wanted, floor=floor, most=most, weight=weight
    )


@st.composite
def engines(draw: st.DrawFn) -> dict[int, Account]:
    found = {}
    for row in range(draw(st.integers(1, 5))):
        floor = draw(st.integers(1, 50))
        most = floor + draw(st.integers(0, 400))
        held = draw(st.integers(floor, most))
        found[row] = account(
            held=held, floor=floor, most=most, wanted=draw(st.integers(0, 500)), weight=draw(st.integers(0, 4))
        )
    return found


def with_room(accounts: dict[int, Account], more: int) -> int:
    return committed(accounts.values()) + more


@unhurried
@given(engines(), st.integers(0, 300))
def test_floors_are_kept_and_needs_met_where_there_is_room(accounts: dict[int, Account], more: int) -> None:
    capacity = with_room(accounts, more)
    for divided in (
        shares(accounts, capacity), divide(accounts, capacity), divide(accounts, capacity, evens=False),
    ):  # fmt: skip
        assert sum(divided.values()) <= capacity
        assert all(one.floor <= divided[row] <= one.most for row, one in accounts.items())
        needs = {row: min(one.most, max(one.floor, one.wanted)) for row, one in accounts.items()}
        if sum(needs.values()) <= capacity:
            assert all(divided[row] >= needs[row] for row in accounts)


@unhurried
@given(engines(), st.integers(0, 300), st.booleans())
def test_constant_demand_comes_to_rest(accounts: dict[int, Account], more: int, evens: bool) -> None:
    """Also where the division has just changed everything."""
    capacity = with_room(accounts, more)
    for _ in range(12):
        before, grants = accounts, next_grants(accounts, capacity, evens=evens)
        accounts = {row: one._replace(granted=grants.get(row, one.granted)) for row, one in accounts.items()}
        accounts = {row: one._replace(held=one.granted) for row, one in accounts.items()}
    assert accounts == before
    left = capacity - committed(accounts.values())
    assert left <= capacity / 32 + len(accounts) or all(one.held == one.most for one in accounts.values())


@settings(unhurried, max_examples=300)
@given(engines(), st.integers(0, 300), st.randoms(use_true_random=False))
def test_no_interleaving_takes_more_than_the_card(accounts: dict[int, Account], more: int, draw: random.Random) -> None:
    """Engines move, die and want between what the manager reads and what it writes."""
    capacity = with_room(accounts, more)

    def move() -> None:
        row = draw.choice(list(accounts))
        one, granted = accounts[row], accounts[row].granted or accounts[row].held
        match draw.randrange(4):
            case 0 if one.held < granted:
                accounts[row] = one._replace(held=draw.randint(one.held, granted))
            case 1 if one.held > granted:
                accounts[row] = one._replace(held=draw.randint(granted, one.held))
            case 2 if len(accounts) > 1 and draw.random() < 0.1:
                del accounts[row]
            case _:
                accounts[row] = one._replace(wanted=draw.randrange(500))
        assert committed(accounts.values()) <= capacity

    for _ in range(60):
        move()
        seen = dict(accounts)
        for _ in range(draw.randrange(3)):
            move()
        grants = next_grants(seen, capacity, evens=draw.random() < 0.5)
        for row, grant in draw.sample(sorted(grants.items()), len(grants)):
            if row in accounts:
                accounts[row] = accounts[row]._replace(granted=grant)
            assert committed(accounts.values()) <= capacity
            if draw.random() < 0.3:
                move()


def test_need_goes_before_cache_and_both_by_weight() -> None:
    idle = account(held=800, granted=800, wanted=10, floor=100)
    busy = account(held=200, granted=200, wanted=500, floor=100)
    assert divide({0: idle, 1: busy}, 1000) == {0: 300, 1: 700}, "what nobody needs is halved"
    assert divide({0: idle._replace(weight=3), 1: busy}, 1000) == {0: 400, 1: 600}
    both = {0: idle._replace(wanted=2000, weight=3), 1: busy._replace(wanted=2000)}
    assert divide(both, 1000) == {0: 700, 1: 300}, "floors, and the rest by weight"


def test_revoked_memory_is_granted_when_it_was_given_back() -> None:
    idle = account(held=800, granted=800, wanted=10, floor=100)
    busy = account(held=200, granted=200, wanted=500, floor=100)
    assert next_grants({0: idle, 1: busy}, 1000) == {0: 300}
    idle = idle._replace(granted=300)
    assert next_grants({0: idle, 1: busy}, 1000) == {}
    assert next_grants({0: idle._replace(held=600), 1: busy}, 1000) == {1: 400}
    assert next_grants({0: idle._replace(held=300), 1: busy}, 1000) == {1: 700}


def test_a_small_change_of_demand_moves_nothing() -> None:
    first = account(held=500, granted=500, wanted=300, floor=100)
    second = account(held=500, granted=500, wanted=200, floor=100)
    for wanted in range(0, 500, 50):
        assert next_grants({0: first, 1: second._replace(wanted=wanted)}, 1000) == {}
    assert next_grants({0: first, 1: second}, 900) == {1: 400}


def test_memory_that_nobody_needs_is_evened_out_only_at_rest() -> None:
    accounts = {0: account(held=800, granted=800, floor=100), 1: account(held=200, granted=200, floor=100)}
    assert next_grants(accounts, 1000, evens=False) == {}
    assert next_grants(accounts, 1000, evens=True) == {0: 500}
    assert next_grants({**accounts, 1: accounts[1]._replace(wanted=300)}, 1000, evens=False) == {0: 400}


def test_a_card_that_shrinks_revokes_at_once() -> None:
    accounts = {0: account(held=500, granted=500, floor=100), 1: account(held=500, granted=500, floor=100)}
    assert next_grants(accounts, 600) == {0: 300, 1: 300}
    assert next_grants(accounts, 0) == {0: 100, 1: 100}, "floors are kept"
