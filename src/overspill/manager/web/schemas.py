"""Request and answer bodies of the API, for validation and for its documentation."""

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from overspill.manager.states import Snapshot
from overspill.registry.access import KeyScope
from overspill.settings import MODEL_SETTINGS, Setting


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _field(setting: Setting) -> tuple[Any, Any]:
    kind = setting.kind
    description = f"{setting.help} {kind.note}".strip()
    examples = [kind.example] if kind.example is not None else None
    # Only texts get a limit: numbers have no length.
    text = Annotated[str, Field(max_length=kind.max_length)]
    json: Any = Union[tuple(text if one is str else one for one in get_args(kind.json) or (kind.json,))]  # noqa: UP007
    return json | None, Field(None, description=description, examples=examples)


if TYPE_CHECKING:
    ModelChanges = Strict
else:
    ModelChanges = create_model(
        "ModelChanges",
        __base__=Strict,
        __doc__="Settings of a model; null unsets one.",
        **{setting.name: _field(setting) for setting in MODEL_SETTINGS},
    )


class NewModel(ModelChanges):
    name: str = Field(max_length=250, examples=["qwen"])


class ModelEdit(ModelChanges):
    version: int | None = Field(None, description="Change it only if it is still at this version.")


class PlanRequest(NewModel):
    """A registered model, with the settings to try."""


class Open(BaseModel):
    """An answer's most important fields; the answer has more."""

    model_config = ConfigDict(extra="allow")


class Model(Open):
    name: str
    source: str
    version: int
    state: str = Field(examples=["ready"])


class Edited(BaseModel):
    model: Model
    changed: list[str]
    needs_restart: list[str] = Field(description="Settings that a running engine takes only when it is started again.")


class Phase(BaseModel):
    phase: str
    at: float


_snapshot: dict[str, Any] = {field.name: (get_type_hints(Snapshot)[field.name], ...) for field in fields(Snapshot)}
Engine: Any = create_model(
    "Engine", __base__=Open, __doc__="An engine's current state.", **{**_snapshot, "phases": (list[Phase], ...)}
)


class Plan(Open):
    """A plan as in `overspill plan --json`; a plan that does not fit has no speeds."""

    model: str
    max_model_len: int
    longest_context: int
    limit: int = Field(description="The longest context that the model was made for.")
    fits: bool
    why_not: str


class NewJob(Strict):
    kind: str = Field(max_length=20, examples=["bench"], description="bench, ab, verify or tune")
    model: str = Field(max_length=250, examples=["qwen"])
    given: dict[str, str] = Field(default_factory=dict, examples=[{"workload": "multi-turn:conversations=8"}])
    stops_others: bool = Field(False, description="First stop running engines, for their memory.")


class NewKey(Strict):
    name: str = Field(max_length=100, examples=["laptop"])
    scope: KeyScope = KeyScope.ALL
    models: list[str] = Field(default_factory=list, description="Models that the key may use; empty for all.")
    expires_in: int | str | None = Field(None, examples=["30d"], description="Seconds, or for example 30d.")


class Key(Open):
    """A key, and how much it was used."""

    name: str
    prefix: str = Field(description="Its beginning; the rest is kept as a hash only.")
    scope: KeyScope
    models: list[str] | None
    expires_at: str | None
    last_used_at: str | None


class Confirmation(Strict):
    """Confirms that the process is the very one that was shown."""

    identity: str = Field(max_length=200)
    confirm_name: str = Field(max_length=1000, description="The server's name, as it was shown.")


class Found(Open):
    pid: int
    identity: str
    name: str
    user: str
    models: list[str]
    owner: int | None


class History(BaseModel):
    time: list[float]
    series: dict[str, list[float | None]]


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class Refusal(BaseModel):
    """The shape of every error."""

    error: Error
    source: str = Field(description="Who refused it: manager, gateway or engine.")


_REFUSALS = {
    400: "A mistake in the request.",
    401: "A key or a login is needed.",
    403: "Not allowed over the web, or for this key.",
    404: "Not found.",
    409: "Not possible in the current state.",
    413: "Too large.",
    422: "Not of the documented shape.",
    503: "The registry cannot be used now.",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": text} for status, text in _REFUSALS.items()
}
