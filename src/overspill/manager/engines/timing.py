"""How long the manager waits for what; one object, so that tests can be impatient."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    look_starting_s: float = 0.25
    look_ready_s: float = 2.0
    look_models_s: float = 1.0
    """How often the registry and the machine's engines are looked through for what others changed."""
    health_s: float = 5.0
    """An engine that is busy answers late."""
    silent_s: float = 120.0
    """After so long without an answer an engine counts as hung, and is ended."""
    start_s: float = 3600.0
    """So long a start may take; a large model on a slow disk takes half of it."""
    stop_patience_s: float = 60.0
    """`overspill serve` takes up to 35 s to end vLLM itself; what lives longer is killed."""
    back_off_s: float = 10.0
    """After a failed start, doubled with each further one; an engine that served longer is started again at once."""
    most_back_off_s: float = 300.0
    least_service_s: float = 10.0
    """For which a busy model is not evicted after it became ready."""
    drain_s: float = 120.0
    """Requests in flight are given so long to end before their model is stopped for another one."""
    settle_s: float = 2.0
    """A driver frees memory a moment after the process is gone."""
    load_s: float = 900.0
    """The longest that a request waits for its model."""
    stalled_client_s: float = 120.0
    """A client that takes nothing for so long has left."""
    upload_s: float = 120.0
    """In which a request must have come whole."""

    def back_off(self, num_failures: int) -> float:
        return min(self.most_back_off_s, self.back_off_s * 2.0 ** (num_failures - 1)) if num_failures else 0.0
