"""What a model is made of, and what vLLM makes of it; found out without a GPU, the weights, torch or vLLM."""

from overspill.model.errors import (
    AccessDenied,
    BadCheckpoint,
    BadConfig,
    BadSettings,
    HubUnreachable,
    ModelError,
    ModelNotFound,
    UnknownArchitecture,
    UnknownWeights,
)
from overspill.model.facts import (
    Attention,
    LatentAttention,
    LayerCache,
    ModelFacts,
    RecurrentState,
    Weights,
    active_bytes,
)
from overspill.model.kv import CacheGroup, KVGeometry, kv_geometry
from overspill.model.pages import CacheSettings, Kind, Page
from overspill.model.source import read_folder, read_model

__all__ = [
    "AccessDenied",
    "Attention",
    "BadCheckpoint",
    "BadConfig",
    "BadSettings",
    "CacheGroup",
    "CacheSettings",
    "HubUnreachable",
    "KVGeometry",
    "Kind",
    "LatentAttention",
    "LayerCache",
    "ModelError",
    "ModelFacts",
    "ModelNotFound",
    "Page",
    "RecurrentState",
    "UnknownArchitecture",
    "UnknownWeights",
    "Weights",
    "active_bytes",
    "kv_geometry",
    "read_folder",
    "read_model",
]
