"""The one exception that means: the user asked for something that cannot be had."""


class OverspillError(ValueError):
    """A setting, a machine or a model that Overspill cannot work with; the message says what to change."""
