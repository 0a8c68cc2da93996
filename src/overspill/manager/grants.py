"""Grants: GPU memory for the KV of elastic engines, divided by need through the ledger of their GPU.

The division is a pure function. Revoked memory is granted to others only once its engine reports holding less.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from overspill.kv.ledger import Account, Ledger

# A division stays while it serves: copying cached KV to RAM costs more than an uneven share.
_WORTH_GRANTING = 1 / 32
_TOLERATED_SHORTAGE = 1 / 16
# Engines report memory before taking it and after giving it back: free memory is trusted only when nothing moved.
_QUIET_LOOKS = 10
# Demand that pauses for a moment comes back: unneeded memory is evened out only when nothing has moved for longer.
_EVEN_LOOKS = 100


def shares(accounts: Mapping[int, Account], capacity: int) -> dict[int, int]:
    """Fair share by row: floors first, even beyond capacity; then what requests need; then the rest, each by weight."""
    floors = {row: min(one.floor, one.most) for row, one in accounts.items()}
    needs = _needs(accounts)
    weights = {row: one.weight * 1_000_000 or 1 for row, one in accounts.items()}
    left = capacity - sum(floors.values())
    needed = _pour(left, {row: needs[row] - floors[row] for row in accounts}, weights)
    left -= sum(needed.values())
    extra = _pour(left, {row: one.most - needs[row] for row, one in accounts.items()}, weights)
    return {row: floors[row] + needed[row] + extra[row] for row in accounts}


def _needs(accounts: Mapping[int, Account]) -> dict[int, int]:
    return {row: min(one.most, max(one.floor, one.wanted)) for row, one in accounts.items()}


def _pour(amount: int, caps: Mapping[int, int], weights: Mapping[int, int]) -> dict[int, int]:
    """Divide an amount by weight; what exceeds a row's cap goes to the others."""
    given = dict.fromkeys(caps, 0)
    thirsty = {row for row, cap in caps.items() if cap > 0}
    while thirsty and amount > 0:
        total = sum(weights[row] for row in thirsty)
        full = [row for row in thirsty if caps[row] * total <= amount * weights[row]]
        for row in full or thirsty:
            given[row] = caps[row] if full else amount * weights[row] // total
        if not full:
            break
        amount -= sum(caps[row] for row in full)
        thirsty.difference_update(full)
    return given


def divide(accounts: Mapping[int, Account], capacity: int, *, evens: bool = True) -> dict[int, int]:
    """Target by row: the current grants while they fit, every need is met and, with `evens`, no row has less than half
    its fair share; otherwise the fair shares."""
    fair, needs = shares(accounts, capacity), _needs(accounts)
    now = {row: min(one.most, max(one.floor, _granted(one))) for row, one in accounts.items()}
    free, could_use = capacity - sum(now.values()), any(now[row] < one.most for row, one in accounts.items())
    shortage = int(capacity * _TOLERATED_SHORTAGE) if sum(needs.values()) > capacity else 0
    is_fine = free >= 0 and not (could_use and free > capacity * _WORTH_GRANTING)
    is_fine = is_fine and all(now[row] >= min(needs[row], fair[row]) - shortage for row in accounts)
    is_fine = is_fine and not (evens and any(2 * now[row] < fair[row] for row in accounts))
    return now if is_fine else fair


def next_grants(accounts: Mapping[int, Account], capacity: int, *, evens: bool = True) -> dict[int, int]:
    """Grants to write now, by row. Memory revoked here is not granted to others in the same turn: its engine may just
    be taking it."""
    target, needs = divide(accounts, capacity, evens=evens), _needs(accounts)
    room = capacity - committed(accounts.values())
    grants = {row: target[row] for row, one in accounts.items() if target[row] <= _granted(one)}
    for row in sorted(accounts.keys() - grants.keys(), key=lambda row: _granted(accounts[row]) - needs[row]):
        # An engine that still gives memory back may keep what it holds.
        kept = max(_granted(accounts[row]), min(target[row], accounts[row].held))
        more = max(0, min(target[row] - max(_granted(accounts[row]), accounts[row].held), room))
        room -= more
        grants[row] = kept + more
    return {row: grant for row, grant in grants.items() if grant != accounts[row].granted}


def committed(accounts: Collection[Account]) -> int:
    """Memory that engines hold or may take at any moment; parked engines take theirs only when woken."""
    return sum(max(one.granted, one.held) for one in accounts if one.held)


def _granted(one: Account) -> int:
    return one.granted or one.held  # until the first grant, what the engine began with


class Grants:
    """The manager's side of one GPU's ledger; grants outlive the manager, and the next one continues from them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._ledger: Ledger | None = None
        self._of: tuple[object, ...] = ()
        self._seen: tuple[tuple[int, int, int], ...] = ()
        self._num_quiet = 0
        self._capacity = 0
        """GPU memory for the KV of these engines."""

    def look(self) -> dict[int, Account]:
        """Accounts of live engines, by row; rows of dead engines do not count, since their memory is free."""
        if self._ledger is None and self._path is not None and self._path.exists():
            self._ledger = Ledger(self._path)
        return self._ledger.accounts() if self._ledger is not None else {}

    def grant(
        self, accounts: Mapping[int, Account], free: int, *, claimed: int, starting: Collection[str]
    ) -> dict[Account, Account]:
        """Redivide the GPU, and return the accounts that changed, before and after. `free` comes on top of what the
        engines hold or were granted; `claimed` is left free. While engines are starting no more is given out, since
        how much they will take is not known yet."""
        assert self._ledger is not None
        seen = tuple((one.pid, one.granted, one.held) for one in accounts.values())
        self._num_quiet = self._num_quiet + 1 if seen == self._seen else 0
        self._seen = seen
        of = (frozenset(one.pid for one in accounts.values()), frozenset(starting))
        capacity = free + committed(accounts.values())
        is_worth_it = capacity < self._capacity or capacity - self._capacity > self._capacity * _WORTH_GRANTING
        if of != self._of:
            self._of, self._capacity = of, committed(accounts.values())
        elif self._num_quiet >= _QUIET_LOOKS and not starting and is_worth_it:
            self._capacity = capacity
        evens = self._num_quiet >= _EVEN_LOOKS
        grants = next_grants(accounts, self._capacity - claimed, evens=evens)
        for row, num_bytes in grants.items():
            self._ledger.write(row, granted=num_bytes)
        return {accounts[row]: accounts[row]._replace(granted=num_bytes) for row, num_bytes in grants.items()}

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


def sessions_of(accounts: Iterable[Account]) -> dict[int, Account]:
    """Accounts by the session of their processes, which `overspill serve` begins."""
    found = {}
    for one in accounts:
        with suppress(ProcessLookupError):
            found[os.getsid(one.pid)] = one
    return found
