"""`overspill ab`: configurations measured in turn, saved with all that is needed to repeat them, and compared."""

from overspill.experiment.definition import Definition
from overspill.experiment.errors import CannotCompare, ExperimentError
from overspill.experiment.report import Report
from overspill.experiment.run import run
from overspill.experiment.stored import find_results, load_experiment

__all__ = ["CannotCompare", "Definition", "ExperimentError", "Report", "find_results", "load_experiment", "run"]
