"""`overspill models`: the registry of models and their settings."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.flags import OF_MODELS, group, opened_registry, print_table, with_settings
from overspill.settings import MODEL_SETTINGS

if TYPE_CHECKING:
    from overspill.registry import Edit, Model, Run

models = group("Models and their settings: add, list, show, edit, undo, rm, import.")

Name = Annotated[str, typer.Argument(help="The model's name in the registry.")]
VllmArgs = Annotated[list[str] | None, typer.Argument(help="vLLM's own flags, after `--`.")]
IfVersion = Annotated[
    int | None, typer.Option("--if-version", help="Only if the model is at this version, which `show` prints.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes, times seconds.")]


@models.command(epilog="Example: overspill models add qwen --source Qwen/Qwen3-8B --max-model-len 32k --ram 64GiB")
@with_settings(OF_MODELS)
def add(given: dict[str, Any], name: Name, vllm_args: VllmArgs = None) -> None:
    """Add a model; without --source, the name is the repository. Settings that are not given are left to the
    environment, config.toml and the plan."""
    from overspill.registry import RegistryError, add_model

    if vllm_args and not vllm_args[0].startswith("-"):
        raise RegistryError(f"give the model's source with a flag: overspill models add {name} --source {vllm_args[0]}")
    with opened_registry() as registry:
        added = add_model(registry, name, {**given, "vllm_args": vllm_args or None})
    print(f"added {added.name}: {added.settings.source}")


@models.command("list", epilog="Example: overspill models list --json")
def list_all(as_json: AsJson = False) -> None:
    """List all models by name, and which of them run."""
    from overspill.registry import list_models, running_runs

    with opened_registry() as registry:
        found, running = list_models(registry), {run.model for run in running_runs(registry)}
    if as_json:
        print(json.dumps({"models": [{**each.as_json(), "running": each.name in running} for each in found]}, indent=2))
        return
    if not found:
        print("no models yet; add one with: overspill models add")
        return
    columns = {"source": "source", "max_model_len": "context", "ram": "RAM", "ttl": "TTL"}
    if any(each.settings.weights_ram is not None for each in found):
        columns["weights_ram"] = "weights in RAM"
    rows = [("name", *columns.values(), "")]
    for each in found:
        shown = _shown(each)
        rows.append((each.name, *(shown[column] for column in columns), "running" if each.name in running else ""))
    print_table(rows)


@models.command(epilog="Example: overspill models show qwen --json")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show a model's settings, its version, and its last run."""
    from overspill.registry import get_model, list_runs, running_runs

    with opened_registry() as registry:
        found = get_model(registry, name)
        running, last = running_runs(registry, name), list_runs(registry, name, limit=1)
    if as_json:
        print(json.dumps({**found.as_json(), "running": bool(running)}, indent=2))
        return
    for key, value in {"name": found.name, **_shown(found), "version": str(found.version)}.items():
        print(f"{key:24}{value}")
    for run in running or last:
        print(f"{'running' if run.is_running else 'last run':24}{_run_line(run)}")


@models.command(epilog="Example: overspill models edit qwen --ram 96GiB --unset ttl")
@with_settings(OF_MODELS)
def edit(
    given: dict[str, Any],
    name: Name,
    vllm_args: VllmArgs = None,
    unset: Annotated[list[str] | None, typer.Option(help="Unset a setting, by its name; may be repeated.")] = None,
    if_version: IfVersion = None,
) -> None:
    """Change the given settings, and list those that a running server takes over only when it is restarted."""
    from overspill.registry import RegistryError, edit_model

    given = {**given, "vllm_args": vllm_args or None}
    changes = {key: value for key, value in given.items() if value is not None}
    taken_back = {key.removeprefix("--").replace("-", "_"): None for key in unset or ()}
    if both := sorted(changes.keys() & taken_back):
        raise RegistryError(f"{both[0]} is both set and unset; leave one of the two out")
    if not changes and not taken_back:
        raise RegistryError("nothing to change was given; name a setting, such as --ram 64GiB, or --unset one")
    with opened_registry() as registry:
        edited = edit_model(registry, name, {**changes, **taken_back}, version=if_version)
    _print_edit(name, edited)


@models.command(epilog="Example: overspill models undo qwen")
def undo(name: Name) -> None:
    """Undo the last change, if overspill tune made it."""
    from overspill.registry import undo_tune

    with opened_registry() as registry:
        edited = undo_tune(registry, name)
    _print_edit(name, edited)


def _print_edit(name: str, edited: "Edit") -> None:
    if not edited.changed:
        print(f"{name} is unchanged")
        return
    before, after = _shown(edited.before), _shown(edited.after)
    for key in edited.changed:
        print(f"{key}: {before[key]} -> {after[key]}")
    if edited.needs_restart:
        running = ", ".join(run.process_text for run in edited.running)
        print(f"{name} is running ({running}); these changes need a restart: {', '.join(edited.needs_restart)}")


@models.command(epilog="Example: overspill models rm qwen")
def rm(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Remove the model even if it is running; its engine keeps running.")
    ] = False,
    if_version: IfVersion = None,
) -> None:
    """Remove a model from the registry. Its files, runs and results stay."""
    from overspill.registry import remove_model

    with opened_registry() as registry:
        removed = remove_model(registry, name, version=if_version, force=force)
    print(f"removed {removed.name}")


@models.command("import", epilog="Example: overspill models import models.yaml")
def import_all(
    file: Annotated[
        Path | None, typer.Argument(help="YAML or JSON (.json); without it, Hugging Face's cache is searched.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add the models of a file or of Hugging Face's cache. Exits with 1 if some of them cannot be added."""
    from overspill.model.source import cache_folder
    from overspill.registry import Outcome, import_models, read_models_file, scan_hub_cache

    entries = read_models_file(file) if file is not None else scan_hub_cache(cache_folder())
    with opened_registry() as registry:
        imported = import_models(registry, entries)
    if as_json:
        outcomes = [{"name": each.name, "outcome": str(each.outcome), "detail": each.detail} for each in imported]
        print(json.dumps(outcomes, indent=2))
    elif not imported:
        print(f"no models in {file or cache_folder()}")
    for each in imported if not as_json else ():
        print(f"{each.outcome:10} {each.name}{': ' if each.detail else ''}{each.detail}")
    if any(each.outcome is Outcome.INVALID for each in imported):
        raise typer.Exit(1)


def _shown(model: "Model") -> dict[str, str]:
    values = model.settings.as_json()
    shown = {setting.name: setting.shown(values[setting.name]) for setting in MODEL_SETTINGS}
    return {**shown, "ttl": f"{values['ttl']} s"} if values["ttl"] is not None else shown


def _run_line(run: "Run") -> str:
    started = f"{run.process_text}, started {run.started_at:%Y-%m-%d %H:%M:%S} UTC"
    if run.is_running:
        return started
    if run.ended_at is None:
        return f"{started}, ended without a report"
    code = "" if run.exit_code is None else f" with {run.exit_code}"
    return f"{started}, {run.end}{code} {run.ended_at:%Y-%m-%d %H:%M:%S} UTC"
