"""Measured links, kept between runs: one small JSON file for each machine they hold for."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from overspill.figures import measured
from overspill.files import replace_file
from overspill.hardware.gpu import Gpu
from overspill.hardware.link import Link

logger = logging.getLogger(__name__)

_FORMAT = 1
_RATES = ("h2d_bytes_per_second", "d2h_bytes_per_second")
# A figure beyond this is not a link but a damaged file: a GH200's NVLink-C2C does 450 GB/s.
_FASTEST = 10**13


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A measured link holds as long as none of these change."""

    gpu_uuid: str
    driver_version: str
    pcie_generation: int | None
    pcie_width: int | None
    kernel: str


def fingerprint_of(gpu: Gpu, kernel: str) -> Fingerprint:
    return Fingerprint(
        gpu_uuid=gpu.uuid,
        driver_version=gpu.driver_version,
        pcie_generation=gpu.pcie_generation.value if gpu.pcie_generation else None,
        pcie_width=gpu.pcie_width.value if gpu.pcie_width else None,
        kernel=kernel,
    )


def _path(folder: Path, fingerprint: Fingerprint) -> Path:
    text = json.dumps(asdict(fingerprint), sort_keys=True)
    return folder / "links" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def load_link(folder: Path, fingerprint: Fingerprint) -> Link | None:
    """The link measured for that fingerprint; None if there is none, or the file is damaged."""
    path = _path(folder, fingerprint)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("Overspill: the measured link in %s cannot be read (%s); it will be measured again", path, error)
        return None
    try:
        return _parse(text, fingerprint)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("Overspill: the measured link in %s is damaged (%s); it will be measured again", path, error)
        return None


def _parse(text: str, fingerprint: Fingerprint) -> Link:
    entry = json.loads(text)
    if entry["format"] != _FORMAT or entry["fingerprint"] != asdict(fingerprint):
        raise ValueError("it belongs to something else")
    rates = [entry[name] for name in _RATES]
    if not all(type(rate) is int and 0 < rate < _FASTEST for rate in rates):
        raise ValueError(f"rates of {rates}")
    note = f"measured on {date.fromisoformat(entry['measured_on'])}"
    h2d, d2h = (measured(rate, note) for rate in rates)
    return Link(h2d, d2h)


def store_link(folder: Path, fingerprint: Fingerprint, link: Link) -> None:
    """Keep a measured link; failing to is no error. Of two writers the last wins, and readers see either, whole."""
    path = _path(folder, fingerprint)
    rates = {name: getattr(link, name).value for name in _RATES}
    entry = {"format": _FORMAT, "fingerprint": asdict(fingerprint), "measured_on": date.today().isoformat(), **rates}
    text = json.dumps(entry, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        logger.warning(
            "Overspill: the measured link could not be kept in %s (%s); it is measured again next time", path, error
        )
