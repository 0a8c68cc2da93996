"""vLLM's flags that may be set over the web: those that neither run code nor open files or ports.

A list of what is allowed, not of what is not: vLLM gets new flags with every version, takes the beginnings of names for
the whole, and reads modules, templates, plugins and configuration files named by many of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields

from overspill.flags import read_flags
from overspill.kv.options import Options
from overspill.manager.errors import ManagerError

ALLOWED = frozenset(
    {
        "--async-scheduling", "--no-async-scheduling",
        "--block-size",
        "--cudagraph-capture-sizes",
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
        "--scheduling-policy",
        "--seed",
        "--served-model-name",
        "--skip-mm-profiling",
        "--tensor-parallel-size",
        "--tool-call-parser",
        "--uvicorn-log-level",
    }
)  # fmt: skip


class FlagNotAllowed(ManagerError):
    """A flag of vLLM's that may not be set over the web."""


# Of connectors: Overspill's own, and two switches of vLLM's. Others name modules to import and servers to connect to.
HARMLESS_OPTIONS = frozenset(field.name for field in fields(Options)) | {"lazy_offload", "offload_prompt_only"}


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
        # A dotted key sets a part of a JSON value, of which names like these have none.
        if flag.name not in ALLOWED or "." in written:
            raise FlagNotAllowed(
                f"{written[:80]!r} may not be set over the web, since vLLM's flags can run code and open files. "
                "Set it with: overspill models edit NAME -- FLAGS, or start the manager with --any-vllm-flag. "
                f"Allowed are {', '.join(sorted(ALLOWED))}"
            )
