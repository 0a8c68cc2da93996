"""Why nothing could be verified."""

from overspill.kv.errors import OverspillError


class CannotVerify(OverspillError):
    """The model and its settings are understood, and no proof can be made of them here."""


class TooNoisy(CannotVerify):
    """vLLM alone differs from itself so much that equal answers could not be told from wrong ones."""
