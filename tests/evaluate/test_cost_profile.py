"""What costs mean for prompts: what the cost model itself would say."""

import io

import numpy as np
import pytest
from rich.console import Console

from kvgraft.core.cost_model import CostModel, Work
from kvgraft.core.costs import Costs
from kvgraft.core.matches import Match
from kvgraft_lab.evaluate.cost_profile import CostProfile, estimate, render

COSTS = Costs(pass_s=3e-3, token_s=2e-4, pair_s=5e-8, copy_s=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.8])
def test_estimates_are_those_of_the_cost_model(share: float):
    for one in estimate(COSTS, share, [512, 5000]):
        known = Match(0, one.tokens - 1, 0, np.zeros(-(-one.tokens // 16), np.int32), 0, 0)
        _, expected = CostModel(COSTS, exactness_weight=0.0, work={"p": Work(share)}).choose(
            [known], one.tokens, 0, "p"
        )
        assert (one.full_s, one.grafted_s) == pytest.approx((expected.full_s, expected.reuse_s))
        assert one.copied_s == pytest.approx(1e-6 * (one.tokens - 1))


def test_the_table_fits_a_terminal_and_names_the_units():
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(CostProfile(COSTS, 1024, 0.15, estimate(COSTS, 0.15))))
    text = " ".join(console.export_text().split())
    assert "15% is computed again" in text
    assert (
        "a pass 3 ms; in it a token 200 µs, a token that sees 1,000 others 50 µs more; a token "
        "copied 1 µs" in text
    )
    assert "16,384" in text
    assert "…" not in text
