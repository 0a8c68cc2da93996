"""Model names, each standing for a folder, a model of the registry, or a repository.

The registry is imported and read only where one exists: most commands can do without it.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overspill.files import state_folder
from overspill.kv.errors import OverspillError
from overspill.settings import GivenBy, Value, as_flags, with_registered

if TYPE_CHECKING:
    from overspill.registry import Model, ModelSettings


class NoRegistry(OverspillError):
    """The registry cannot be used, for the reason in the message; whatever does not need it continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    name: str
    """The name as the user gave it."""
    source: str
    """The folder or repository that vLLM and the planner are given."""
    is_registered: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The registry's values for settings of `overspill.settings`."""
    vllm_args: tuple[str, ...] = ()
    """vLLM's own flags from the registry."""
    warning: str = ""
    """Why nothing was taken from the registry, where something could have been expected."""

    @classmethod
    def of_model(cls, name: str, settings: "ModelSettings") -> "ModelRef":
        """Reference to a registered model."""
        return cls(
            name=name,
            source=settings.source,
            is_registered=True,
            settings=settings.for_commands,
            vllm_args=settings.vllm_args,
        )

    def applied(self, values: Mapping[str, Value]) -> dict[str, Value]:
        return with_registered(values, self.name, self.settings)

    def notes(self, values: Mapping[str, Value]) -> list[str]:
        """Lines on what was taken from the registry, or why nothing was; `values` are the result of `applied`."""
        if not self.is_registered:
            return [f"warning: {self.warning}"] if self.warning else []
        taken = as_flags({name: one.value for name, one in values.items() if one.origin is GivenBy.REGISTRY})
        own = [f"-- {shlex.join(self.vllm_args)}"] if self.vllm_args else []
        what = f"{self.name} is a model of the registry: {self.source}"
        return [f"{what}; from there: {' '.join([*taken, *own])}" if taken or own else what]


def look_up(name: str, environ: Mapping[str, str] | None = None) -> ModelRef:
    """Resolve a name: a model's folder is used as it is; otherwise the registry wins over the hub.

    An unreadable registry is a warning where the name may be a repository's, and an error where it is most likely a
    registered one.
    """
    environ = os.environ if environ is None else environ
    plain = ModelRef(name=name, source=name)
    if name.startswith(("/", ".", "~")) or not has_registry(environ):
        return plain
    if _is_model_folder(name):
        with suppress(NoRegistry):  # a folder needs no registry
            if not isinstance(model := _registered(name, environ), str):
                shadowed = (
                    f"{name} is a folder here, and is used; the registry's {name} ({model.settings.source}) and its "
                    "settings are not. To use them, run this in another folder"
                )
                return ModelRef(name=name, source=name, warning=shadowed)
        return plain
    try:
        model = _registered(name, environ)
    except NoRegistry as error:
        if "/" not in name and not os.path.exists(name):
            raise
        warning = f"{str(error).rstrip('.')}. So {name} is treated as a repository or a folder"
        return ModelRef(name=name, source=name, warning=warning)
    if isinstance(model, str):
        # Most repositories have an owner and a slash, and are not registered; a bare name is likely misspelt.
        if not model or "/" in name or os.path.exists(name):
            return plain
        ended = model if model.endswith("?") else f"{model}."
        return ModelRef(name=name, source=name, warning=f"{ended} So {name} is treated as a repository")
    if not os.path.isabs(model.settings.source) and os.path.lexists(model.settings.source):
        # The right to name a repository must not give access to folders.
        raise OverspillError(
            f"{name} is the repository {model.settings.source}, and a folder of that name is in {os.getcwd()}, which "
            "vLLM would take instead; run this somewhere else, or give the model the folder's whole path with: "
            f"overspill models edit {name} --source"
        )
    return ModelRef.of_model(name, model.settings)


def has_registry(environ: Mapping[str, str]) -> bool:
    """Whether a registry exists, checked without importing the code that opens it."""
    if environ.get("OVERSPILL_DATABASE_URL"):
        return True
    folder = state_folder(environ)
    return folder is not None and (folder / "registry.db").exists()


@contextmanager
def using_registry() -> Iterator[None]:
    """Turn every failure of the registry into `NoRegistry`."""
    try:
        # Importing SQLAlchemy takes as long as a plan.
        from overspill.registry import RegistryError
    except ImportError as error:
        raise NoRegistry(f"the registry cannot be used: {error}; run: pip install overspill") from error
    try:
        yield
    except RegistryError as error:
        raise NoRegistry(str(error)) from error
    except Exception as error:  # any error here is the registry's; callers continue without it
        raise NoRegistry(f"the registry failed: {type(error).__name__}: {error}") from error


def _registered(name: str, environ: Mapping[str, str]) -> "Model | str":
    """The registered model, or why there is none; empty without a registry."""
    with using_registry():
        from overspill.registry import UnknownModel, get_model, open_existing

        if (registry := open_existing(environ)) is None:
            return ""
        with registry:
            try:
                return get_model(registry, name)
            except UnknownModel as error:
                return str(error)


def _is_model_folder(name: str) -> bool:
    return os.path.isfile(os.path.join(name, "config.json"))
