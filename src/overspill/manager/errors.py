"""Errors of the manager: why a model is not served, by what the client can do about it."""

from overspill.kv.errors import OverspillError


class ManagerError(OverspillError):
    """Something that the manager refuses; the message says what to change."""


class AlreadyManaged(ManagerError):
    """Another manager has these engines."""


class NotParked(ManagerError):
    """The model cannot be parked, or not now."""


class NotServed(ManagerError):
    """The model cannot answer now; the base of what follows."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, log_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.retry_after_s, self.log_lines = retry_after_s, log_lines
        """When a retry makes sense, None if it would not help; and the end of the engine's log, if that says more."""


class StartFailed(NotServed):
    """The engine ended before it answered, or could not be started; carries the end of its log."""


class NoRoom(NotServed):
    """The model needs more memory than there is, or than may be freed."""


class QueueFull(NotServed):
    """Too many requests wait already."""


class StillLoading(NotServed):
    """The request has waited as long as it may."""


class Stopped(NotServed):
    """Somebody stopped the model, or the manager, while the request waited."""
