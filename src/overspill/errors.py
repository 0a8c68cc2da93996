"""Errors shared by several packages."""

from overspill.kv.errors import OverspillError


class CannotServe(OverspillError):
    """The request is valid but cannot be met: the port is taken, RAM is short, vLLM does not start."""
