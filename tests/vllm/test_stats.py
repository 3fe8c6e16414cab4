"""Metrics: what one payload counts, how payloads add up, and what a real Prometheus registry shows
of them."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvgraft import store
from kvgraft.store.events import EVENTS
from kvgraft.vllm.compat import transfer_config
from kvgraft.vllm.connector import KVGraftConnector
from kvgraft.vllm.stats import BUCKETS, METRICS, PromMetrics, Stats

REQUESTS, STAGES, POOL = "kvgraft:requests_total", "kvgraft:stage_seconds", "kvgraft:pool_blocks"
LABELS = {"model_name": "m", "engine": "0"}


def config() -> VllmConfig:
    return VllmConfig(kv_transfer_config=transfer_config())


def payload() -> Stats:
    stats = Stats()
    stats.add(REQUESTS, "grafted")
    stats.add(REQUESTS, "grafted")
    stats.add("kvgraft:tokens_total", "fresh", 40)
    stats.observe(STAGES, "align", 0.002)
    stats.observe(STAGES, "align", 0.5)
    stats.level(POOL, "used", 7)
    stats.level("kvgraft:pinned_documents", "", 3)
    return stats


def test_a_payload_counts_collects_and_keeps_the_latest_level():
    stats = payload()
    stats.level(POOL, "used", 5)
    assert stats.data == {
        REQUESTS: {"grafted": 2},
        "kvgraft:tokens_total": {"fresh": 40},
        STAGES: {"align": [0.002, 0.5]},
        POOL: {"used": 5},
        "kvgraft:pinned_documents": {"": 3},
    }


def test_a_payload_is_empty_at_first_and_after_a_reset():
    stats = Stats()
    assert stats.is_empty()
    stats.add(REQUESTS, "miss")
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert Stats().data is not Stats().data


def test_payloads_add_up_and_of_levels_the_newer_counts():
    older, newer = payload(), Stats()
    newer.add(REQUESTS, "grafted", 3)
    newer.add(REQUESTS, "off")
    newer.observe(STAGES, "align", 1.0)
    newer.level(POOL, "used", 2)
    newer.level(POOL, "free", 9)
    before = msgspec.to_builtins(newer.data)
    assert older.aggregate(newer) is older
    assert older.data[REQUESTS] == {"grafted": 5, "off": 1}
    assert older.data[STAGES] == {"align": [0.002, 0.5, 1.0]}
    assert older.data[POOL] == {"used": 2, "free": 9}
    assert newer.data == before


COUNTS = st.dictionaries(
    st.sampled_from(["grafted", "miss", "off"]), st.integers(1, 99), min_size=1
)
TIMES = st.dictionaries(
    st.sampled_from(["align", "dense"]), st.lists(st.floats(0, 9), min_size=1), min_size=1
)
PAYLOADS = st.lists(
    st.fixed_dictionaries({}, optional={REQUESTS: COUNTS, STAGES: TIMES}), max_size=6
)


@given(PAYLOADS)
def test_nothing_is_lost_in_any_sequence_of_payloads(payloads: list[dict[str, Any]]):
    total = Stats()
    for data in payloads:
        total.aggregate(Stats(data=msgspec.to_builtins(data)))
    for label in ("grafted", "miss", "off"):
        expected = sum(data.get(REQUESTS, {}).get(label, 0) for data in payloads)
        assert total.data.get(REQUESTS, {}).get(label, 0) == expected
    for label in ("align", "dense"):
        expected = [seconds for data in payloads for seconds in data.get(STAGES, {}).get(label, [])]
        assert total.data.get(STAGES, {}).get(label, []) == expected


def test_the_log_line_has_one_number_for_each_label():
    assert payload().reduce() == {
        "requests_total[grafted]": 2,
        "tokens_total[fresh]": 40,
        "stage_seconds[align]": pytest.approx(0.251),
        "pool_blocks[used]": 7,
        "pinned_documents": 3,
    }


def test_payloads_survive_the_way_to_the_front_end():
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(payload().to_dict()))
    assert KVGraftConnector.build_kv_connector_stats(sent).data == payload().data


def test_vllms_own_logger_adds_and_prints_our_payloads():
    logging, lines = KVConnectorLogging(config().kv_transfer_config), []
    for _ in range(3):
        logging.observe(payload().to_dict())
    logging.log(lambda *parts: lines.append(parts[0] % parts[1:]))
    logging.log(lambda *parts: lines.append("twice"))
    [line] = lines
    assert "requests_total[grafted]=6" in line
    assert "pool_blocks[used]=7" in line


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> PromMetrics:
    return make_metrics(registry, engines=1)


def make_metrics(registry: CollectorRegistry, engines: int) -> PromMetrics:
    """Metrics as vLLM asks for them, except that they do not go to the registry of the process."""
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    values = {engine: ["m", str(engine)] for engine in range(engines)}
    made = KVGraftConnector.build_prom_metrics(config(), kinds, ["model_name", "engine"], values)
    assert isinstance(made, PromMetrics)
    return made


def test_what_may_be_counted_is_there_from_the_start(registry: CollectorRegistry):
    """An alert sees the first event only if there was a 0 before."""
    make_metrics(registry, engines=2)
    for name, metric in METRICS.items():
        assert bool(metric.values) == (metric.kind is Counter and metric.label is not None)
        for engine, value in product("01", metric.values):
            labels = {"model_name": "m", "engine": engine, metric.label: value}
            assert registry.get_sample_value(name, labels) == 0


def test_everything_that_a_store_counts_is_named_and_documented():
    """In its code names of events stand as strings beside the counts."""
    sources = "".join(path.read_text() for path in Path(store.__file__).parent.glob("*.py"))
    counted = set(
        re.findall(r'(?:_counts\[|_count\(|_failed\(|return \(?\s*|hits = )"([a-z_]+)"', sources)
    )
    assert {"stored", "write_failed", "shared_gone", "shared_late", "ram_hits"} <= counted
    assert counted - {"exact", "similar"} <= EVENTS.keys()
    documented = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert all(f"`{event}`" in documented for event in EVENTS)


def test_prometheus_shows_counters_gauges_and_histograms(
    registry: CollectorRegistry, metrics: PromMetrics
):
    for _ in range(2):
        metrics.observe(payload().to_dict())
    value = registry.get_sample_value
    assert value(REQUESTS, LABELS | {"outcome": "grafted"}) == 4
    assert value("kvgraft:tokens_total", LABELS | {"kind": "fresh"}) == 80
    assert value(POOL, LABELS | {"state": "used"}) == 7
    assert value("kvgraft:pinned_documents", LABELS) == 3
    stage = LABELS | {"stage": "align"}
    assert value(f"{STAGES}_count", stage) == 4
    assert value(f"{STAGES}_sum", stage) == pytest.approx(1.004)
    assert value(f"{STAGES}_bucket", stage | {"le": "0.0025"}) == 2
    assert value(f"{STAGES}_bucket", stage | {"le": str(BUCKETS[-1])}) == 4
    assert value(REQUESTS, LABELS | {"outcome": "miss"}) == 0


def test_engines_are_told_apart(registry: CollectorRegistry):
    metrics = make_metrics(registry, engines=2)
    metrics.observe(payload().to_dict(), engine_idx=1)
    assert registry.get_sample_value(REQUESTS, LABELS | {"outcome": "grafted"}) == 0
    assert registry.get_sample_value(REQUESTS, LABELS | {"outcome": "grafted", "engine": "1"}) == 2


def test_every_metric_is_exposed_under_its_own_name(
    registry: CollectorRegistry, metrics: PromMetrics
):
    for name, metric in METRICS.items():
        metrics.observe(
            {name: {"x" if metric.label else "": [0.1] if metric.kind is Histogram else 1}}
        )
        shown = f"{name}_count" if metric.kind is Histogram else name
        own = {metric.label: "x"} if metric.label else {}
        assert registry.get_sample_value(shown, LABELS | own) == 1
        assert name.startswith("kvgraft:")
        assert metric.help
    assert {metric.label for metric in METRICS.values()} == {
        "of",
        "outcome",
        "kind",
        "reason",
        "event",
        "stage",
        "state",
        None,
    }


def test_no_label_names_a_tenant():
    assert not {metric.label for metric in METRICS.values()} & {
        "tenant",
        "namespace",
        "key",
        "user",
        "salt",
    }


@pytest.fixture
def _clean_registry() -> Iterator[None]:
    """Take away what a test leaves in the registry of the process, which vLLM uses."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


@pytest.mark.usefixtures("_clean_registry")
def test_a_second_engine_in_one_process_gets_its_metrics():
    """vLLM takes its own metrics of an earlier engine out of the registry; ours are not among
    them."""
    for _ in range(2):
        prom = KVConnectorProm(config(), ["model_name", "engine"], {0: ["m", "0"]})
        prom.observe(payload().to_dict())
    assert REGISTRY.get_sample_value(REQUESTS, LABELS | {"outcome": "grafted"}) == 2
