"""Where the time of a prefill goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimes:
    """Seconds by stage, such as align, dense, select, sparse, of work on a device."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count what happens inside."""
        start = self._clock()
        yield
        self.seconds[stage] += self._clock() - start

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
