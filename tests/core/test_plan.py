from dataclasses import replace

import numpy as np
import pytest
import torch

from kvgraft.core.matches import Match
from kvgraft.core.plan import Kind, Plan, Span


def match(
    start: int, length: int, source_start: int = 0, first_page: int = 50, block_size: int = 4
) -> Match:
    num_pages = -(-(source_start % block_size + length) // block_size)
    return Match(start, length, source_start, np.arange(first_page, first_page + num_pages), 0, 0)


def positions(mask: torch.Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()


def test_every_token_has_one_kind():
    plan = Plan.for_prompt(20, 4, prefix_blocks=[0], matches=[match(6, 8)])
    assert plan.spans == [
        [
            Span(0, 4, Kind.PREFIX),
            Span(4, 6, Kind.FRESH),
            Span(6, 14, Kind.GRAFTED),
            Span(14, 20, Kind.FRESH),
        ]
    ]
    assert (plan.prefix.int() + plan.grafted.int() + plan.fresh.int()).eq(1).all()
    assert positions(~plan.active) == [0, 1, 2, 3]
    assert plan.ends_in_graft == (False,)


def test_grafts_know_source_slot_and_shift_of_each_token():
    plan = Plan.for_prompt(
        12, 4, matches=[match(7, 3, source_start=2, first_page=9), match(1, 2, source_start=8)]
    )
    assert plan.graft_targets.tolist() == [1, 2, 7, 8, 9]
    assert plan.graft_sources.tolist() == [200, 201, 38, 39, 40]
    assert plan.graft_shifts.tolist() == [-7, -7, 5, 5, 5]


def test_the_last_token_is_always_computed():
    plan = Plan.for_prompt(8, 4, matches=[match(0, 8)])
    assert plan.ends_in_graft == (True,)
    assert positions(plan.fresh) == [7]
    assert plan.graft_targets.tolist() == list(range(7))


@pytest.mark.parametrize(
    ("place", "source_place", "changes", "same"),
    [
        (8, 4, {}, True),
        (9, 4, {}, False),  # more than a tenth of 80 tokens before it
        (4, 9, {}, False),
        (4, 0, {}, False),  # it was the beginning of its prompt
        (0, 4, {}, True),
        (8, 4, {"depth": 1}, False),
    ],
)
def test_one_match_behind_little_other_text_stands_in_its_context(
    place: int, source_place: int, changes: dict[str, int], same: bool
):
    known = replace(match(place, 80, source_place), **changes)
    assert Plan.for_prompt(120, 4, matches=[known]).same_context == (same,)
    assert Plan.for_prompt(120, 4, matches=[known], continues=True).same_context == (False,)
    parts = replace(known, length=40), replace(known, start=place + 50, length=30)
    assert Plan.for_prompt(120, 4, matches=parts).same_context == (False,)


@pytest.mark.parametrize(
    ("hit", "same"),
    [
        ({}, True),
        ({"source": 7}, False),
        ({"source": 7, "reading": 0}, False),  # read together, perhaps in another order
        ({"start": 4, "source_start": 0}, False),
    ],
)
def test_the_beginning_of_the_source_belongs_to_the_context(hit: dict[str, int], same: bool):
    system, known = replace(match(0, 40), **hit), match(44, 40, source_start=42)
    plan = Plan.for_prompt(96, 4, range(10), [known], hits=[system])
    assert plan.same_context == (same,)
    batch = Plan.batch([plan, plan])
    assert batch.same_context == (same, same)
    assert batch.without_grafts().same_context == (False, False)


def test_overflow_is_one_block_on_each_side_of_fresh_text():
    plan = Plan.for_prompt(30, 4, matches=[match(0, 10), match(12, 17)])
    assert positions(plan.overflow(1)) == [*range(6, 10), *range(12, 16), *range(25, 29)]
    assert positions(plan.overflow(0)) == []


def test_overflow_and_tail_stay_inside_their_prompt():
    grafted, fresh = Plan.for_prompt(10, 4, matches=[match(0, 10)]), Plan.for_prompt(6, 4)
    batch = Plan.batch([grafted, fresh, grafted])
    assert positions(batch.overflow(1)) == [5, 6, 7, 8, 21, 22, 23, 24]
    assert positions(batch.tail(3)) == [6, 7, 8, 22, 23, 24]
    assert batch.positions.tolist() == [*range(10), *range(6), *range(10)]
    assert batch.graft_targets.tolist() == [*range(9), *range(16, 25)]


def test_tail_is_cut_at_the_final_graft():
    plan = Plan.for_prompt(12, 4, matches=[match(8, 4)])
    assert positions(plan.tail(64)) == [8, 9, 10]
    assert positions(Plan.for_prompt(12, 4, matches=[match(4, 4)]).tail(64)) == []


def test_top_share_is_taken_in_each_prompt():
    plan = Plan.batch(
        [
            Plan.for_prompt(10, 4, matches=[match(0, 4)]),
            Plan.for_prompt(10, 4, matches=[match(2, 6)]),
        ]
    )
    scores = torch.arange(20.0)
    assert positions(plan.top_share(scores, 0.5, plan.grafted)) == [2, 3, 15, 16, 17]
    assert positions(plan.top_share(scores, 0.0, plan.grafted)) == []
    assert positions(plan.top_share(scores, 1.0, plan.grafted)) == positions(plan.grafted)
    assert positions(plan.top_share(scores, 0.01, plan.grafted)) == [3, 17]  # rounded up


def test_the_question_is_what_is_fresh_behind_the_last_graft():
    asked = Plan.for_prompt(12, 4, prefix_blocks=[0], matches=[match(5, 2), match(8, 2)])
    ends_in_graft = Plan.for_prompt(10, 4, matches=[match(2, 8)])
    nothing_grafted = Plan.for_prompt(3, 4)
    assert positions(asked.question) == [10, 11]
    assert positions(Plan.batch([asked, ends_in_graft, nothing_grafted]).question) == [
        10,
        11,
        21,
        22,
        23,
        24,
    ]


def test_heads_are_the_beginnings_of_what_moved_together():
    moved = [
        match(1, 5, source_start=11),
        match(6, 4, source_start=3),
        match(12, 6, source_start=0),
    ]
    plan = Plan.for_prompt(20, 4, matches=moved)
    assert positions(plan.segment_starts(2)) == [1, 2, 6, 7, 12, 13]
    assert positions(plan.segment_starts(100)) == positions(plan.grafted)
    assert positions(plan.segment_starts(0)) == []
    assert positions(plan.segment_starts(3, 0.4)) == [1, 2, 6, 7, 12, 13, 14], (
        "two of five, two of four, three of six"
    )
    together = Plan.for_prompt(
        20, 4, matches=[match(1, 4, source_start=3), match(5, 4, source_start=7)]
    )
    assert positions(together.segment_starts(1)) == [1]  # two matches of one shift are one stretch
    assert positions(Plan.batch([Plan.for_prompt(3, 4), plan]).segment_starts(1)) == [4, 9, 15]


def test_reaching_is_by_prompt():
    one, two = (Plan.for_prompt(6, 4, matches=[match(0, 4)]) for _ in range(2))
    plan = Plan.batch([one, two])
    scores = torch.tensor([1.0, 5, 2, 9, 4, 6, 1, 1, 1, 1, 9, 0])
    chosen = torch.zeros(12, dtype=torch.bool)
    assert positions(plan.reaching(scores, chosen)) == []
    chosen[[1, 3]] = True
    assert positions(plan.reaching(scores, chosen)) == [1, 3, 5]


def test_without_grafts_only_exact_hits_remain():
    plan = Plan.for_prompt(12, 4, prefix_blocks=[0], matches=[match(4, 8)]).without_grafts()
    assert positions(plan.fresh) == list(range(4, 12))
    assert plan.graft_targets.numel() == 0
    assert plan.ends_in_graft == (False,)


@pytest.mark.parametrize("length", [1, 2])
def test_tiny_prompts(length: int):
    plan = Plan.for_prompt(length, 16)
    assert positions(plan.fresh) == list(range(length))
    assert not plan.overflow().any()
    assert not plan.tail().any()
