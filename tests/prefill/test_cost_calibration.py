"""What a host measures of a model, on a clock that each step advances by what it takes."""

import time
from typing import cast

import pytest
import torch

from kvgraft.core.plan import Plan
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.cost_calibration import calibrate

SETUP_S, PASS_S, TOKEN_S, COPY_S = 10.0, 0.5, 0.01, 0.001
NUM_LAYERS = 4


class FakeClock:
    """Seconds that pass only when something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeContext:
    """A prefill pass that makes slots and metadata when a layer, or a copy, first needs them."""

    def __init__(self, plan: Plan, clock: FakeClock) -> None:
        self.plan, self.clock, self.is_ready = plan, clock, False

    def _take(self, seconds: float) -> None:
        self.clock.now += seconds + (0.0 if self.is_ready else SETUP_S)
        self.is_ready = True

    def embed(self, where: torch.Tensor) -> Hidden:
        return Hidden(torch.zeros(int(where.sum()), 1), where)

    def run(self, layers: range, hidden: Hidden) -> Hidden:
        self._take(len(layers) * (PASS_S + TOKEN_S * len(hidden.states)))
        return hidden

    def graft(self, layers: range) -> None:
        self._take(len(layers) * COPY_S * self.plan.graft_targets.numel())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_made_once_a_prompt_is_not_counted_in_every_layer(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
):
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    costs = calibrate(
        lambda plan: cast(PrefillContext, FakeContext(plan, clock)),
        NUM_LAYERS,
        16,
        4096,
        on_gpu=on_gpu,
    )
    assert costs.pass_s == pytest.approx(NUM_LAYERS * PASS_S)
    assert costs.token_s == pytest.approx(NUM_LAYERS * TOKEN_S)
    assert costs.pair_s == pytest.approx(0, abs=1e-9)
    assert costs.copy_s == pytest.approx(NUM_LAYERS * COPY_S)
