"""`overspill verify`: a proof, on the user's own machine, that KV in RAM changes no token."""

from overspill.kv.errors import OverspillError


class CannotVerify(OverspillError):
    """The model and its settings are understood, but cannot be verified here."""


class TooNoisy(CannotVerify):
    """vLLM alone differs from itself so much that equal answers cannot be distinguished from wrong ones."""
