"""How far recoveries go in a step, on made-up costs."""

import pytest
import torch

pytest.importorskip("vllm.config")

from kvgraft.prefill.costs import Costs
from kvgraft.vllm.pace import LEAST_S, Pace, seconds_of_step

COSTS = Costs(pass_s=4.0, token_s=1.0, pair_s=0.01, copy_s=0.5)


def test_parts_cost_what_the_cost_model_says_of_them():
    pace = Pace(4, costs=COSTS)
    positions = torch.tensor([0, 9, 19])
    assert pace.whole_pass(positions) == pytest.approx(4 + 3 + 0.01 * (1 + 10 + 20))
    assert pace.layer(positions) == pytest.approx(pace.whole_pass(positions) / 4)
    assert pace.copy(8, 4) == pytest.approx(4.0)
    assert pace.copy(8) == pytest.approx(1.0)


def test_a_step_is_what_plain_vllm_would_take_for_as_many_tokens_at_the_end_of_the_prompt():
    whole = Pace(4, costs=COSTS).whole_pass
    assert seconds_of_step(COSTS, 10, 100) == pytest.approx(whole(torch.arange(90, 100)))
    assert seconds_of_step(COSTS, 200, 100) == pytest.approx(whole(torch.arange(100)) + 100)  # more than there are
    assert seconds_of_step(Costs(0.0, 0.0, 0.0, 0.0), 10, 100) == LEAST_S


def test_work_is_begun_while_anything_is_left_and_then_waits_for_the_next_step():
    pauses = []

    def pause() -> None:
        pauses.append(pace.seconds)
        pace.seconds = 5.0 if len(pauses) == 2 else 0.0  # the step between them was full

    pace = Pace(4, pause, COSTS, seconds=6.0)
    assert pace.affords(6.0)
    assert not pace.affords(6.1)
    assert not pace.spend(5.0)
    assert not pace.spend(3.0), "begun, though it takes longer than what is left"
    assert pace.spend(1.0)
    assert pauses == [-2.0, 0.0]
    assert pace.seconds == 4.0
