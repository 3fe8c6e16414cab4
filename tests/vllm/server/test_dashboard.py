import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Histogram

from kvgraft.vllm.stats import METRICS

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
SERVER_LABELS = {"model_name", "engine"}


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def metric_of(series: str) -> str:
    """The metric that a series belongs to: histograms have three kinds of series."""
    base = re.sub(r"_(bucket|sum|count)$", "", series)
    return base if base in METRICS and METRICS[base].kind is Histogram else series


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_names_metrics_and_labels_that_exist(query: str):
    series = re.findall(r"kvgraft:\w+", query)
    assert series
    for name in series:
        assert metric_of(name) in METRICS, f"{name} is not exported"
    own = {METRICS[metric_of(name)].label for name in series}
    allowed = SERVER_LABELS | own | ({"le"} if "_bucket" in query else set())
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")}
    selected = set(re.findall(r"(\w+)=~?\"", query))
    assert grouped | selected <= allowed
    assert query.count("(") == query.count(")")
    assert not re.search(r"\b(vllm|tenant)\b", query)


def test_counters_are_shown_as_rates_and_gauges_as_they_are():
    for query in queries():
        for name in re.findall(r"kvgraft:\w+", query):
            is_gauge = METRICS[metric_of(name)].kind.__name__ == "Gauge"
            assert (f"rate({name}" in query) != is_gauge, query


def test_every_metric_is_on_the_dashboard():
    shown = {metric_of(name) for query in queries() for name in re.findall(r"kvgraft:\w+", query)}
    assert shown == set(METRICS)


def test_panels_have_a_place_of_their_own():
    taken: dict[tuple[int, int], str] = {}
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
