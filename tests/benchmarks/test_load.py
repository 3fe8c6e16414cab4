"""Percentiles and sums of a run, and pauses of a stream."""

import math
from dataclasses import replace

import pytest

from load import Outcome, Spread, Summary
from scenarios import PROMISED, SCENARIOS, Figure, pauses_within
from soak import growth
from tables import comparison_of, line_of, table_of

REPORT = {"grafted_tokens": 60, "recomputed_tokens": 6, "reason": None}
GOOD = Outcome("rag", 10.0, 10.5, 12.0, (0.1, 0.3, 1.1), 100, 4, 80, REPORT)


def test_percentiles_are_interpolated():
    assert Spread.of(list(range(101))) == Spread(50.0, 95.0, 99.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.95, 1.99)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert math.isnan(Spread.of([]).p99)


def test_a_summary_adds_up():
    second = replace(
        GOOD,
        start_s=11.0,
        first_s=12.5,
        end_s=14.0,
        gaps_s=(0.2,),
        cached_tokens=0,
        output_tokens=2,
    )
    second = replace(
        second, report={"grafted_tokens": 0, "recomputed_tokens": 0, "reason": "no_match"}
    )
    failed = replace(GOOD, error="boom", end_s=99.0, prompt_tokens=1000)
    silent = replace(GOOD, first_s=None, end_s=99.0)
    summary = Summary.of([GOOD, second, failed, silent, failed])
    assert summary.requests == 5
    assert summary.errors == {"boom": 2, "no token": 1}
    assert summary.seconds == 4.0
    assert summary.ttft_s.median == pytest.approx(1.0)
    assert summary.gap_s.median == pytest.approx(0.25)
    assert summary.worst_gap_s == pytest.approx(1.1)
    assert summary.output_tokens_per_s == pytest.approx(6 / 4)
    assert summary.requests_per_s == pytest.approx(2 / 4)
    assert summary.prompt_tokens == 200
    assert summary.cached == pytest.approx(80 / 200)
    assert summary.grafted == pytest.approx(60 / 200)
    assert summary.recomputed == pytest.approx(6 / 200)
    assert summary.reasons == {"no_match": 1}


def test_an_endpoint_without_reports_has_no_grafts():
    summary = Summary.of([replace(GOOD, report=None)])
    assert summary.grafted is None
    assert summary.recomputed is None
    assert summary.cached == pytest.approx(0.8)


def test_a_summary_of_failures_can_be_printed():
    summary = Summary.of([replace(GOOD, error="boom")])
    assert math.isnan(summary.cached)
    assert table_of({"": summary}).row_count == 15, "all rows and the errors"
    assert comparison_of([(summary, summary)]).row_count == 16


def test_pauses_overlap_the_window():
    times = [0.0, 5.0, 6.0, 9.0, 9.5]
    assert pauses_within(times, 5.5, 9.2) == [1.0, 3.0, 0.5], (
        "the pause before the window does not count"
    )
    assert pauses_within(times, 4.0, 9.2) == [5.0, 1.0, 3.0, 0.5], (
        "one that reaches into it counts whole"
    )
    assert pauses_within(times, 5.5, 5.8) == [1.0]
    assert pauses_within(times, 9.6, 20.0) == []


def test_figures_know_their_target():
    figure = Figure("x", "ours / plain", 1.3, 1.2, 1.4, 1.3, True, [1.0], [1.3], 0.0, 0.9, 0.1)
    assert figure.met
    assert not replace(figure, value=1.31).met
    assert not replace(figure, at_most=False, value=1.29).met
    assert replace(figure, at_most=False, value=1.31).met
    assert "1.310" in line_of(replace(figure, value=1.31))
    assert "MISSED" in line_of(replace(figure, value=1.31))
    assert "pauses" not in line_of(figure)
    stalled = replace(figure, plain_pauses_s=(0.01, 0.02, 0.03), ours_pauses_s=(0.01, 0.03, 0.04))
    assert line_of(stalled).endswith("; pauses p50 p95 p99 ms: plain 10 20 30, ours 10 30 40")


def test_the_promises_are_those_of_the_project():
    promised = {
        name: (s.target, s.at_most, s.shape.tokens, s.shape.reuse) for name, s in PROMISED.items()
    }
    assert promised == {
        "nothing": (1.02, True, 1024, 0.0),
        "4k90": (2.7, False, 4096, 0.9),
        "8k98": (5.0, False, 8192, 0.98),
        "interleaved": (1.0, False, 4096, 0.5),
        "stall": (1.3, True, 4096, 0.9),
        "sparsex-4k90": (2.7, False, 4096, 0.9),
        "sparsex-8k98": (6.0, False, 8192, 0.98),
    }
    assert [name for name, s in SCENARIOS.items() if s.kvgraft] == [
        "sparsex-4k90",
        "sparsex-8k98",
    ], "the default first"
    assert SCENARIOS["nothing"].rounds >= 20


def test_growth_is_that_of_the_second_half():
    warming = [(minute / 6, 500 + 100 * min(minute, 30)) for minute in range(61)]
    growing = [(at, mib + 3 * at) for at, mib in warming]
    found = growth({"a": warming, "b": growing, "c": warming[:5]})
    assert found["a"] == pytest.approx((0.0, 0.0), abs=1e-6)
    assert found["b"] == pytest.approx((3.0, 0.0), abs=1e-6)
    assert set(found) == {"a", "b"}
    swaying = [(at, mib + 20 * (-1) ** number) for number, (at, mib) in enumerate(warming)]
    slope, error = growth({"a": swaying})["a"]
    assert abs(slope) < 2 * error, "no growth is sure"
