"""Errors of the registry, by what the user can do about them."""

from overspill.kv.errors import OverspillError


class RegistryError(OverspillError):
    """A request that the registry refuses; the message says what to change."""


class UnknownModel(RegistryError):
    """No model has this name; the message suggests a similar name, or lists some."""


class DuplicateModel(RegistryError):
    """Another model already has this name or alias."""


class UnknownRecord(RegistryError):
    """No run, result or key has this number or name."""


class CannotNow(RegistryError):
    """Base of errors for valid requests that are impossible at present; a command then exits with 1 instead of 2."""


class RegistryUnavailable(CannotNow):
    """The database cannot be opened, read or written: locked, unreachable, full, damaged, newer than this program."""


class ChangedMeanwhile(CannotNow):
    """Another user or process changed the record since it was read; nothing was written."""


class StillRunning(CannotNow):
    """The model to remove is still running."""
