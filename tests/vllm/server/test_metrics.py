"""Metrics of the API server, with no engine behind it."""

from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvgraft.core.report import Outcome
from kvgraft.server.metrics import FIRST_TOKEN, FirstTokens, GuardMetrics
from kvgraft.server.request_log import ABORTED, Entry, RequestLog
from kvgraft.server.tenancy import LOCAL


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


def test_what_the_guard_measures_names_the_model():
    metrics = GuardMetrics("m")
    metrics.waiting.inc()
    metrics.level.labels("naive").set(2)
    assert value("kvgraft:guard_waiting") == 1
    assert value("kvgraft:guard_level", policy="naive") == 2
