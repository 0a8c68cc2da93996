"""The tensors of a checkpoint, from its index and the headers of its files, wherever these are."""

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Protocol

from overspill.model.config import parse_object
from overspill.model.errors import BadCheckpoint, BadConfig
from overspill.model.tensors import Tensor, parse_header

INDEX = "model.safetensors.index.json"


class Files(Protocol):
    """A folder or a repository that holds a model."""

    @property
    def where(self) -> str:
        """For messages."""

    def content(self, name: str) -> bytes | None:
        """Of a small file; None if there is none."""

    def safetensors(self) -> list[str]:
        """Names of weight files, for a model without an index."""

    def headers(self, names: Sequence[str]) -> Iterable[tuple[bytes, int]]:
        """Of weight files: the JSON of the header, and the size of the file."""


def read_tensors(files: Files) -> list[Tensor] | None:
    """Of all files that vLLM would load; None if there are no weights at all."""
    placed = _weight_map(files)
    names = sorted(set(placed.values())) if placed is not None else _without_copies(files.safetensors())
    if not names:
        return None
    found: dict[str, tuple[str, Tensor]] = {}
    for name, (header, size) in zip(names, files.headers(names), strict=True):
        for tensor in parse_header(header, size, f"{name} in {files.where}"):
            if tensor.name in found:
                raise BadCheckpoint(
                    f"{files.where} holds the tensor {tensor.name!r} twice, in {found[tensor.name][0]} and in {name}; "
                    "remove the file that does not belong to the model"
                )
            found[tensor.name] = (name, tensor)
    for tensor_name, name in (placed or {}).items():
        if tensor_name not in found or found[tensor_name][0] != name:
            raise BadCheckpoint(
                f"{INDEX} in {files.where} says that {name} holds the tensor {tensor_name!r}, and it does not; "
                "the files are of different versions, fetch them again"
            )
    return [tensor for _, tensor in found.values()]


def _weight_map(files: Files) -> dict[str, str] | None:
    """The index: which file holds which tensor."""
    content = files.content(INDEX)
    if content is None:
        return None
    where = f"{INDEX} in {files.where}"
    try:
        placed = parse_object(content, where).get("weight_map")
    except BadConfig as error:
        raise BadCheckpoint(str(error)) from error
    if not isinstance(placed, dict) or not placed:
        raise BadCheckpoint(f"{where} has no weight_map, which says where each tensor is; fetch it again")
    for tensor, name in placed.items():
        # Shards lie beside their index. Anything else would read files that are not the model's.
        if not isinstance(name, str) or PurePosixPath(name).name != name or "\\" in name or "\0" in name:
            raise BadCheckpoint(
                f"{where} places the tensor {tensor!r} in {name!r}, and the name of a file in the same folder was "
                "expected; do not use this model unless you know who made it"
            )
        if not name.endswith(".safetensors"):
            raise BadCheckpoint(f"{where} places the tensor {tensor!r} in {name!r}, which is not a safetensors file")
    return placed


def _without_copies(names: Sequence[str]) -> list[str]:
    """Mistral publishes its models twice in a folder; consolidated.safetensors is the whole under other names."""
    others = [name for name in names if not name.startswith("consolidated")]
    return sorted(others or names)
