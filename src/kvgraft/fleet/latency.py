"""Seconds that really pass for each one that is expected: by a server, its load, and whatever
shares its machine."""

MEMORY = 0.9  # weight of what was known with each new prompt: some ten count
FASTEST, SLOWEST = 1e-6, 1e3  # costs may be given in tokens instead of seconds


class LatencyCalibration:
    """Of one server; 1 until it has answered. Expected and real seconds are summed, so long prompts
    count for more."""

    def __init__(self) -> None:
        self._expected = self._real = 0.0

    @property
    def value(self) -> float:
        """Real seconds to an expected one."""
        return min(max(self._real / self._expected, FASTEST), SLOWEST) if self._expected else 1.0

    def add(self, expected_s: float, real_s: float) -> None:
        """A prompt had its first token after so many seconds."""
        self._expected = MEMORY * self._expected + expected_s
        self._real = MEMORY * self._real + real_s
