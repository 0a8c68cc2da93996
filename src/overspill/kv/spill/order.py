"""The order in which a model's layers write and read their KV, recorded once at the start and compared.

The window prepares a layer's half between the attention of the layer before it and its own. A model that writes KV
earlier than that (ahead of time, for another layer, on a side stream) would overwrite what another layer still reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from overspill.kv.errors import OverspillError
from overspill.kv.spill.window import Layer
from overspill.kv.vllm_api import watch_kv


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
    """What the layers write and read inside this context. `modules` is vLLM's static forward context."""
    events: list[Event] = []
    with ExitStack() as stack:
        for layer in layers:
            write, read = (
                partial(events.append, Event(True, layer.name)),
                partial(events.append, Event(False, layer.name)),
            )
            stack.callback(watch_kv(modules[layer.name], write, read))
        yield events
