"""Division of a step's spilled KV between the link and the CPU, so that both finish together."""

from overspill.kv.jobs import Lateness
from overspill.kv.speeds import Speeds

# Relative change of the share per step: smaller after lateness changed sides, larger once several steps in a row agree.
# Several steps are planned before the first of them reports, so every change overshoots.
_LEAST_MOVE, _FIRST_MOVE, _MOST_MOVE = 0.004, 0.03, 0.05
_SLOWER, _FASTER, _STEPS_ALIKE = 0.5, 1.3, 8
_LEAST_SHARE, _MOST_SHARE = 0.01, 0.95
# Relative growth or shrinkage of the spilled KV after which the share is estimated anew.
_OTHER_SIZE = 0.25
# Time that each further query token of a request adds to the CPU's part. Alone, 8 took 2.7 times as long as one with
# AMX, and 3.8 times without.
_PER_QUERY = 0.2
# A CPU that was late at every share is tried again after this many steps, with this share.
_STEPS_BETWEEN_TRIES, _TRIED_SHARE = 512, 0.05


def cpu_share(num_bytes: int, *, link_bytes_per_s: float, cpu_bytes_per_s: float, own_s: float) -> float:
    """The CPU's share of a step's spilled KV, from the speeds of link and CPU alone.

    The link streams ahead during the whole step. The CPU gets a layer's query only when the previous layer has ended,
    so it idles for `own_s`, the time the GPU computes; KV streamed during that time costs nothing.
    """
    if not cpu_bytes_per_s or not num_bytes:
        return 0.0
    step_s = (num_bytes + cpu_bytes_per_s * own_s) / (link_bytes_per_s + cpu_bytes_per_s)
    return max(0.0, cpu_bytes_per_s * (step_s - own_s) / num_bytes)


class Balance:
    """The CPU's share of each step: estimated from speeds, then adjusted until the GPU waits for the CPU in half of the
    layers, and for the link in the other half.

    Speeds alone do not suffice: link and CPU read the same memory, and slow each other down.
    """

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._num_bytes, self._own_s = 0, 0.0  # inputs of the last estimate
        self._share = self._guess = 0.0
        self._num_queries = 1
        self._move = _FIRST_MOVE
        self._was_late, self._alike = False, 0  # side of the latest steps, and how many repeated it
        self._steps_alone = 0  # consecutive steps without a share for the CPU

    def share(self, num_bytes: int, link_bytes_per_s: float, num_queries: int = 1) -> float:
        """The CPU's share of a step with `num_bytes` of spilled KV, to which each request has up to `num_queries` query
        tokens. With drafts this number changes from step to step, faster than lateness could tell."""
        own_s = self._speeds.plain_step_s
        is_other = abs(num_bytes - self._num_bytes) > _OTHER_SIZE * self._num_bytes
        is_first = not self._guess or (own_s and not self._own_s)
        if is_first or is_other:
            if is_first:
                self._num_queries = 1  # the CPU's speed was measured with one
            self._num_bytes, self._own_s = num_bytes, own_s
            self._guess = self._share = cpu_share(
                num_bytes, link_bytes_per_s=link_bytes_per_s, cpu_bytes_per_s=self._speeds.far_bytes_per_s, own_s=own_s
            )
            self._move = _FIRST_MOVE
        if num_queries != self._num_queries:
            slower = _slowness(num_queries) / _slowness(self._num_queries)
            self._share /= self._share + (1 - self._share) * slower
            self._num_queries = num_queries
        self._steps_alone = 0 if self._share else self._steps_alone + 1
        if self._guess and self._steps_alone >= _STEPS_BETWEEN_TRIES:
            self._share = min(self._guess, _TRIED_SHARE)
        return self._share

    def record(self, lateness: Lateness) -> None:
        if not lateness.layers:
            return
        part = lateness.late / lateness.layers
        is_late = part > 0.5
        self._alike = self._alike + 1 if is_late == self._was_late else 0
        if not self._alike:
            self._was_late = is_late
            self._move = max(_LEAST_MOVE, self._move * _SLOWER)
        elif self._alike > _STEPS_ALIKE:
            self._move = min(_MOST_MOVE, self._move * _FASTER)
        share = self._share * (1 + self._move * (1 - 2 * part))
        self._share = min(share, _MOST_SHARE) if share > _LEAST_SHARE else 0.0


def _slowness(num_queries: int) -> float:
    return 1 + _PER_QUERY * (num_queries - 1)
