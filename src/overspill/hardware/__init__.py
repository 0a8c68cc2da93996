"""Hardware facts: what a planner needs to know about a machine, each figure with its origin."""

from overspill.hardware.cards import CARDS, Card
from overspill.hardware.detection import Hardware, detect
from overspill.hardware.gpu import Gpu, GpuProcess, Link
from overspill.hardware.machine import Machine, NumaNode
from overspill.hardware.stated import parse_gpu, parse_link, parse_ram, with_stated

__all__ = [
    "CARDS",
    "Card",
    "Gpu",
    "GpuProcess",
    "Hardware",
    "Link",
    "Machine",
    "NumaNode",
    "detect",
    "parse_gpu",
    "parse_link",
    "parse_ram",
    "with_stated",
]
