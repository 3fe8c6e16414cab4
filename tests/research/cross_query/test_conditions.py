"""Conditions by name, and that they are what they say."""

from pathlib import Path

import pytest

from kvgraft.core.prompt import Segment
from kvgraft.core.segmentation import Similarity
from kvgraft.policies import Similar, parse_policy
from kvgraft_lab.testbed import MODEL_DIR
from research.cross_query.asking import Agent, KnownText, sampling_of
from research.cross_query.conditions import (
    ABLATIONS,
    ANY_DEPTH,
    CONDITIONS,
    MAIN,
    SWEPT,
    find_conditions,
    name_of,
)

PAGE = (
    "the code of lamp is 42 . the old river slept near the hill . the quiet road waited near the "
    "river . " * 2
)
QUESTION = "question : code of lamp ? answer :"


def test_ours_base_is_the_paper_s():
    condition = CONDITIONS["similar"]
    assert condition.similar == Similar(
        reused_share=0.375, halo_tokens=8, probe_tokens=1, max_kl=0.1
    )
    assert condition.similarity == Similarity(tau=0.8, context_tau=0.5, context_tokens=64)
    assert condition.max_depth == ANY_DEPTH


def test_every_condition_parses_and_ablations_change_one_thing():
    assert len(
        {
            (c.policy, c.match, c.store, c.int8, c.remembers, c.counts_text)
            for c in CONDITIONS.values()
        }
    ) == len(CONDITIONS)
    for condition in CONDITIONS.values():
        assert str(parse_policy(condition.policy)).startswith(condition.policy.partition(":")[0])
    for option, values in SWEPT.items():
        for value in values:
            condition = CONDITIONS[name_of(option, value)]
            assert getattr(condition.similar, option, None) in (value, None)
            assert getattr(condition.similarity, option, None) in (value, None)
    assert CONDITIONS["similar:halo_tokens=0"].match == CONDITIONS["similar"].match
    assert CONDITIONS["similar:tau=0.9"].policy == "similar"
    assert CONDITIONS["similar:int8"].int8


def test_conditions_are_found_by_name_and_group():
    assert [one.name for one in find_conditions("none, similar:tau=0.6,none")] == [
        "none",
        "similar:tau=0.6",
    ]
    assert find_conditions("main,none") == MAIN
    assert find_conditions("all") == (*MAIN, *ABLATIONS)
    with pytest.raises(
        ValueError,
        match="unknown condition 'magic': choose from main, ablations, all, none, prefix",
    ):
        find_conditions("none,magic")
    with pytest.raises(ValueError, match="must name at least one"):
        find_conditions(" , ")


@pytest.mark.parametrize(
    ("name", "prefix", "grafted", "matched"),
    [
        ("none", False, False, False), ("prefix", True, False, False), ("text", False, False, True),
        ("similar", True, True, False), ("similar:int8", False, True, False),
    ],
)  # fmt: skip
def test_a_condition_reuses_what_it_says(name: str, prefix: bool, grafted: bool, matched: bool):
    agent = Agent(
        CONDITIONS[name], CONDITIONS[name].open(Path(MODEL_DIR), num_pages=256, dtype="float32")
    )
    agent.ask([Segment(PAGE), QUESTION])
    again = agent.ask([Segment(PAGE), "question : code of bell ? answer :"]).report
    moved = agent.ask(["agent 12 : ", Segment(PAGE), QUESTION])
    assert (again.prefix_tokens > 0, moved.report.grafted_tokens > 0) == (prefix, grafted)
    assert (agent.took[-1][1] > 0) == matched
    assert moved.text.split()[0] == "42"
    assert moved.report.counts["restored_blocks"] == 0 or "store" in name or "int8" in name
    agent.engine.close()


def test_known_text_is_what_stands_in_runs_of_eight():
    text = KnownText()
    assert not text.known(range(20)).any()
    text.add(range(20))
    assert (
        text.known([99, *range(3, 11), 99, *range(7)]).tolist()
        == [False] + [True] * 8 + [False] * 8
    )
    assert not text.known(range(7)).any()


def test_sampling_draws_equally_for_all_conditions_and_not_twice():
    seeds = {
        sampling_of("paper", seed, e, t, s).seed
        for seed in (0, 1)
        for e in (0, 1)
        for t in (0, 1)
        for s in (0, 1)
    }
    assert len(seeds) == 16
    assert sampling_of("greedy", 1, 2, 3, 4).temperature == 0
    with pytest.raises(ValueError, match="unknown sampling 'hot': choose from greedy, paper"):
        sampling_of("hot", 0, 0, 0, 0)
