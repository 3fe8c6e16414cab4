"""Where time goes: on CUDA measured without making the host wait for the device."""

import pytest
import torch

from kvgraft.prefill.stages import StageTimes


class Device:
    """A stand-in for CUDA: every recorded event is a tenth of a second after the one before."""

    def __init__(self) -> None:
        self.waits, self.recorded = 0, 0

    def make_event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)

    def synchronize(self, device: object = None) -> None:
        self.waits += 1


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1

    def record(self, stream: object) -> None:
        self.at, self.device.recorded = self.device.recorded, self.device.recorded + 1

    def synchronize(self) -> None:
        self.device.waits += 1

    def elapsed_time(self, stop: "Event") -> float:
        return 100.0 * (stop.at - self.at)


def test_nobody_waits_for_the_device_before_seconds_are_read(monkeypatch: pytest.MonkeyPatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.make_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    times = StageTimes(torch.device("cuda"))
    for _ in range(8):
        with times.timed("dense"):
            pass
    with times.timed("select"):
        pass
    assert device.waits == 0
    assert times.seconds == pytest.approx({"dense": 0.8, "select": 0.1})
    assert times.seconds == pytest.approx({"dense": 0.8, "select": 0.1}), (
        "read again, nothing is counted twice"
    )
    with times.timed("dense"):
        pass
    assert times.seconds["dense"] == pytest.approx(0.9)


def test_on_a_cpu_the_clock_is_read(monkeypatch: pytest.MonkeyPatch):
    now = iter([1.0, 1.5, 2.0, 2.25])
    monkeypatch.setattr("kvgraft.prefill.stages.time.perf_counter", lambda: next(now))
    times = StageTimes(torch.device("cpu"))
    for _ in range(2):
        with times.timed("sparse"):
            pass
    times.add("read", 3.0)
    assert times.seconds == {"sparse": 0.75, "read": 3.0}
