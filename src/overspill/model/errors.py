"""What keeps Overspill from knowing a model.

ModelError
├── ModelNotFound       nothing of that name on disk, in the cache or on the hub
├── AccessDenied        it is there, but may not be read
├── HubUnreachable      the hub is off limits (offline) or did not answer
├── BadConfig           config.json is broken, or a key in it makes no sense
├── BadCheckpoint       the index or a safetensors header is broken
├── UnknownArchitecture vLLM may serve it; how it keeps KV is not known here
├── UnknownWeights      no weights to measure, and no formula that gives their size
└── BadSettings         block size, KV dtype or tensor parallelism that vLLM would refuse
"""

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
