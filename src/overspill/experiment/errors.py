"""Why configurations are not compared."""

from overspill.kv.errors import OverspillError


class ExperimentError(OverspillError):
    """A mistake in what was asked for; the message says what to write."""


class CannotCompare(OverspillError):
    """Well asked, and it did not come to an end: an engine did not start or died, a disk is full."""
