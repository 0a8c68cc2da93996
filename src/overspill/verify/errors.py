"""Why nothing could be verified."""

from overspill.kv.errors import OverspillError


class CannotVerify(OverspillError):
    """The model and its settings are understood, and no proof can be made of them here."""
