"""`overspill bench`: a workload sent to a server, timed as vLLM's own benchmark does, with the tiers' share in it."""

from overspill.bench.errors import BenchError, CannotBench
from overspill.bench.measuring import measure
from overspill.bench.outcome import Outcome, Tier, require_tier
from overspill.bench.progress import Progress, ProgressPrinter
from overspill.bench.report import report_as_text
from overspill.bench.target import Target, find_target, parse_url
from overspill.bench.workload import WORKLOADS, Parameter, Workload, WorkloadKind, parse_workload

__all__ = [
    "WORKLOADS",
    "BenchError",
    "CannotBench",
    "Outcome",
    "Parameter",
    "Progress",
    "ProgressPrinter",
    "Target",
    "Tier",
    "Workload",
    "WorkloadKind",
    "find_target",
    "measure",
    "parse_url",
    "parse_workload",
    "report_as_text",
    "require_tier",
]
