"""Whether a model is still what its tuning began with. A decision without effects.

Measurements of another source or with other flags cannot be ranked with the old ones, and the best would be kept over
what somebody changed. What the tuning itself kept, when its time was over, is no such change.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from overspill.registry import ChangedMeanwhile
from overspill.settings import parse_settings
from overspill.tune.candidates import Candidate
from overspill.tune.keeping import settings_to_keep, shown
from overspill.tune.subject import Subject


def resumed(began: Subject, now: Subject | None, given: Mapping[str, Any], candidates: Sequence[Candidate]) -> Subject:
    """What goes on being tuned: the model as it was, at the version that it has now. `now` is None where the registry
    has no model of that name. Raises `ChangedMeanwhile` if it is neither as it was nor as a candidate would be kept."""
    if now is None:
        if began.version is None:
            return began
        raise ChangedMeanwhile(
            f"{began.name} was removed from the registry since this tuning began. Add it again as it was, with: "
            f"{_command('add', began.name, _state(began))}; or start anew, without --resume"
        )
    before, after = _state(began), _state(now)
    kept = [{**before, **parse_settings(settings_to_keep(began, each, given))} for each in candidates]
    # Where one was kept, what differs is told from that: only what a person changed has to be taken back.
    if changes := min((_changes(one, after) for one in (before, *kept)), key=len):
        raise ChangedMeanwhile(_refusal(began, now, changes))
    # A setting that a kept candidate has, and another has not, is taken back when that one is kept.
    added = {name: value for name, value in {**now.settings, **now.tuned}.items() if before.get(name) is None}
    return replace(began, version=now.version, tuned={**added, **began.tuned})


def _state(subject: Subject) -> dict[str, Any]:
    """All that a server is started with."""
    words = (*subject.vllm_args, *subject.tuned_args)
    return {"source": subject.source, **subject.settings, **subject.tuned, "vllm_args": words}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (before.get(name), after.get(name))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    }


def _refusal(began: Subject, now: Subject, changes: Mapping[str, tuple[Any, Any]]) -> str:
    told = ", ".join(f"{name}: {shown(name, old)} -> {shown(name, new)}" for name, (old, new) in changes.items())
    if began.version is None and now.source != began.source:
        return (
            f"another model was added to the registry as {began.name} since this tuning began: {now.source}, and not "
            f"{began.source}. Start anew, without --resume and with another --name"
        )
    was = "added to the registry" if began.version is None else f"changed (version {began.version} to {now.version})"
    back = _command("edit", began.name, {name: old for name, (old, _) in changes.items()})
    return (
        f"{began.name} was {was} since this tuning began, and differs in {told}: what is measured now could not be "
        "compared with what was measured then, and the best would be kept over that change. Take it back with: "
        f"{back}; or start anew, without --resume"
    )


def _command(verb: str, name: str, settings: Mapping[str, Any]) -> str:
    """Of `overspill models`."""
    words = ["overspill", "models", verb, name]
    for key, value in settings.items():
        flag = key.replace("_", "-")
        if value is None or value == ():
            words += ["--unset", key] if verb == "edit" else []
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif key != "vllm_args":
            words += [f"--{flag}", str(value)]
    own = settings.get("vllm_args") or ()
    return shlex.join([*words, *(["--", *own] if own else [])])
