"""vLLM's general plugin for weights in RAM."""

from overspill.weights import pinned_leftovers, transformers_layers


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    transformers_layers.register()
    pinned_leftovers.register()
