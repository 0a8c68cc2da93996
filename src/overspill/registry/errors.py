"""What can go wrong with the registry, by what the user can do about it."""

from overspill.kv.errors import OverspillError


class RegistryError(OverspillError):
    """Something that the registry refuses; the message says what to change."""


class UnknownModel(RegistryError):
    """No model of that name; the message names one that is near, or some that there are."""


class DuplicateModel(RegistryError):
    """A model of that name is there already."""


class UnknownRecord(RegistryError):
    """No run, result or key of that number or name."""


class CannotNow(RegistryError):
    """A valid request that is not possible at present: the base of errors that end a command with 1 instead of 2."""


class RegistryUnavailable(CannotNow):
    """The database cannot be opened, read or written: locked, unreachable, full, damaged, newer than this program."""


class ChangedMeanwhile(CannotNow):
    """Somebody else changed the record since it was read; nothing was written."""


class StillRunning(CannotNow):
    """A model that runs was to be removed."""
