"""Where logs of the engines that are measured are kept: one for each start."""

import os
from collections.abc import Mapping
from pathlib import Path

from overspill.errors import CannotServe
from overspill.folders import state_folder


def logs_folder(command: str, experiment: str, environment: Mapping[str, str] = os.environ) -> Path:
    if (folder := state_folder(environment)) is None:
        raise CannotServe("there is no home folder for vLLM's logs; set XDG_STATE_HOME")
    return folder / command / experiment


def log_name(label: str, repeat: int) -> str:
    name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in label)[:60].strip(".") or "_"
    return f"{name}-{repeat}.log"
