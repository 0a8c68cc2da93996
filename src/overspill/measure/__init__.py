"""Measurements: `overspill bench`, `ab` and `tune` are schedules over one kind of trial, and share its reports."""

from overspill.kv.errors import OverspillError


class MeasureError(OverspillError):
    """A mistake in the request; the message says what to write."""


class CannotMeasure(MeasureError):
    """The request is fine and cannot be met at present: no server, no room, no candidate that started, a full disk.

    Ends a command with 1 instead of 2.
    """
