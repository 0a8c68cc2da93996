"""Allowlist for web requests: model sources, and vLLM flags that neither run code nor open files or ports."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path

from overspill.flags import read_flags
from overspill.kv.options import Options
from overspill.manager.errors import ManagerError
from overspill.model.source import cache_folder

# A blocklist would have holes: every version of vLLM adds flags, vLLM accepts abbreviated names, and many flags name
# modules, templates, plugins or configuration files to load.
FLAGS = frozenset(
    {
        "--async-scheduling", "--no-async-scheduling",
        "--block-size",
        "--cudagraph-capture-sizes",
        "--convert",
        "--data-parallel-size",
        "--disable-cascade-attn",
        "--disable-log-stats",
        "--enable-auto-tool-choice",
        "--enable-chunked-prefill", "--no-enable-chunked-prefill",
        "--enable-expert-parallel",
        "--enable-log-requests", "--no-enable-log-requests",
        "--enable-prefix-caching", "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--language-model-only",
        "--limit-mm-per-prompt",
        "--long-prefill-token-threshold",
        "--max-logprobs",
        "--pipeline-parallel-size",
        "--prefix-caching-hash-algo",
        "--quantization",
        "--reasoning-parser",
        "--return-tokens-as-token-ids",
        "--revision",
        "--runner",
        "--scheduling-policy",
        "--seed",
        "--served-model-name",
        "--skip-mm-profiling",
        "--tensor-parallel-size",
        "--tool-call-parser",
        "--uvicorn-log-level",
    }
)  # fmt: skip
# Connector options: Overspill's own and two of vLLM's. Others name modules to import and servers to connect to.
HARMLESS_OPTIONS = frozenset(field.name for field in fields(Options)) | {"lazy_offload", "offload_prompt_only"}

_MAX_LENGTH = 1024
_MAX_REPO_ID = 96
# huggingface_hub's rule, in ASCII: an owner and a name, or a name alone; neither begins or ends with - or a dot.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPO_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
_MOST_FILES = 10_000


class NotAllowed(ManagerError):
    """The request names something that is not allowed over the web."""


class FlagNotAllowed(NotAllowed):
    """The request names a vLLM flag or a connector option that is not on the allowlist."""


class ModelNotAllowed(NotAllowed):
    """The model source is neither a repository's id nor a folder within the allowed ones."""


def require_harmless(options: Iterable[str]) -> None:
    for name in options:
        if name not in HARMLESS_OPTIONS:
            raise FlagNotAllowed(
                f"the option {name[:80]!r} of a connector may not be set over the web, since such options can run code "
                f"and open connections. Run the comparison with: overspill ab. Allowed are "
                f"{', '.join(sorted(HARMLESS_OPTIONS))}"
            )


def require_allowed(words: Sequence[str]) -> None:
    for flag in read_flags(words):
        written = flag.words[0].partition("=")[0]
        # A dotted flag (--flag.key) sets one key of a JSON value; none is allowed.
        if flag.name not in FLAGS or "." in written:
            raise FlagNotAllowed(
                f"{written[:80]!r} may not be set over the web, since vLLM's flags can run code and open files. "
                "Set it with: overspill models edit NAME -- FLAGS, or start the manager with --any-vllm-flag. "
                f"Allowed are {', '.join(sorted(FLAGS))}"
            )


def confined_source(source: str, folders: Sequence[Path], hub_cache: Path | None = None) -> str:
    """Validate a model source, and return it as a repository's id or the real path of a folder.

    Users who can write to these folders are trusted: a link changed after this check goes unnoticed.
    """
    if not source or len(source) > _MAX_LENGTH or not source.isprintable():
        raise ModelNotAllowed(
            f"{source!r:.80} is not the name of a model; give a repository such as Qwen/Qwen3-8B, or a folder"
        )
    # vLLM looks for a folder of that name in its working directory first.
    if is_repo_id(source) and not os.path.lexists(source):
        return source
    roots = [_real(root) for root in (*folders, hub_cache if hub_cache is not None else cache_folder())]
    if is_repo_id(source):
        raise ModelNotAllowed(
            f"{source} is a repository's id, but the manager's working directory has a folder of that name, which vLLM "
            "would load instead; start the manager in another directory"
        )
    if not os.path.isabs(source):
        raise ModelNotAllowed(
            f"{source!r:.200} is neither a repository's id nor the whole path of a folder; write for example "
            "Qwen/Qwen3-8B or /models/qwen"
        )
    folder = _real(Path(source))
    # The message is the same whether the folder exists or not: the contents of the disk are nobody's business.
    if not any(folder.is_relative_to(root) for root in roots) or not folder.is_dir():
        shown = ", ".join(str(root) for root in (*folders, "the hub's cache"))
        raise ModelNotAllowed(
            f"{source!r:.200} is outside the folders that models may come from ({shown}); move it there, or start "
            "the manager with --models-folder"
        )
    _refuse_links_out(folder, roots)
    return str(folder)


def is_repo_id(name: str) -> bool:
    return (
        len(name) <= _MAX_REPO_ID
        and _REPO_ID.fullmatch(name) is not None
        and not any(bad in name for bad in ("--", ".."))
        and not name.endswith(".git")
    )


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise ModelNotAllowed(f"{str(path)!r:.200} cannot be read as a path: {error}") from error


def _refuse_links_out(folder: Path, roots: Sequence[Path]) -> None:
    """Raise if an entry links out of the roots: the parse error of a linked config.json would quote the file."""
    try:
        with os.scandir(folder) as entries:
            links = [Path(entry.path) for entry in islice(entries, _MOST_FILES) if entry.is_symlink()]
    except OSError as error:
        raise ModelNotAllowed(f"{str(folder)!r:.200} cannot be read: {error.strerror}") from error
    for link in links:
        if not any(_real(link).is_relative_to(root) for root in roots):
            raise ModelNotAllowed(f"{link.name!r:.100} in {str(folder)!r:.200} is a link that leads out of the folders")
