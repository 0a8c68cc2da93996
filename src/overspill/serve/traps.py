"""Flags and variables that vLLM takes in silence and that do something else than they say: refused, or corrected."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from overspill.kv.errors import OverspillError
from overspill.planning.arguments import CONTRADICTING_VARIABLES
from overspill.serve.address import is_loopback
from overspill.serve.command import Combined
from overspill.serve.flags import find, matches
from overspill.serve.plugins import PLUGINS
from overspill.settings import SETTINGS

_SETTINGS = [setting.flag for setting in SETTINGS]
_NOT_HERE = {
    "--model": "the model is the first argument: overspill serve MODEL",
    "--config": "its flags cannot be compared with the plan's; write them after the model instead",
    "--uds": "serve asks a port whether the server is ready; use --host and --port, or start vLLM yourself with the "
    "command that --dry-run prints",
    "--grpc": "serve asks over HTTP whether the server is ready; start vLLM yourself with the command that --dry-run "
    "prints",
    "--headless": "there would be no server to ask; start vLLM yourself with the command that --dry-run prints",
    # Gone from vLLM 0.32, which would say so only when it is started.
    "--swap-space": "vLLM has it no longer; --ram gives RAM, and --offload-ram sets how much of it is for idle KV",
    "--preemption-mode": "vLLM has it no longer; a preempted request is loaded from RAM if --offload-ram keeps it",
    "--disable-log-requests": "vLLM has it no longer; it is --no-enable-log-requests, which is the default",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """What to tell, and variables to change for vLLM (None removes one)."""

    warnings: list[str] = field(default_factory=list)
    environment: dict[str, str | None] = field(default_factory=dict)


def check(combined: Combined, environment: Mapping[str, str], *, on_cpu: bool) -> Checked:
    """Refuses by raising; the rest is corrected, or told."""
    _refuse_flags(combined)
    checked = Checked()
    _check_spelling(combined, checked)
    _check_weight_offload(combined)
    _check_allocator(combined, environment, checked)
    _check_plugins(environment, checked)
    _check_kv_space(combined, environment, checked, on_cpu=on_cpu)
    _check_exposure(combined, environment, checked)
    return checked


def _refuse_flags(combined: Combined) -> None:
    for flag in combined.given:
        if (why := _NOT_HERE.get(flag.name)) is not None:
            raise OverspillError(f"{flag.name} cannot be used with overspill serve: {why}")


def _check_spelling(combined: Combined, checked: Checked) -> None:
    """What is no setting here is vLLM's to read, which takes seconds to say that it has no such flag."""
    for flag in combined.given:
        if flag.name.replace("--no-", "--", 1) in _SETTINGS:
            continue
        # So near is none of vLLM's own, but for beginnings that its parser completes: the plan knows nothing of those.
        for meant in difflib.get_close_matches(flag.name, _SETTINGS, n=1, cutoff=0.9):
            checked.warnings.append(f"{flag.name} is no setting here and goes to vLLM; did you mean {meant}?")


def _check_weight_offload(combined: Combined) -> None:
    """Of flags that became no part of the plan (overspill.serve.adopted): those that contradict each other."""
    has_uva = float(combined.value("--cpu-offload-gb") or 0) > 0
    backend = combined.value("--offload-backend") or "auto"
    groups = combined.value("--offload-group-size") or "0"
    prefetches = groups.strip() not in ("", "0")
    if has_uva and (prefetches or backend == "prefetch"):
        raise OverspillError(
            "--cpu-offload-gb does nothing with the prefetch backend: vLLM uses one offloader. Remove "
            "--cpu-offload-gb, or use it without --offload-backend and --offload-group-size"
        )
    if backend == "uva" and not has_uva:
        also = "; --offload-group-size does nothing with it" if prefetches else ""
        raise OverspillError(
            f"--offload-backend uva moves nothing to RAM without --cpu-offload-gb{also}. Give --cpu-offload-gb, or use "
            "--offload-backend prefetch with --offload-group-size"
        )
    if backend == "prefetch" and not prefetches:
        raise OverspillError(
            "--offload-backend prefetch moves nothing to RAM without --offload-group-size; give it, for example "
            "--offload-group-size 4, or leave weights to the plan"
        )


def _check_allocator(combined: Combined, environment: Mapping[str, str], checked: Checked) -> None:
    """vLLM refuses a connector with expandable segments, minutes later, and looks at one of torch's two variables."""
    if find(combined.flags, "--kv-transfer-config") is None:
        return
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        parts = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        left = [part for part in parts if not re.fullmatch(r"expandable_segments\s*:\s*True", part)]
        if left != parts:
            checked.environment[name] = ",".join(left) or None
            checked.warnings.append(
                f"{name}=expandable_segments:True is taken out for vLLM: with it, KV could move to other memory while "
                "it is being copied to RAM"
            )


def _check_plugins(environment: Mapping[str, str], checked: Checked) -> None:
    """VLLM_PLUGINS names the plugins to load, and would leave out ours."""
    if (given := environment.get("VLLM_PLUGINS")) is None:
        return
    names = [name for name in given.split(",") if name]
    missing = [name for name in PLUGINS if name not in names]
    if missing:
        checked.environment["VLLM_PLUGINS"] = ",".join([*names, *missing])
        left_out = " and ".join(missing)
        checked.warnings.append(f"VLLM_PLUGINS leaves out {left_out}, without which nothing goes to RAM; added")


def _check_kv_space(combined: Combined, environment: Mapping[str, str], checked: Checked, *, on_cpu: bool) -> None:
    """On its CPU platform vLLM lets a variable win over --kv-cache-memory-bytes."""
    has_flag = any(matches(flag.name, "--kv-cache-memory-bytes") for flag in combined.flags)
    for name in CONTRADICTING_VARIABLES:
        if on_cpu and has_flag and environment.get(name):
            checked.environment[name] = None
            checked.warnings.append(f"{name} is taken out for vLLM: it would win over --kv-cache-memory-bytes")


def _check_exposure(combined: Combined, environment: Mapping[str, str], checked: Checked) -> None:
    host = combined.value("--host") or ""
    if not is_loopback(host) and find(combined.flags, "--api-key") is None and not environment.get("VLLM_API_KEY"):
        checked.warnings.append(
            f"--host {host} lets other machines in, and no --api-key is given: whoever reaches the port can use the "
            "model"
        )
