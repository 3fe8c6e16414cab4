"""Metrics of the API server, with no engine behind it."""

from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvgraft.core.report import Outcome
from kvgraft.server.metrics import FIRST_TOKEN, FirstTokens, GuardMetrics
from kvgraft.server.request_log import ABORTED, Entry, RequestLog
from kvgraft.server.tenancy import LOCAL


@pytest.fixture(scope="module")
def guard_metrics() -> GuardMetrics:
    return GuardMetrics("m")


def value(name: str, **labels: Any) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m", **labels})


def test_first_tokens_are_counted_by_outcome_and_every_outcome_is_there_from_the_start():
    log = RequestLog([LOCAL])
    log.on_entry = FirstTokens("m").observe
    counts = {one: value(f"{FIRST_TOKEN}_count", outcome=one) for one in (*Outcome, ABORTED)}
    assert set(counts.values()) == {0}

    log.add(Entry(0.0, "local", "/v1/completions", "grafted", ttft_s=0.25))
    log.add(Entry(0.0, "local", "/v1/completions", ABORTED))  # had no token
    assert value(f"{FIRST_TOKEN}_sum", outcome="grafted") == pytest.approx(0.25)
    assert value(f"{FIRST_TOKEN}_count", outcome=ABORTED) == 0


def test_what_the_guard_measures_names_the_model(guard_metrics: GuardMetrics):
    metrics = guard_metrics
    metrics.waiting.inc()
    metrics.level.labels("naive").set(2)
    assert value("kvgraft:guard_waiting") == 1
    assert value("kvgraft:guard_level", policy="naive") == 2


def test_an_alarm_of_the_guard_is_an_increase_of_a_series_that_was_there(
    guard_metrics: GuardMetrics,
):
    alarm = {"policy": "epic", "level": "exact", "reason": "alarm"}
    name = "kvgraft:guard_transitions_total"
    assert value(name, **alarm) is None
    distances = {"answer_kl": 0.1, "flips": 0.0, "loglik": 0.0}
    guard_metrics.observe("epic", 1, distances)
    assert value(name, **alarm) == 0
    guard_metrics.transitions.labels(*alarm.values()).inc()
    guard_metrics.observe("epic", 1, distances)
    assert value(name, **alarm) == 1
