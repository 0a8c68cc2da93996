"""What a model is made of, and what vLLM makes of it; found out without a GPU, the weights, torch or vLLM."""

from overspill.model.caches import Attention, LatentAttention, LayerCache, RecurrentState
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
from overspill.model.facts import ModelFacts, Weights, active_bytes
from overspill.model.folder import read_folder
from overspill.model.groups import CacheGroup
from overspill.model.kv import KVGeometry, kv_geometry
from overspill.model.pages import Kind, Page
from overspill.model.read import read_model
from overspill.model.settings import CacheSettings

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
