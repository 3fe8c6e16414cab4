"""Time of a prefill by stage."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimes:
    """Seconds by stage, such as align, dense, select, sparse, of work on a device.

    On CUDA, events are recorded and only `seconds` waits for them. So the host keeps launching work
    while layers are measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._unread: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block inside to a stage."""
        if self._device.type == "cuda":
            start = self._event()
            yield
            self._unread.append((stage, start, self._event()))
        else:
            begun = time.perf_counter()
            yield
            self.add(stage, time.perf_counter() - begun)

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to a stage."""
        self._seconds[stage] += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage so far. Waits for the device."""
        if self._unread:
            # All events are on one stream, so the last one is enough.
            self._unread[-1][2].synchronize()
        for stage, start, stop in self._unread:
            self.add(stage, start.elapsed_time(stop) / 1000)
        self._unread.clear()
        return dict(self._seconds)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
