"""How a step's spilled KV is divided between the link and the CPU, so that both end together."""

from overspill.kv.speeds import Speeds

# Weight of the latest step in the mean, as of the speeds.
_WEIGHT = 0.3
# The GPU's own time is taken for a little less than it seems to be, in steps with a part for the CPU and in others:
# nothing else would show that the CPU could do more.
_OPTIMISM, _OPTIMISM_ALONE = 0.95, 0.99


def cpu_share(num_bytes: int, *, link_bytes_per_s: float, cpu_bytes_per_s: float, own_s: float) -> float:
    """Share of a step's spilled KV for the CPU.

    The link streams ahead all the step long. The CPU gets a layer's query when the layer before has ended, so it rests
    while the GPU computes, for `own_s` of the step; what the link streams meanwhile costs nothing.
    """
    if not cpu_bytes_per_s or not num_bytes:
        return 0.0
    step_s = (num_bytes + cpu_bytes_per_s * own_s) / (link_bytes_per_s + cpu_bytes_per_s)
    return max(0.0, cpu_bytes_per_s * (step_s - own_s) / num_bytes)


class Balance:
    """The share of each step, by speeds measured in the steps before."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._far_bytes = 0.0  # that the CPU attended to, in the last steps
        self._own_s = 0.0  # of the GPU

    def share(self, num_bytes: int, link_bytes_per_s: float) -> float:
        return cpu_share(
            num_bytes, link_bytes_per_s=link_bytes_per_s, cpu_bytes_per_s=self._speeds.far_bytes_per_s,
            own_s=self._own_s,
        )  # fmt: skip

    def record(self, far_bytes: int) -> None:
        """A step was planned in which the CPU attends to so many bytes."""
        speeds = self._speeds
        self._far_bytes = self._far_bytes + _WEIGHT * (far_bytes - self._far_bytes) if far_bytes else 0.0
        if self._far_bytes and speeds.far_step_s and speeds.far_bytes_per_s:
            self._own_s = _OPTIMISM * max(0.0, speeds.far_step_s - self._far_bytes / speeds.far_bytes_per_s)
        else:
            self._own_s = _OPTIMISM_ALONE * (self._own_s or speeds.plain_step_s)
