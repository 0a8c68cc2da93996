"""`overspill cache`: KV that servers keep on disk."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.flags import group, to_stderr

cache = group("KV that servers keep on disk: show, clear.")

DiskPath = Annotated[
    str | None,
    typer.Option(help="A folder given by `--disk-path`; without it, those of all models in the user's cache folder."),
]


def _folders(disk_path: str | None) -> list[Path]:
    from overspill.kv.disk.folder import cache_folder
    from overspill.kv.options import parse_folder

    if disk_path is not None:
        return [Path(parse_folder(disk_path))]
    root = cache_folder()
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


@cache.command(epilog="Example: overspill cache show --json")
def show(
    disk_path: DiskPath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes.")] = False,
) -> None:
    """Show how much KV of which model is on disk, and when it was last written."""
    from overspill.kv.disk.folder import kept_in
    from overspill.kv.sizes import format_size

    found = [(folder, kept) for folder in _folders(disk_path) for kept in kept_in(folder)]
    rows = [
        {
            "folder": str(folder),
            "key": kept.path.name,
            "bytes": kept.num_bytes,
            "written_at": datetime.fromtimestamp(kept.used_at, UTC).isoformat(timespec="seconds"),
        }
        for folder, kept in found
    ]
    if as_json:
        print(json.dumps({"kept": rows}, indent=2))
        return
    for (folder, kept), row in zip(found, rows, strict=True):
        print(f"{format_size(kept.num_bytes):>10}  {row['written_at']}  {folder}  {kept.path.name}")
    if not rows:
        print("no KV is on disk")


@cache.command(epilog="Example: overspill cache clear --disk-path /var/cache/overspill")
def clear(disk_path: DiskPath = None) -> None:
    """Delete KV on disk, except in folders that a server uses, which are named."""
    from overspill.kv.disk.folder import clear_folder
    from overspill.kv.errors import OverspillError
    from overspill.kv.sizes import format_size

    failed = False
    if not (folders := _folders(disk_path)):
        print("no KV is on disk")
    for folder in folders:
        try:
            print(f"{format_size(clear_folder(folder))} deleted from {folder}")
        except OverspillError as error:
            to_stderr(f"error: {error}")
            failed = True
    if failed:
        raise typer.Exit(1)
