"""The exception for requirements that cannot be met."""


class OverspillError(ValueError):
    """A setting, a machine or a model that Overspill cannot work with; the message says what to change."""
