"""Errors of the manager: why a model is not served, grouped by what the client can do about it."""

from overspill.kv.errors import OverspillError


class ManagerError(OverspillError):
    """The manager refuses a request; the message says what to change."""


class AlreadyManaged(ManagerError):
    """Another manager already runs these engines."""


class NotParked(ManagerError):
    """The model cannot be parked, at all or in its current state."""


class NotServed(ManagerError):
    """The model cannot answer now; base of the classes below."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, log_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.retry_after_s, self.log_lines = retry_after_s, log_lines
        """Seconds until a retry makes sense, None if it would not help; and the end of the engine's log, if useful."""


class StartFailed(NotServed):
    """The engine ended before it answered, or could not be started; carries the end of its log."""


class NoRoom(NotServed):
    """The model needs more memory than the machine has or than may be freed."""


class QueueFull(NotServed):
    """Too many requests already wait for models to load."""


class StillLoading(NotServed):
    """The model was not ready within the longest time a request may wait."""


class Stopped(NotServed):
    """The model or the manager was stopped while the request waited."""
