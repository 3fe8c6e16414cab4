"""How far recoveries go in a step, on made-up costs."""

import pytest
import torch

pytest.importorskip("vllm.config")

from kvgraft.core.costs import Costs
from kvgraft.vllm.recovery_budget import LEAST_S, RecoveryBudget, seconds_of_step

COSTS = Costs(pass_s=4.0, token_s=1.0, pair_s=0.01, copy_s=0.5)


def test_parts_cost_what_the_cost_model_says_of_them():
    budget = RecoveryBudget(4, costs=COSTS)
    positions = torch.tensor([0, 9, 19])
    assert budget.whole_pass(positions) == pytest.approx(4 + 3 + 0.01 * (1 + 10 + 20))
    assert budget.layer(positions) == pytest.approx(budget.whole_pass(positions) / 4)
    assert budget.rows(3) == pytest.approx((4 + 3) / 4)
    assert budget.copy(8, 4) == pytest.approx(4.0)
    assert budget.copy(8) == pytest.approx(1.0)


def test_a_step_is_what_plain_vllm_would_take_for_as_many_tokens_at_the_end_of_the_prompt():
    whole = RecoveryBudget(4, costs=COSTS).whole_pass
    assert seconds_of_step(COSTS, 10, 100) == pytest.approx(whole(torch.arange(90, 100)))
    # more than there are
    assert seconds_of_step(COSTS, 200, 100) == pytest.approx(whole(torch.arange(100)) + 100)
    assert seconds_of_step(Costs(0.0, 0.0, 0.0, 0.0), 10, 100) == LEAST_S


def test_work_is_begun_while_anything_is_left_and_then_waits_for_the_next_step():
    pauses = []

    def pause() -> None:
        pauses.append(budget.seconds)
        budget.seconds = 5.0 if len(pauses) == 2 else 0.0  # the step between them was full

    budget = RecoveryBudget(4, pause, COSTS, seconds=6.0)
    assert budget.affords(6.0)
    assert not budget.affords(6.1)
    assert not budget.spend(5.0)
    assert not budget.spend(3.0), "begun, though it takes longer than what is left"
    assert budget.spend(1.0)
    assert pauses == [-2.0, 0.0]
    assert budget.seconds == 4.0
