"""A model's facts and its KV cache as vLLM lays it out, found without a GPU, the weights, torch or vLLM."""

from overspill.kv.errors import OverspillError


class ModelError(OverspillError):
    """A model that cannot be described; the message says what was found, what was expected and what to do."""
