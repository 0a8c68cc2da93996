"""Bodies and answers of the API, for validation and for its documentation."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from overspill.settings import MODEL_SETTINGS, Setting

MAX_TEXT = 10_000


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _field(setting: Setting) -> tuple[Any, Any]:
    kind = setting.kind
    examples = [kind.example] if kind.example is not None else None
    said = Field(None, description=kind.note or None, examples=examples, max_length=kind.max_length)
    return kind.json | None, said


if TYPE_CHECKING:
    ModelChanges = Strict
else:
    ModelChanges = create_model(
        "ModelChanges",
        __base__=Strict,
        __doc__="Settings of a model; null takes one back.",
        **{setting.name: _field(setting) for setting in MODEL_SETTINGS},
    )


class NewModel(ModelChanges):
    name: str = Field(max_length=250, examples=["qwen"])


class ModelEdit(ModelChanges):
    version: int | None = Field(None, description="Change it only if it is still at this version.")


class Model(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    source: str
    version: int
    state: str = Field(examples=["ready"])


class Edited(BaseModel):
    model: Model
    changed: list[str]
    needs_restart: list[str] = Field(description="What a running engine takes only when it is started again.")


class Traffic(BaseModel):
    requests: int
    failed: int
    cancelled: int
    in_flight: int
    waiting: int
    prompt_tokens: int
    completion_tokens: int
    last_used: float | None


class Phase(BaseModel):
    phase: str
    at: float


class Engine(BaseModel):
    """An engine as it is seen now."""

    model_config = ConfigDict(extra="allow")
    name: str
    state: str = Field(description="stopped, starting, ready, stopping or failed")
    since: float
    is_registered: bool
    is_managed: bool
    phase: str
    phases: list[Phase]
    messages: list[str]
    url: str | None
    pid: int | None
    error: str
    stop_reason: str = Field(description="Why it is being stopped, or was the last time.")
    log_lines: list[str]
    log_hint: str = Field(description="Where its log is, if the manager has none of it.")
    needs_restart: list[str]
    plan: dict[str, Any]
    memory: dict[str, int | None]
    traffic: Traffic


class PlanRequest(ModelChanges):
    """A model of the registry, with what is to be tried."""

    name: str = Field(max_length=250, examples=["qwen"])


class Plan(BaseModel):
    """As `overspill plan --json` has it; without a way there are no speeds."""

    model_config = ConfigDict(extra="allow")
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
    stops_others: bool = Field(False, description="Stop the engines that run first, for their memory.")


class Job(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: int
    kind: str
    model: str
    state: str
    exit_code: int | None
    error: str


class Confirmation(Strict):
    """What names the very process that was shown."""

    identity: str = Field(max_length=200)
    confirm_name: str = Field(max_length=1000, description="The server's name, as it was shown.")


class Found(BaseModel):
    model_config = ConfigDict(extra="allow")
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
    code: int


class Refusal(BaseModel):
    """Every error has this shape."""

    src: str
    error: Error


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Refusal, "description": "A mistake in how it was asked."},
    401: {"model": Refusal, "description": "Nobody: a key or a login is needed."},
    403: {"model": Refusal, "description": "Not allowed over the web, or for this key."},
    404: {"model": Refusal, "description": "There is none."},
    409: {"model": Refusal, "description": "Not possible as things are."},
    413: {"model": Refusal, "description": "Too large."},
    422: {"model": Refusal, "description": "Not of the documented shape."},
    503: {"model": Refusal, "description": "The registry cannot be used now."},
}
