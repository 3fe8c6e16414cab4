"""Verdicts on rows made by hand."""

from io import StringIO
from math import isnan, nan

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvgraft.engine.config import load_config
from kvgraft_lab.testbed import MODEL_DIR
from research.cross_query.divergence import DivergenceRow, MovedSegment
from research.cross_query.figures import summarise
from research.cross_query.hypotheses import (
    judge_boundaries,
    judge_fallbacks,
    judge_retrieval,
    judge_speed,
)
from research.cross_query.numerics import judge_reindexing
from research.cross_query.proposals import Proposal
from research.cross_query.reruns import RerunStability, compare
from research.cross_query.runner import StepRow
from research.cross_query.tables import render_reruns
from research.cross_query.verdict import FAILS, HOLDS, UNDECIDED, judge

ROW = StepRow(
    suite="qa", variation="plain", seed=0, episode=0, step=0, condition="none", round=0, task="sum",
    expected="42",
    answer="42", right=True, error=False, last=True, success=True, prompt=100, prefix=0, grafted=0,
    recomputed=0,
    fresh=100, matched=0, computed=1.0, flops=1000, ttft_s=0.9, seconds=1.0, stages={}, rejected=0,
    probed_segments=0,
    rejected_segments=0, restored_blocks=0, fallback=None,
)  # fmt: skip
SEGMENT = MovedSegment(0, 100, 84, True, 0.01, 0.02, 0.02, 0.05)
STEP = DivergenceRow(
    "qa", "plain", 0, 0, 0, "similar", True, True, 0.1, 0.3, True, True, (SEGMENT,), (), 100, 60
)


def rows(
    condition: str, seconds: float, lost: int = 0, seeds: int = 4, episodes: int = 100
) -> list[StepRow]:
    """Episodes of one step, of which the first `lost` of every seed fail."""
    return [
        replace(
            ROW,
            condition=condition,
            seed=seed,
            episode=n,
            seconds=seconds * (1 + n % 3),
            success=n >= lost,
        )
        for seed in range(seeds)
        for n in range(episodes)
    ]


def test_h1_on_known_ratios():
    latency, success = judge_speed([*rows("none", 1.0), *rows("similar", 0.5)])
    assert (latency.hypothesis, latency.condition, latency.count) == ("H1", "similar", 400)
    assert (latency.value, latency.low, latency.high, latency.verdict) == (0.5, 0.5, 0.5, HOLDS)
    assert latency.details["at most 0.5"] == HOLDS
    assert isnan(float(latency.details["against prefix"]))
    assert (success.value, success.verdict) == (0, HOLDS)
    # Wilson, none lost of 400
    assert success.low == pytest.approx(-(1.96**2) / (400 + 1.96**2), abs=1e-5)
    slow, worse = judge_speed([*rows("none", 1.0), *rows("similar", 0.9, lost=5)])
    assert (slow.value, slow.verdict) == (pytest.approx(0.9), FAILS)
    assert (worse.value, worse.verdict) == (-0.05, FAILS)
    assert (worse.details["lost"], worse.details["won"]) == (20, 0)
    [_, few] = judge_speed([*rows("none", 1.0, episodes=5), *rows("similar", 0.9, episodes=5)])
    assert few.verdict == UNDECIDED
    assert judge_speed(rows("similar", 0.5)) == []


def test_p_is_corrected_for_the_number_of_conditions():
    conditions = [
        *rows("similar", 1.0, lost=2),
        *rows("transitive", 1.0, lost=1),
        *rows("prefix", 1.0),
    ]
    found = judge_speed([*rows("none", 1.0), *conditions])
    plain, corrected = (
        [one.details[name] for one in found[1::2]] for name in ("McNemar p", "McNemar p, Holm")
    )
    assert plain == pytest.approx([2 / 2**8, 2 / 2**4, 1])  # 8, 4 and 0 lost
    assert corrected == pytest.approx([3 * 2 / 2**8, 2 * 2 / 2**4, 1])


def test_an_interval_decides_when_it_is_whole_on_one_side_of_a_bar():
    assert judge(0.1, 0.2, below=0.3) == judge(0.1, 0.2, above=0.1) == HOLDS
    assert judge(0.4, 0.5, below=0.3) == judge(0.1, 0.2, above=0.3) == FAILS
    assert judge(0.2, 0.4, below=0.3) == judge(nan, nan, below=0.3) == UNDECIDED


def test_figures_count_whole_episodes_only():
    half = replace(ROW, condition="similar", last=False)
    reused = replace(
        ROW, condition="similar", episode=1, grafted=60, fresh=40, flops=250, seconds=0.25
    )
    none, similar = summarise([ROW, replace(ROW, episode=1), half, reused])
    assert (none.episodes, none.faster, none.flops) == (2, 1, 1)
    assert (similar.episodes, similar.grafted, similar.flops, similar.faster) == (1, 0.6, 0.25, 4)


def test_h2_means_accepted_segments():
    rejected = MovedSegment(100, 50, 34, False, 0.5, 0.01, 0.0, 0.0)
    small = MovedSegment(150, 12, 0, True, None, 5.0, 5.0, 5.0)  # all halo: nothing was accepted
    steps = [replace(STEP, seed=seed, segments=(SEGMENT, rejected, small)) for seed in range(3)]
    [verdict] = judge_boundaries([*steps, replace(STEP, condition="similar:halo_tokens=16")])
    assert (verdict.value, verdict.verdict, verdict.count) == (pytest.approx(0.02), HOLDS, 3)
    assert (verdict.details["accepted"], verdict.details["rejected below"]) == (0.5, 1)
    far = [replace(one, segments=(replace(SEGMENT, final=0.4),)) for one in steps]
    assert judge_boundaries(far)[0].verdict == FAILS


def test_h3_counts_what_is_right_by_alignment_and_by_kl():
    proposals = (
        Proposal(0, 64, 0.9, 0.01),
        Proposal(0, 64, 0.5, 0.3),
        Proposal(0, 64, 0.4),
        Proposal(9, 99, 0.8),
    )
    steps = [replace(STEP, seed=seed, proposals=proposals * 50) for seed in range(4)]
    aligned, near = judge_retrieval([*steps, replace(STEP, condition="similar:halo_tokens=0")])
    assert (aligned.value, aligned.count, aligned.verdict) == (0.75, 800, HOLDS)
    assert (near.value, near.count, near.verdict) == (0.5, 400, FAILS)
    assert aligned.details == {"tau": 0.8, "recall of known text": 0.6}


def test_h4_rotations_are_exact_and_fallbacks_are_compared():
    config = load_config(MODEL_DIR)
    exact, rounded = judge_reindexing(config.rope, 512)
    assert exact.verdict == rounded.verdict == HOLDS
    assert exact.value < 1e-6 < rounded.value
    steps = [replace(STEP, seed=seed) for seed in range(3)]
    [worst] = judge_fallbacks((), [*steps, replace(STEP, seed=2, kl=0.2, trusting=0.9)])
    assert (worst.value, worst.verdict) == (pytest.approx((0.2 + 0.2 + 0.7) / 3), HOLDS)
    assert worst.claim == "worst divergence is lower with fallbacks, by nats"
    assert (worst.details["worst, nats"], worst.details["probe off"]) == (0.2, 0.9)
    every = [
        *rows("none", 1.0),
        *rows("similar", 1.0),
        *rows("similar:probe_tokens=0", 1.0, lost=50),
    ]
    success, _ = judge_fallbacks(every, steps)
    assert (success.hypothesis, success.verdict, success.details["beyond probe off"]) == (
        "H4",
        HOLDS,
        0.5,
    )


def test_reruns_are_compared_by_their_answers():
    reruns = [
        replace(ROW, round=n, answer=answer) for n, answer in enumerate(("42", "42", "12", "42"))
    ]
    [one] = compare(reruns)
    assert (one.reruns, one.from_none) == (4, 0)
    assert one.distance == pytest.approx(0.5 * 3 / 6)
    assert one.entropy == pytest.approx(0.5623, abs=1e-3)
    with pytest.raises(ValueError, match="at least 2 rounds"):
        compare(reruns[:1])


def test_the_table_of_reruns_fits_80_columns():
    one = RerunStability(
        "sparsex:shallow=fresh", "adversarial", 300, 10, 0.123, 0.1, 0.2, 0.456, 0.789, 0.975
    )
    console = Console(width=80, file=StringIO())
    console.print(render_reruns([one]))
    text = console.file.getvalue()
    assert all(
        word in text for word in ("300 x 10", "0.123 ± 0.050", "0.456", "0.789", "success", "0.975")
    )
