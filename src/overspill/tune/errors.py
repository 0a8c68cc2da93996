"""Why no best settings are found."""

from overspill.kv.errors import OverspillError


class TuneError(OverspillError):
    """A mistake in what was asked for; the message says what to write."""


class CannotTune(OverspillError):
    """Well asked, and nothing came of it: it does not fit, no candidate started, the time was too short."""
