"""The servers of `benchmarks/together.py`, and its figures."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvgraft_lab.evaluate.hosts import Answer
from kvgraft_lab.evaluate.runner import EvalRow
from kvgraft_lab.evaluate.scoring import ORDER_NOISE
from together import Timed, figures_of, servers


def test_every_server_has_one_feature_more():
    flags = [*servers(Path("heads.json"), "quest", Path("store")).values()]
    assert flags[0] == ()
    for before, after in pairwise(flags):
        assert after[: len(before)] == before
        assert len(after) > len(before)
    assert {"--kvgraft-match", "--flow", "--kvgraft-head-paging", "--kvgraft-store-dir"} < {
        *flags[-1]
    }


def test_figures_compare_with_vllm_prompt_by_prompt():
    answer = Answer("a", 1.0, 100, 0, 90, 5, 10, 0.15, None)
    rows = [
        EvalRow(
            cluster, 0, "docs", "cloze", pattern, 2048, False, policy, ("a",), score, 0.0, 0.0,
            replace(answer, distances={"answer_kl": kl, "flips": 0.0, "loglik": 0.0}),
        )
        for cluster, pattern, ours in (("1", "alone", 0.3), ("2", "tail", 0.02))
        for policy, score, kl in (
            ("full", 1.0, 0.0), ("spread", 0.5, ours), (ORDER_NOISE, 1.0, 0.1)
        )
    ]  # fmt: skip
    times = [
        (Timed(4.0, 0.2, 0.5), Timed(1.0, 0.1, 0.25)),
        (Timed(3.0, 0.2, 0.5), Timed(1.0, 0.4, 0.25)),
        (Timed(9.0, 0.2, 0.5), Timed(3.0, 0.2, 0.25)),
    ]
    found = figures_of("spread", rows, times, 2)
    assert (found.prompts, found.score, found.less[0]) == (2, 0.5, 0.5)
    assert found.kl / found.noise == pytest.approx(1.6)
    assert found.worst == (pytest.approx(3.0), "alone")
    assert (found.sooner[0], found.faster[0]) == (3.0, 1.0)
    assert (found.kv_mib, found.full_kv_mib) == (512.0, 1024.0)
