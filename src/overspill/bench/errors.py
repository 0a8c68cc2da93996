"""What can go wrong with a measurement, by who can do something about it."""

from overspill.kv.errors import OverspillError


class BenchError(OverspillError):
    """A mistake in what was asked to be measured; the message says what to change."""


class CannotBench(BenchError):
    """Well asked, and not possible at present: no server, no right, no room. Ends a command with 1 instead of 2."""
