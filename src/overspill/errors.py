"""Why a model is not served."""

from overspill.kv.errors import OverspillError


class CannotServe(OverspillError):
    """What was asked for is clear, and cannot be: the port is taken, RAM is short, vLLM does not start."""
