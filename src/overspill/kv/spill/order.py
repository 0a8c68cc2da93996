"""The order in which a model's layers write and read their KV, recorded once at the start and compared.

The window prepares a layer's half between the attention of the layer before it and its own. A model that writes KV
earlier than that (ahead of time, for another layer, on a side stream) would overwrite what another layer still reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from overspill.kv.errors import OverspillError
from overspill.kv.spill.window import Layer


class Event(NamedTuple):
    is_write: bool
    layer: str

    def __str__(self) -> str:
        return f"{'writes' if self.is_write else 'reads'} the KV of {self.layer}"


def check_order(events: Sequence[Event], layers: Sequence[Layer], model: str) -> None:
    """Refuse a model whose forward does not do what the window expects, layer by layer: write, then read.

    A backend may write within its attention, and then shows no write; a layer that reads another's KV has none.
    """
    at = 0
    for event in events:
        expected = layers[at] if at < len(layers) else None
        if expected is None or event.layer != expected.name or (event.is_write and not expected.is_owner):
            wanted = f"expected {expected.name}" if expected is not None else "expected nothing more"
            raise OverspillError(
                f"spill does not work with {model}: its forward {event} where Overspill {wanted}. Remove spill_bytes; "
                "offload (host_bytes) works"
            )
        at += not event.is_write
    if at < len(layers):
        raise OverspillError(
            f"spill does not work with {model}: its forward never read the KV of {layers[at].name}. Remove "
            "spill_bytes; offload (host_bytes) works"
        )


@contextmanager
def recorded(modules: Mapping[str, Any], layers: Sequence[Layer]) -> Iterator[list[Event]]:
    """What the layers' modules write and read inside this context. `modules` is vLLM's static forward context."""
    events: list[Event] = []
    undo: list[Callable[[], None]] = []

    def watch(owner: Any, method: str, event: Event) -> None:
        call = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return call(*args, **kwargs)

        setattr(owner, method, watched)
        undo.append(lambda: delattr(owner, method))

    try:
        for layer in layers:
            module = modules[layer.name]
            if hasattr(module.impl, "do_kv_cache_update"):
                watch(module.impl, "do_kv_cache_update", Event(True, layer.name))
            # Latent attention has its own way into the backend.
            if hasattr(module, "forward_impl"):
                watch(module, "forward_impl", Event(False, layer.name))
            else:
                watch(module.impl, "forward", Event(False, layer.name))
        yield events
    finally:
        for restore in undo:
            restore()
