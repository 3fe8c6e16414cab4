import json
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import routing
from kvgraft.fleet.figures import Figures
from kvgraft.server.process import running


def samples(registry: CollectorRegistry) -> list:
    text = generate_latest(registry).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_a_standin_waits_for_what_is_new(tmp_path: Path):
    words = " ".join(f"word{number}" for number in range(320))
    arguments = [
        "--pool",
        "640",
        "--speed",
        "1000",
        "--disable-access-log-for-endpoints",
        "/health,/metrics",
    ]
    with (
        running(arguments, {}, tmp_path / "log", program=routing.STANDIN) as server,
        httpx.Client() as client,
    ):
        asked = {"model": "stand-in", "prompt": words, "max_tokens": 2, "stream": True}
        told = []
        for _ in range(2):
            answer = client.post(f"{server.api}/completions", json=asked)
            first, second, done = answer.text.strip().split("\n\n")
            assert answer.headers["content-type"] == "text/event-stream"
            assert (json.loads(second.removeprefix("data: "))["choices"], done) != ([], "")
            told.append(json.loads(first.removeprefix("data: ")))
        whole = client.post(f"{server.api}/completions", json={**asked, "stream": False}).json()
        metrics = client.get(f"{server.url}/metrics").text
    assert told[0]["waited_s"] > 0.31
    assert [event["usage"]["known_tokens"] for event in (*told, whole)] == [0, 320, 320]
    found = {
        s.name: s for family in text_string_to_metric_families(metrics) for s in family.samples
    }
    assert found["vllm:prompt_tokens_total"].value == 960
    assert found["vllm:cache_config_info"].labels == {"block_size": "16", "num_gpu_blocks": "40"}


def test_what_was_before_does_not_count():
    figures = Figures()
    for part in ("fingerprints", "ranking"):
        figures.routing.labels(part).observe(0.2)
    figures.routed.labels("load").inc()
    before = samples(figures.registry)
    for _ in range(100):
        figures.routed.labels("text").inc()
        figures.routing.labels("fingerprints").observe(0.0009)
        figures.routing.labels("ranking").observe(0.0003)
    found = routing.counted_since(before, samples(figures.registry))
    through = [routing.Sent(0.010, 100, 50), routing.Sent(0.012, 100, 0), None]
    straight = [
        routing.Sent(0.001, 100, 0),
        routing.Sent(0.002, 100, 0),
        routing.Sent(0.002, 100, 0),
    ]
    row = routing.row_of(2, through, straight, found)
    assert (row.requests, row.failed, row.tokens, row.known) == (2, 1, 100, 0.25)
    assert row.routed == {"load": 0.0, "text": 100.0, "error": 0.0}
    assert row.both_mean_ms == pytest.approx(1.2)
    assert row.routing_ms["fingerprints"].p99 == pytest.approx(0.9975)
    assert row.routing_ms["ranking"].p50 == pytest.approx(0.3125)
    assert row.both_p99_ms < 1.5
    assert row.added_ms.median == pytest.approx(9.5)
