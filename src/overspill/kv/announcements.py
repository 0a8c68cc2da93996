"""Which loads a step announces.

A request may be scheduled before its bytes are there, if they come while the GPU is busy with what was queued before.
"""

from collections import deque

# However long a step is expected to take, no other will wait longer than this for copies that come later than that.
LONGEST_S = 0.1


class Backlog:
    """Compute that is queued and not over, as far as can be told without asking the GPU."""

    def __init__(self, steps_in_flight: int) -> None:
        # Older steps are over: vLLM waited for them. So an estimate that is too long never adds up.
        self._steps: deque[tuple[float, float]] = deque(maxlen=steps_in_flight)

    def add(self, seconds: float, began: float) -> None:
        """A step is queued that takes so long. The GPU may have been at it since its first kernel was."""
        self._steps.append((began, seconds))

    def seconds(self, now: float) -> float:
        end = 0.0
        for began, seconds in self._steps:
            end = max(end, began) + seconds
        return min(max(0.0, end - now), LONGEST_S)


class Turn:
    """One step's look at the loads under way, oldest first, which is the order of their copies."""

    def __init__(
        self, hidden_bytes: float, *, idle: bool, tolerated_bytes: float = 0.0, many_tokens: float = 0.0
    ) -> None:
        """`hidden_bytes` come while the GPU is busy. An idle one may wait: for the first load however long it takes,
        and for others by `tolerated_bytes` more, so that many small ones are computed together and a large one does not
        hold up what came before it.

        vLLM computes what is announced together in one step, and no first token comes before all of it is over. So once
        there is much to compute, the rest is for the next step."""
        self._allowance = hidden_bytes
        self._idle = idle
        self._tolerated_bytes = tolerated_bytes
        self._many_tokens = many_tokens
        self._coming = 0
        self._new_tokens = 0

    def look_at(self, remaining_bytes: int) -> None:
        """The next load, which has so many bytes on the way."""
        self._coming += remaining_bytes

    def announces(self, *, over: bool, new_tokens: int) -> bool:
        """Whether the load just looked at may be announced. Its copies are queued, or over."""
        if 0 < self._many_tokens <= self._new_tokens:
            return False
        if not (over or self._idle or self._coming <= self._allowance):
            return False
        self._new_tokens += new_tokens
        if self._idle:
            self._idle = False
            waited_for = 0.0 if over else self._coming
            self._allowance = max(self._allowance, waited_for) + self._tolerated_bytes
        return True
