"""The registry: models, runs, profiles and results in one database, shared by commands and web pages."""

from overspill.registry.database import Registry, open_existing, open_registry
from overspill.registry.errors import (
    CannotNow,
    ChangedMeanwhile,
    DuplicateModel,
    RegistryError,
    RegistryUnavailable,
    StillRunning,
    UnknownModel,
    UnknownRecord,
)
from overspill.registry.imports import Entry, Imported, Outcome, import_models, read_models_file, scan_hub_cache
from overspill.registry.models import (
    Edit,
    Model,
    add_model,
    edit_model,
    get_model,
    list_models,
    remove_model,
    undo_tune,
)
from overspill.registry.results import (
    Result,
    get_result,
    list_results,
    load_profile,
    save_profile,
    save_result,
)
from overspill.registry.runs import (
    Run,
    RunEnd,
    end_lost_runs,
    end_run,
    environment_that_matters,
    installed_versions,
    list_runs,
    running_runs,
    start_run,
)
from overspill.registry.tables import ModelSettings, needs_restart

__all__ = [
    "CannotNow", "ChangedMeanwhile", "DuplicateModel", "Edit", "Entry",
    "Imported", "Model", "ModelSettings", "Outcome", "Registry",
    "RegistryError", "RegistryUnavailable", "Result", "Run", "RunEnd", "StillRunning", "UnknownModel",
    "UnknownRecord", "add_model", "edit_model", "end_lost_runs", "end_run", "environment_that_matters", "get_model",
    "get_result", "import_models", "installed_versions", "list_models", "list_results", "list_runs", "load_profile",
    "needs_restart", "open_existing", "open_registry", "read_models_file", "remove_model", "running_runs",
    "save_profile", "save_result", "scan_hub_cache", "start_run", "undo_tune",
]  # fmt: skip
