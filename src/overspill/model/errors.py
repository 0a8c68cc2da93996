"""Why a model cannot be described."""

from overspill.kv.errors import OverspillError


class ModelError(OverspillError):
    """A model that cannot be described; the message says what was found, what was expected and what to do."""


class ModelNotFound(ModelError):
    """No such folder, repository, revision or file."""


class AccessDenied(ModelError):
    """A file that this user, or this token, may not read."""


class HubUnreachable(ModelError):
    """The hub was needed, and is switched off, timed out, or answered with an error of its own."""


class BadConfig(ModelError):
    """config.json cannot be parsed, lacks a key, or holds a value that cannot be."""


class BadCheckpoint(ModelError):
    """Weight files that contradict themselves or their index; often a download that was cut short."""


class UnknownArchitecture(ModelError):
    """An architecture whose KV cache is not described here."""


class UnknownWeights(ModelError):
    """Without weight files, the size of this model's weights cannot be derived."""


class BadSettings(ModelError):
    """Settings under which vLLM could not make a KV cache for this model."""
