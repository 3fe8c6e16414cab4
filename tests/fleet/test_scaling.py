"""A fleet of which no server is left while nobody asks."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fleets import ADMIN, Corpus, RunningFleet, ask, running_fleet

from kvgraft_lab.testbed import MODEL_DIR
from models import make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.soak]
SCALING = {
    "min_replicas": 0, "initial_replicas": 1, "max_replicas": 1, "target_ongoing_requests": 4,
    "upscale_delay_s": 0.5, "downscale_delay_s": 3.0, "metrics_interval_s": 0.5,
    "look_back_period_s": 2.0,
}  # fmt: skip


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RunningFleet]:
    arguments = ["--autoscaling", msgspec.json.encode(SCALING).decode(), "--enable-lora"]
    with running_fleet(
        arguments, tmp_path / "log", {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    ) as started:
        yield started


def test_what_was_pinned_and_loaded_is_there_when_somebody_asks_again(
    fleet: RunningFleet, tmp_path: Path
):
    adapter = {
        "lora_name": "terse",
        "lora_path": str(make_adapter(tmp_path / "terse", MODEL_DIR, seed=1)),
    }
    corpus = Corpus(0, 1)
    [first] = fleet.wait_for(1)
    with fleet.http() as client, fleet.http(ADMIN) as admin:
        assert admin.post("/v1/load_lora_adapter", json=adapter).status_code == 200
        tenant = client.get("/v1/kvgraft/status").json()["view"]["tenant"]
        segment = {"name": "law", "text": corpus.prompt(0)[0], "tenant": tenant}
        assert admin.post("/v1/kvgraft/pins", json=segment).status_code == 200
        before = ask(client, corpus.prompt(0), model="terse", max_tokens=8)
        fleet.wait_for(0)
        assert client.get("/-/healthz").status_code == 200  # Ray's: it wakes nobody
        time.sleep(3.0)
        assert fleet.replicas() == []
        assert admin.post("/v1/kvgraft/pins", json=segment).status_code == 503
        after = ask(client, corpus.prompt(0), model="terse", max_tokens=8)
        assert (before.status, after.status) == (200, 200)
        assert after.text == before.text
        [second] = fleet.wait_for(1)
        assert second["name"] != first["name"]
        assert ask(client, corpus.prompt(0, turned=True)).report["grafted_tokens"] > 400
        assert fleet.total("kvgraft:pinned_documents") == 1
