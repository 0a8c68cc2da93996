"""vLLM's flags that may be set over the web: those that neither run code nor open files or ports.

A list of what is allowed, not of what is not: vLLM gets new flags with every version, takes the beginnings of names for
the whole, and reads modules, templates, plugins and configuration files named by many of them.
"""

from collections.abc import Sequence

from overspill.manager.errors import ManagerError
from overspill.serve.flags import read_flags

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
        "--max-num-partial-prefills",
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


def require_allowed(words: Sequence[str]) -> None:
    for flag in read_flags(words):
        # A dotted key sets a part of a JSON value, of which names like these have none.
        if flag.name not in ALLOWED or "." in flag.words[0].partition("=")[0]:
            raise FlagNotAllowed(
                f"{flag.words[0][:80]!r} may not be set over the web, since vLLM's flags can run code and open files. "
                "Set it with: overspill models edit NAME -- FLAGS, or start the manager with --any-vllm-flag. "
                f"Allowed are {', '.join(sorted(ALLOWED))}"
            )
