"""The registry: models, runs, profiles and results, in one database that commands and pages write alike."""

from overspill.registry.database import Registry, open_existing, open_registry
from overspill.registry.entries import Entry, read_models_file, scan_hub_cache
from overspill.registry.errors import (
    BadDatabaseUrl,
    BadModelsFile,
    CannotNow,
    ChangedMeanwhile,
    DuplicateModel,
    RegistryError,
    RegistryUnavailable,
    StillRunning,
    UnknownModel,
    UnknownRecord,
)
from overspill.registry.imports import Imported, Outcome, import_models
from overspill.registry.model_settings import (
    MODEL_SETTINGS,
    ModelSetting,
    ModelSettings,
    needs_restart,
    serve_settings,
)
from overspill.registry.models import Edit, Model, add_model, edit_model, get_model, list_models, remove_model
from overspill.registry.profiles import MeasuredLink, MeasuredProfile, load_profile, save_profile
from overspill.registry.recorded import environment_that_matters, installed_versions
from overspill.registry.results import Measurement, Result, get_result, list_results, save_result
from overspill.registry.runs import Run, RunEnd, end_lost_runs, end_run, list_runs, running_runs, start_run

__all__ = [
    "MODEL_SETTINGS",
    "BadDatabaseUrl",
    "BadModelsFile",
    "CannotNow",
    "ChangedMeanwhile",
    "DuplicateModel",
    "Edit",
    "Entry",
    "Imported",
    "MeasuredLink",
    "MeasuredProfile",
    "Measurement",
    "Model",
    "ModelSetting",
    "ModelSettings",
    "Outcome",
    "Registry",
    "RegistryError",
    "RegistryUnavailable",
    "Result",
    "Run",
    "RunEnd",
    "StillRunning",
    "UnknownModel",
    "UnknownRecord",
    "add_model",
    "edit_model",
    "end_lost_runs",
    "end_run",
    "environment_that_matters",
    "get_model",
    "get_result",
    "import_models",
    "installed_versions",
    "list_models",
    "list_results",
    "list_runs",
    "load_profile",
    "needs_restart",
    "open_existing",
    "open_registry",
    "read_models_file",
    "remove_model",
    "running_runs",
    "save_profile",
    "save_result",
    "scan_hub_cache",
    "serve_settings",
    "start_run",
]
