"""vLLM's own flags: some become settings of the plan, and the rest are combined with the plan's."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overspill.flags import Flag, find, matches, read_flags
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB
from overspill.settings import BY_NAME, SHARED, YES_OR_NO, GivenBy, Setting, SettingsError, Value, plain, refuse_address

_OFFLOAD = ("--offload-backend", "--offload-group-size", "--offload-num-in-group", "--offload-prefetch-step")
_UTILIZATION, _KV_BYTES = "--gpu-memory-utilization", "--kv-cache-memory-bytes"
# Of these settings vLLM's abbreviations are taken too.
_ABBREVIATED = ("gpu_memory_utilization", "tensor_parallel_size", "pipeline_parallel_size")
# A flag on the left makes vLLM ignore or replace those on the right.
_REPLACES = {
    "--cpu-offload-gb": _OFFLOAD,
    "--offload-group-size": ("--offload-backend", "--cpu-offload-gb"),
    "--kv-offloading-size": ("--kv-transfer-config",),
}
# The plan does not set these, but its numbers depend on them.
_CHANGES = (
    "--data-parallel-size", "--quantization", "--dtype", "--block-size", "--speculative-config", "--hf-overrides",
    "--enable-lora", "--num-gpu-blocks-override",
    _KV_BYTES, "--cpu-offload-gb", "--kv-offloading-size",
)  # fmt: skip
# Those of them that leave what the engine takes beside KV unchanged.
_CHANGES_KV_ALONE = ("--num-gpu-blocks-override", _KV_BYTES, "--kv-offloading-size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """vLLM's flags, and how the user's changed the plan's."""

    words: tuple[str, ...]
    flags: tuple[Flag, ...]
    given: tuple[Flag, ...]
    """The user's own among the flags."""
    contradictions: tuple[str, ...]
    """A sentence for each flag of the plan that was replaced."""
    changes: tuple[str, ...]
    """A sentence for each user flag unknown to the plan that changes its numbers."""

    @property
    def follows_plan(self) -> bool:
        return not self.contradictions and not self.changes

    @property
    def has_planned_kv(self) -> bool:
        """Whether the KV size in bytes is the plan's."""
        return find(self.flags, _KV_BYTES) is not None and _last(self.given, _KV_BYTES) is None

    def value(self, name: str) -> str | None:
        flag = find(self.flags, name)
        return flag.value if flag is not None else None


def combine(planned: Sequence[str], given: Sequence[str]) -> Combined:
    """Merge both, dropping plan flags that the user's replace (vLLM would warn of duplicates), and the KV size where a
    change makes the engine differ from the planned one: vLLM then measures what is left for KV."""
    own, users = read_flags(planned), read_flags(given)
    changing = [
        flag
        for flag in users
        if flag.name in _CHANGES and not (flag.name.endswith("-parallel-size") and flag.value == "1")
    ]
    if find(own, _UTILIZATION) is not None and any(flag.name not in _CHANGES_KV_ALONE for flag in changing):
        own = [flag for flag in own if flag.name != _KV_BYTES]
    kept, contradictions = [], []
    for flag in own:
        winner = next((user for user in reversed(users) if _replaces(user, flag)), None)
        if winner is None:
            kept.append(flag)
        elif winner.value != flag.value or winner.name != flag.name:
            contradictions.append(f"{winner} replaces the plan's {flag}")
    changes = [
        f"{flag} changes what the plan was made for; its sizes and speeds may not hold"
        for flag in changing
        if not any(_replaces(flag, one) for one in own)
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


_UVA, _BACKEND = "--cpu-offload-gb", "--offload-backend"
_GROUPS, _IN_GROUP = "--offload-group-size", "--offload-num-in-group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    values: Mapping[str, Value]
    """Settings by name, each with its origin."""
    vllm_args: tuple[str, ...] = ()
    """vLLM's own flags that are not settings here."""
    offload_groups: tuple[int, int] | None = None
    """Layers per group and how many of them lie in RAM, from the flags of the prefetching offloader."""

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values by name for `plan_for`, with the offload groups and the place where RAM was stated."""
        place = self.values["ram"].place
        return {**plain(self.values), "offload_groups": self.offload_groups, "ram_place": place}

    @property
    def serve_args(self) -> tuple[str, ...]:
        """Words that follow the model in an `overspill serve` command, besides the flags of settings."""
        if self.offload_groups is None:
            return self.vllm_args
        group_size, num_in_group = map(str, self.offload_groups)
        return (*self.vllm_args, _GROUPS, group_size, _IN_GROUP, num_in_group)


def adopt(values: Mapping[str, Value], typed: Sequence[str] = (), *, registered: Sequence[str] = ()) -> Adopted:
    """Turn vLLM's flags into settings where possible; typed ones win over a model's `registered` flags."""
    adopted = _adopt(Adopted(values=values), read_flags(registered), GivenBy.REGISTRY)
    return _adopt(adopted, read_flags(typed), GivenBy.FLAG)


def _adopt(before: Adopted, flags: Sequence[Flag], origin: GivenBy) -> Adopted:
    if origin is GivenBy.REGISTRY:
        for flag in flags:
            refuse_address(flag)  # an earlier Overspill let such a flag in
    taken: list[Flag] = []
    values, groups = dict(before.values), before.offload_groups
    for name in SHARED:
        if named := [one for one in flags if _is_of(one, BY_NAME[name])]:
            flag = named[-1]
            is_switch = BY_NAME[name].kind is YES_OR_NO
            _set(values, name, flag.name == BY_NAME[name].flag if is_switch else flag.value, flag, origin)
            taken += named
    uva, backend, grouped = (find(flags, name) for name in (_UVA, _BACKEND, _GROUPS))
    # vLLM's size is per rank, and RAM is counted for all ranks.
    ranks = values["tensor_parallel_size"].value * values["pipeline_parallel_size"].value
    num_bytes, group_size = ranks * _bytes(uva), _number(grouped, 0)
    which = backend.value if backend is not None else "auto"
    # Flags of both offloaders, or of one without its size, are left for overspill.launch.traps to refuse.
    if uva is not None and not group_size and which in (("auto", "uva") if num_bytes else ("auto",)):
        if _set(values, "weights_ram", num_bytes, uva, origin):
            groups = None
        taken += [one for one in flags if one.name in (_UVA, _BACKEND, _GROUPS, _IN_GROUP)]
    elif grouped is not None and not num_bytes and which in (("auto", "prefetch") if group_size else ("auto",)):
        if _set(values, "weights_ram", None if group_size else 0, grouped, origin):
            groups = (group_size, _number(find(flags, _IN_GROUP), 1)) if group_size else None
        taken += [one for one in flags if one.name in (_UVA, _BACKEND, _GROUPS, _IN_GROUP)]
    left = [word for flag in flags if flag not in taken for word in flag.words]
    return replace(
        before,
        values=values,
        vllm_args=(*before.vllm_args, *left),
        offload_groups=groups,
    )


def _set(values: dict[str, Value], name: str, given: Any, flag: Flag, origin: GivenBy) -> bool:
    """Set a value from a vLLM flag; False if a typed flag already did, and this one is the registry's."""
    before = values[name]
    if before.origin is GivenBy.FLAG:
        if origin is GivenBy.REGISTRY:
            return False
        raise OverspillError(
            f"{before.setting.flag} and vLLM's {flag} say the same thing twice; leave one of the two out"
        )
    try:
        value = None if given is None else before.setting.parse(given)
    except OverspillError as error:
        raise SettingsError(f"{flag.words[0]}: {error}") from error
    values[name] = Value(before.setting, value, origin, flag.words[0])
    return True


def _is_of(flag: Flag, setting: Setting) -> bool:
    """Whether vLLM's flag is this setting: with underscores, after `--`, or where the command takes no settings."""
    if setting.name in _ABBREVIATED:
        return matches(flag.name, setting.flag)
    return flag.name == setting.flag or (setting.kind is YES_OR_NO and flag.name == f"--no-{setting.flag[2:]}")


def _last(flags: Iterable[Flag], name: str) -> Flag | None:
    """The last flag with this name or an abbreviation of it, which vLLM's parser completes."""
    return next((flag for flag in reversed(list(flags)) if matches(flag.name, name)), None)


def _bytes(flag: Flag | None) -> int:
    try:
        gib = 0.0 if flag is None else float(flag.value)
    except ValueError:
        gib = math.nan
    if not 0 <= gib < math.inf:
        raise OverspillError(f"{flag} is not a number of GiB; write for example {_UVA} 8")
    return int(gib * GiB)


def _number(flag: Flag | None, default: int) -> int:
    if flag is None:
        return default
    if not flag.value.strip().isdigit():
        raise OverspillError(f"{flag} is not a number; write for example {flag.name} 2")
    return int(flag.value)
