"""Measurements: `overspill bench`, `ab` and `tune` are schedules over one kind of trial, and share its reports."""

from overspill.kv.errors import OverspillError


class MeasureError(OverspillError):
    """Mistake in the request; the message says what to write instead."""


class CannotMeasure(MeasureError):
    """Valid request that cannot be met at present: no server, no room, no candidate that started, a full disk.

    Commands exit with 1 instead of 2.
    """
