"""What `python -m research.vortex.flows` judges."""

from kvgraft.flows import parse_flow
from research.vortex.flows import NAMED, with_budgets


def test_every_flow_takes_a_number_of_blocks():
    named = with_budgets(NAMED.split(";"), ["29"])
    assert len(named) > 60
    assert {parse_flow(flow).topk_blocks for flow in named} == {29}  # type: ignore[union-attr]


def test_blocks_stand_behind_other_options():
    assert with_budgets(["a:b=1", "c"], ["2", "3"]) == [
        "a:b=1,topk_blocks=2", "c:topk_blocks=2", "a:b=1,topk_blocks=3", "c:topk_blocks=3",
    ]  # fmt: skip
