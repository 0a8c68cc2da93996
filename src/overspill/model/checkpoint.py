"""The tensors of a checkpoint, from its index and the safetensors headers of its files, never their content."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from overspill.model import ModelError
from overspill.model.config import parse_object

# The format's own limit (safetensors, MAX_HEADER_SIZE): a longer header is not a header.
MAX_HEADER_BYTES = 100_000_000
# The longest index known is some 20 MB (1000 experts); a config is a few KB.
MAX_FILE_BYTES = 200_000_000
LENGTH_BYTES = 8

DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    name: str
    dtype: str
    """Name as in safetensors: BF16, F32, U8."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BITS[self.dtype] // 8


def header_length(first_bytes: bytes, file_bytes: int, file: str) -> int:
    """Length of the JSON header that follows the first eight bytes; `file` names the file in errors."""
    if len(first_bytes) < LENGTH_BYTES:
        raise ModelError(
            f"{file} is {file_bytes} bytes long, and a safetensors file begins with 8 bytes that give the length of "
            "its header; the download was cut short, fetch it again"
        )
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(
            f"{file} announces a header of {length} bytes, and safetensors allows {MAX_HEADER_BYTES}; it is not a "
            "safetensors file (a Git LFS pointer or an error page saved under its name?), fetch it again"
        )
    if length + LENGTH_BYTES > file_bytes:
        raise ModelError(
            f"{file} announces a header of {length} bytes, and the file has {file_bytes}; the download was cut short, "
            "fetch it again"
        )
    return length


def parse_header(header: bytes, file_bytes: int, file: str) -> list[Tensor]:
    """The tensors of one file, checked as safetensors itself does: no gaps, no overlaps, nothing past the end."""
    entries = parse_object(header, f"the header of {file}")
    spans = [_span(name, entry, file) for name, entry in entries.items() if name != "__metadata__"]
    spans.sort(key=lambda span: span[:2])
    _check_spans(spans, file_bytes - LENGTH_BYTES - len(header), file)
    return [tensor for _, _, tensor in spans]


def _span(name: str, entry: object, file: str) -> tuple[int, int, Tensor]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            isinstance(size, int) and size >= 0 for size in shape
        ):
            pass
        case _:
            raise ModelError(
                f"{file} describes tensor {name!r} as {_short(entry)}, and a dtype, a shape and data_offsets were "
                "expected; fetch it again"
            )
    if dtype not in DTYPE_BITS:
        raise ModelError(
            f"{file} holds tensor {name!r} of type {dtype!r}, which is none of safetensors' ({', '.join(DTYPE_BITS)})"
        )
    tensor = Tensor(name=name, dtype=dtype, shape=tuple(shape))
    if not 0 <= begin <= end or end - begin != tensor.num_bytes:
        raise ModelError(
            f"{file} gives tensor {name!r} the bytes from {begin} to {end}, and {dtype} of shape {shape} takes "
            f"{tensor.num_bytes}; fetch it again"
        )
    return begin, end, tensor


def _check_spans(spans: Iterable[tuple[int, int, Tensor]], data_bytes: int, file: str) -> None:
    expected = 0
    for begin, end, tensor in spans:
        if begin != expected:
            what = "they overlap" if begin < expected else "there is a gap"
            raise ModelError(
                f"{file}: tensor {tensor.name!r} begins at byte {begin}, and the one before it ends at {expected} "
                f"({what}); fetch it again"
            )
        expected = end
    if expected != data_bytes:
        how = "cut short" if expected > data_bytes else "changed"
        raise ModelError(
            f"{file} holds {data_bytes} bytes of weights, and its header describes {expected}; the download was {how}, "
            "fetch it again"
        )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


INDEX = "model.safetensors.index.json"


class Files(Protocol):
    """A folder or a repository that holds a model."""

    @property
    def where(self) -> str:
        """Location, for messages."""

    def content(self, name: str) -> bytes | None:
        """Content of a small file; None if there is no such file."""

    def safetensors(self) -> list[str]:
        """Names of weight files, for a model without an index."""

    def headers(self, names: Sequence[str]) -> Iterable[tuple[bytes, int]]:
        """JSON header and file size of each weight file."""


def read_tensors(files: Files) -> list[Tensor] | None:
    """Tensors of all files that vLLM would load; None if there are no weights at all."""
    placed = weight_map(files)
    names = sorted(set(placed.values())) if placed is not None else _without_copies(files.safetensors())
    if not names:
        return None
    found: dict[str, tuple[str, Tensor]] = {}
    for name, (header, size) in zip(names, files.headers(names), strict=True):
        for tensor in parse_header(header, size, f"{name} in {files.where}"):
            if tensor.name in found:
                raise ModelError(
                    f"{files.where} holds the tensor {tensor.name!r} twice, in {found[tensor.name][0]} and in {name}; "
                    "remove the file that does not belong to the model"
                )
            found[tensor.name] = (name, tensor)
    for tensor_name, name in (placed or {}).items():
        if tensor_name not in found or found[tensor_name][0] != name:
            raise ModelError(
                f"{INDEX} in {files.where} says that {name} holds the tensor {tensor_name!r}, and it does not; "
                "the files are of different versions, fetch them again"
            )
    return [tensor for _, tensor in found.values()]


def weight_map(files: Files) -> dict[str, str] | None:
    """File of each tensor according to the index; None without an index."""
    content = files.content(INDEX)
    if content is None:
        return None
    where = f"{INDEX} in {files.where}"
    placed = parse_object(content, where).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{where} has no weight_map, which says where each tensor is; fetch it again")
    for tensor, name in placed.items():
        # Shards lie beside their index. Anything else would read files that are not the model's.
        if not isinstance(name, str) or PurePosixPath(name).name != name or "\\" in name or "\0" in name:
            raise ModelError(
                f"{where} places the tensor {tensor!r} in {name!r}, and the name of a file in the same folder was "
                "expected; do not use this model unless you know who made it"
            )
        if not name.endswith(".safetensors"):
            raise ModelError(f"{where} places the tensor {tensor!r} in {name!r}, which is not a safetensors file")
    return placed


def _without_copies(names: Sequence[str]) -> list[str]:
    """Drop Mistral's second copy: consolidated.safetensors holds the whole model again under other names."""
    others = [name for name in names if not name.startswith("consolidated")]
    return sorted(others or names)
