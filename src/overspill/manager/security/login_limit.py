"""How often a password may be tried: per address and in all, with waits that double, in bounded memory."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_FREE_TRIES = 5
_LONGEST_WAIT_S = 900.0
_FORGIVEN_AFTER_S = 3600.0
_MAX_ADDRESSES = 4096
# Against many addresses at once: as soon as this many tries failed within a minute or so, all have to wait. Whoever
# logged in from their address before does not: otherwise anybody could lock the owner out.
_FREE_TRIES_OF_ALL = 50
_LONGEST_WAIT_OF_ALL_S = 60.0
_DRAIN_PER_S = 0.5
_MAX_TRUSTED = 256


@dataclass(slots=True)
class _Failures:
    count: int
    last_at: float


class LoginLimit:
    """Not kept over a restart: the manager's start takes longer than the first waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, _Failures] = OrderedDict()  # the longest ago first
        self._trusted: OrderedDict[str, None] = OrderedDict()
        self._of_all = 0.0
        self._of_all_at = clock()

    def try_now(self, address: str) -> float:
        """0 if this address may try, else the seconds until it may.

        A try counts as failed from here on, before the password is looked at: many at once get no more tries than one
        after the other.
        """
        wait = self._wait_s(address)
        if wait <= 0:
            self._count_failure(address)
        return wait

    def succeeded(self, address: str) -> None:
        """The password was right, so the try did not fail after all."""
        source = _source(address)
        self._by_address.pop(source, None)
        self._of_all = max(0.0, self._of_all - 1)
        self._trusted.pop(source, None)
        self._trusted[source] = None
        while len(self._trusted) > _MAX_TRUSTED:
            self._trusted.popitem(last=False)

    def _wait_s(self, address: str) -> float:
        now, source = self._clock(), _source(address)
        waits = [0.0]
        failures = self._by_address.get(source)
        if failures is not None and now - failures.last_at < _FORGIVEN_AFTER_S:
            waits.append(_wait(failures.count - _FREE_TRIES, _LONGEST_WAIT_S) - (now - failures.last_at))
        if source not in self._trusted:
            since = now - self._of_all_at
            over = int(self._drained(now)) - _FREE_TRIES_OF_ALL
            waits.append(_wait(over, _LONGEST_WAIT_OF_ALL_S) - since)
        return max(waits)

    def _count_failure(self, address: str) -> None:
        now, source = self._clock(), _source(address)
        failures = self._by_address.pop(source, None)
        if failures is None or now - failures.last_at >= _FORGIVEN_AFTER_S:
            failures = _Failures(0, now)
        self._by_address[source] = _Failures(failures.count + 1, now)
        while len(self._by_address) > _MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        self._of_all, self._of_all_at = self._drained(now) + 1, now

    def _drained(self, now: float) -> float:
        return max(0.0, self._of_all - (now - self._of_all_at) * _DRAIN_PER_S)


def _wait(over: int, longest: float) -> float:
    """1 s for the first try too many, then 2, 4, …"""
    return 0.0 if over < 0 else float(min(longest, 2.0 ** min(over, 30)))


def _source(address: str) -> str:
    """Of IPv6 the network: one customer has 2^64 addresses or more."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:100]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
