"""What a Prometheus draws and warns of: the dashboard, and the rules."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from kvgraft.fleet.figures import Figures, ReplicaFigures
from kvgraft.server.metrics import EngineSilence, FirstTokens, GuardMetrics
from kvgraft.vllm.stats import METRICS

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DOCS / "prometheus-rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
PROMTOOL = shutil.which("promtool")
SERVER_LABELS = {"model_name", "engine"}


@dataclass(frozen=True)
class Exported:
    """A metric: `histogram`, `counter` or `gauge`."""

    kind: str
    labels: frozenset[str]


def exported() -> dict[str, Exported]:
    """All metrics: of the engine, of the API server, and of a fleet, by the names of their
    series."""
    engine = {
        name: Exported(one.kind.__name__.lower(), frozenset(SERVER_LABELS | ({one.label} - {""})))
        for name, one in METRICS.items()
    }
    fleet = [
        one
        for name, one in (vars(Figures()) | vars(ReplicaFigures())).items()
        if name != "registry"
    ]
    parts = FirstTokens("m"), EngineSilence("m", lambda: 0.0), GuardMetrics("m")
    server = [one for part in parts for one in vars(part).values()]
    return engine | {
        one._name + ("_total" if one._type == "counter" else ""): Exported(
            one._type, frozenset(one._labelnames)
        )
        for one in (
            *(getattr(one, "metric", one) for one in server if not isinstance(one, str)),
            *fleet,
        )
    }


KNOWN = exported()


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def variables() -> Iterator[str]:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def metric_of(series: str) -> str:
    """The metric that a series belongs to: histograms have three kinds of series."""
    base = re.sub(r"_(bucket|sum|count)$", "", series)
    return base if base in KNOWN and KNOWN[base].kind == "histogram" else series


def check(query: str) -> None:
    """Raise AssertionError if it names a metric or a label that does not exist."""
    series = re.findall(r"kvgraft:\w+", query)
    assert series
    for name in series:
        assert metric_of(name) in KNOWN, f"{name} is not exported"
    allowed = {label for name in series for label in KNOWN[metric_of(name)].labels}
    allowed |= {"le"} if "_bucket" in query else set()
    grouped = {
        label.strip()
        for group in re.findall(r"\bby \(([^)]*)\)", query)
        for label in group.split(",")
    }
    selected = set(re.findall(r"(\w+)=~?\"", query))
    assert grouped | selected <= allowed
    assert not re.search(r"\b(vllm|tenant)\b", query)


@pytest.mark.parametrize("query", [*queries(), *variables()])
def test_a_query_names_metrics_and_labels_that_exist(query: str):
    check(query)


@pytest.mark.parametrize("query", [query.replace("$__rate_interval", "1m") for query in queries()])
def test_a_query_is_promql(query: str):
    promql_parser.parse(query)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: apt install prometheus")
def test_rules_do_on_made_up_series_what_they_are_for():
    subprocess.run(
        [str(PROMTOOL), "test", "rules", str(DOCS / "prometheus-rules-test.yml")], check=True
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_is_promql_about_metrics_that_exist(rule: dict[str, Any]):
    promql_parser.parse(rule["expr"])
    check(rule["expr"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    named = {
        label
        for text in rule["annotations"].values()
        for label in re.findall(r"\$labels\.(\w+)", text)
    }
    [metric, *_] = re.findall(r"kvgraft:\w+", rule["expr"])
    assert named <= KNOWN[metric_of(metric)].labels
    assert not named or " by (" not in rule["expr"]


def sides(found: Any) -> Iterator[Any]:
    """Of all operations on two vectors in an expression that is not inside of a function or a
    sum."""
    if isinstance(found, promql_parser.ParenExpr):
        yield from sides(found.expr)
    elif isinstance(found, promql_parser.BinaryExpr):
        for side in (found.lhs, found.rhs):
            yield from sides(side)
    elif not isinstance(found, promql_parser.NumberLiteral):
        yield found


@pytest.mark.parametrize("expression", [*queries(), *(rule["expr"] for rule in RULES)])
def test_both_sides_of_an_operation_have_the_same_labels(expression: str):
    """PromQL pairs series whose labels are equal: what is selected by them must be summed over on
    both sides."""
    found = [*sides(promql_parser.parse(expression.replace("$__rate_interval", "1m")))]
    if len(found) > 1:
        assert all(
            isinstance(side, promql_parser.AggregateExpr) or "{" not in str(side) for side in found
        )


def test_counters_are_shown_as_rates_and_gauges_as_they_are():
    for query in queries():
        for name in re.findall(r"kvgraft:\w+", query):
            assert (f"rate({name}" in query) != (KNOWN[metric_of(name)].kind == "gauge"), query


def test_every_metric_is_on_the_dashboard():
    assert {
        metric_of(name) for query in queries() for name in re.findall(r"kvgraft:\w+", query)
    } == set(KNOWN)


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
