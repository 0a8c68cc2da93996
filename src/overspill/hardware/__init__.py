"""Hardware facts: what a planner needs to know about a machine, each figure with its origin."""

from overspill.hardware.gpu import Gpu
from overspill.hardware.machine import Hardware, detect
from overspill.hardware.stated import parse_gpu, parse_ram, with_stated

__all__ = ["Gpu", "Hardware", "detect", "parse_gpu", "parse_ram", "with_stated"]
