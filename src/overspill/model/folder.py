"""A model in a folder: its config, and the headers of its weight files."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from overspill.model.checkpoint import read_tensors
from overspill.model.config import Config, parse_object
from overspill.model.describe import describe
from overspill.model.errors import AccessDenied, BadCheckpoint, ModelNotFound
from overspill.model.facts import ModelFacts
from overspill.model.tensors import LENGTH_BYTES, header_length

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
# The longest index known is some 20 MB (1000 experts); a config is a few KB.
MAX_FILE_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path

    @property
    def where(self) -> str:
        return str(self.path)

    def content(self, name: str) -> bytes | None:
        try:
            with _opened(self.path / name) as (file, _):
                return file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return None

    def safetensors(self) -> list[str]:
        with _explained(self.path):
            return sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(".safetensors"))

    def headers(self, names: Sequence[str]) -> Iterator[tuple[bytes, int]]:
        for name in names:
            yield self._header(name)

    def _header(self, name: str) -> tuple[bytes, int]:
        try:
            with _opened(self.path / name) as (file, size):
                length = header_length(file.read(LENGTH_BYTES), size, f"{name} in {self.where}")
                return file.read(length), size
        except FileNotFoundError as error:
            raise BadCheckpoint(
                f"{self.where} should hold {name}, and does not; the download was cut short, fetch it again"
            ) from error


def read_folder(path: Path, *, name: str | None = None, dtype: str = "auto") -> ModelFacts:
    """`name` is what the model is called, if not as the folder; `dtype` is vLLM's --dtype."""
    with _explained(path):
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise ModelNotFound(f"{path} {what}, and a folder with a {CONFIG} was expected; check the path")
    folder = Folder(path)
    content = folder.content(CONFIG)
    if content is None:
        raise ModelNotFound(f"{path} holds no {CONFIG}{_instead(folder)}; vLLM needs a model in Hugging Face's format")
    config = Config.parse(content, where=f"{CONFIG} in {path}")
    quant_file = folder.content(QUANT_CONFIG)
    return describe(
        config,
        read_tensors(folder),
        name=name or path.resolve().name,
        folder=path,
        quant_file=None if quant_file is None else parse_object(quant_file, f"{QUANT_CONFIG} in {path}"),
        dtype=dtype,
    )


def _instead(folder: Folder) -> str:
    with _explained(folder.path):
        names = sorted(entry.name for entry in folder.path.iterdir())
    return f" (it holds {', '.join(names[:5])}{', ...' if names[5:] else ''})" if names else " and nothing else"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file and its size; FileNotFoundError is left to the caller, who knows whether it must be there."""
    with _explained(path):
        # Before it is opened: a pipe would keep us waiting for a writer.
        if path.exists() and not path.is_file():
            raise ModelNotFound(f"{path} is not a file, and one was expected; remove it")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What the operating system refuses, as a sentence."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise AccessDenied(f"{path} may not be read by this user; change its permissions, or run as another") from error
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read ({error}); check the path") from error
