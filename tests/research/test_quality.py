"""The experiments are what they say; running them takes hours."""

import pytest

from kvgraft.policies import CacheBlend, SparseX, parse_policy
from kvgraft_lab.evaluate.hosts import Answer
from kvgraft_lab.evaluate.runner import EvalRow, EvalSettings
from kvgraft_lab.evaluate.tasks import GENERATED, find_suites
from research.quality import EXPERIMENTS, WORK, _compare_hosts, _rules
from research.sparsex.paper_tables import PAPER_METHODS, paper_tables


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_can_run(name: str):
    experiment = EXPERIMENTS[name]
    settings = EvalSettings(
        find_suites(experiment.suites), experiment.policies, experiment.lengths, experiment.segments
    )
    assert settings.policies[0] == "full"


@pytest.mark.parametrize("work", WORK)
def test_rules_are_compared_at_equal_work(work: float):
    for policy in map(parse_policy, _rules(work).values()):
        if isinstance(policy, SparseX):
            assert policy.boundary_layers is not None
            dense = policy.boundary_layers / 8
            assert dense + (1 - dense) * policy.recompute_share == pytest.approx(work, abs=1e-4)
            assert policy.overflow_blocks == 0
        if isinstance(policy, CacheBlend):
            assert policy.check_layer / 8 + (
                1 - policy.check_layer / 8
            ) * policy.recompute_share == pytest.approx(work, abs=1e-4)


def test_paper_tables_have_a_row_for_each_method():
    answer = Answer("42", 0.1, 100, 0, 80, 8, 20, 0.4)
    rows = [
        EvalRow(
            f"{name}/{task}/{n}",
            0,
            name,
            task,
            "alone",
            1024,
            True,
            policy,
            ("42",),
            0.5,
            0.5,
            0.5,
            answer,
        )
        for n in range(2)
        for policy in PAPER_METHODS
        for name, suite in GENERATED.items()
        for task in suite.tasks
    ]
    text = paper_tables(rows)
    assert text.count("| SparseX (w/ hybrid) |") == 3
    assert "| naive reuse | 0.50 ± 0.00 | 1.0 | 0.54 | 19.2 |" in text
    assert "| naive reuse | 0.50 ± 0.00 (0.69) | 0.50 ± 0.00 (0.33) |" in text
    assert "| transitive (ours) | 0.50 ± 0.00 | 1.0 | - | - |" in text
    assert "10.6x for SparseX (w/ hybrid) and 7.0x for CacheBlend; ours: 1.0x" in text


def test_hosts_are_compared_prompt_by_prompt():
    def row(policy: str, text: str, score: float) -> EvalRow:
        answer = Answer(text, 0.1, 100, 0, 80, 8, 20, 0.28)
        return EvalRow(
            "ruler/0",
            0,
            "ruler",
            "variable",
            "alone",
            1024,
            True,
            policy,
            ("42",),
            score,
            score,
            score,
            answer,
        )

    text = _compare_hosts(
        "vllm",
        [row("full", "42", 1.0), row("naive", "17", 0.0)],
        [row("full", " 42", 1.0), row("naive", "42", 1.0)],
    )
    assert "| full | 1.000 | 1.000 | 1 of 1 |" in text
    assert "| naive | 0.000 | 1.000 | 0 of 1 | 10.0% | 10.0% |" in text
