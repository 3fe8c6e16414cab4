"""`kvgraft serve --data-parallel-size 2`: prompts go to the engine that has read their text, and
what is pinned is pinned in both."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import TWO_RANKS
from prometheus_client.parser import text_string_to_metric_families
from running import ADMIN, ALICE, BOB, RunningServer, running
from test_server import elsewhere

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, one for each engine"),
]
SCORE_S = 120.0


def start(log: Path, *flags: str) -> Any:
    """A server with two engines, one core each."""
    arguments = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--data-parallel-size", "2"]
    environment = {**os.environ, **TWO_RANKS, "KVGRAFT_ADMIN_KEY": ADMIN}
    return running([*arguments, "--kvgraft-costs", "tokens", *flags], log, environment)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with start(tmp_path_factory.mktemp("server") / "log", "--kvgraft-guard", "1.0") as started:
        yield started


def ask(
    server: RunningServer,
    key: str,
    prompt: str,
    engine: int | None = None,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    """The answer and the report, from this engine or the one that the server chooses."""
    headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
    answer = server.openai(key).completions.create(
        model="bundled",
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        extra_body={"kv_transfer_params": {"kvgraft": options}},
        extra_headers=headers,
    )
    return answer.choices[0].text, (answer.model_extra or {})["kv_transfer_params"]["kvgraft"]


def test_prompts_go_to_the_engine_that_has_read_their_text(server: RunningServer, texts: Any):
    documents = [texts.document() for _ in range(4)]
    homes = [ask(server, ALICE, document)[1]["engine"] for document in documents]
    assert set(homes) == {0, 1}, "new text fills both pools"
    for document, home in zip(documents, homes, strict=True):
        _, report = ask(server, ALICE, elsewhere(document))
        assert report["engine"] == home
        assert report["grafted_tokens"] >= 500
        _, report = ask(server, BOB, elsewhere(document))
        assert report["grafted_tokens"] == 0


def test_an_engine_knows_only_what_it_has_read_and_answers_are_exact_in_both(
    server: RunningServer, texts: Any
):
    document = texts.document()
    ask(server, ALICE, document, engine=1)
    full, _ = ask(server, ALICE, elsewhere(document), engine=0, reuse="off")
    for engine, grafts in ((0, False), (1, True)):
        text, report = ask(
            server,
            ALICE,
            elsewhere(document),
            engine=engine,
            policy="sparsex",
            recompute_share=1.0,
        )
        assert (report["engine"], report["grafted_tokens"] > 0) == (engine, grafts)
        assert text == full


def test_many_prompts_at_once_use_both_engines(server: RunningServer, texts: Any):
    """Prompts of one request, with answers so long that all of them run together."""
    document = texts.document()
    ask(server, ALICE, document, engine=0)
    prompts = [f"{document} {texts.document(64)}" for _ in range(12)]
    answer = server.openai(ALICE).completions.create(
        model="bundled", prompt=prompts, max_tokens=400, extra_body={"ignore_eos": True}
    )
    reports = (answer.model_extra or {})["kv_transfer_params"]["kvgraft"]
    assert len(reports) == len(prompts)
    assert {report["engine"] for report in reports} == {0, 1}


def test_a_pinned_document_is_known_in_both_engines(server: RunningServer, texts: Any):
    document, label = texts.document(), str(server.status(ALICE)["view"]["tenant"])
    with server.http(ADMIN) as admin:
        body = {"name": "manual", "text": document, "tenant": label}
        answer = admin.post("/v1/kvgraft/pins", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["pin"]["num_blocks"] >= 16

        for engine in (0, 1):
            _, report = ask(server, ALICE, elsewhere(document), engine=engine)
            assert report["grafted_tokens"] >= 500
        where = {"tenant": label}
        [pin] = admin.get("/v1/kvgraft/pins", params=where).json()["pins"]
        assert pin["hits"] >= 2, "one in each engine"
        answer = admin.delete("/v1/kvgraft/pins/manual", params=where)
        assert (answer.status_code, answer.json()["num_pins"]) == (200, 0)
        assert admin.delete("/v1/kvgraft/pins/manual", params=where).status_code == 404


def test_the_guard_scores_answers_of_both_engines(server: RunningServer, texts: Any):
    documents = [texts.document() for _ in range(2)]
    for engine, document in enumerate(documents):
        ask(server, BOB, document, engine=engine)
        _, report = ask(server, BOB, elsewhere(document), engine=engine)
        assert report["guard"] == "pending"
    deadline = time.monotonic() + SCORE_S
    while True:
        pending = [one for one in server.status(BOB)["recent"] if one["guard"] == "pending"]
        if all(one["scored"] for one in pending):
            break
        assert time.monotonic() < deadline, "not scored in time"
        time.sleep(0.2)


def test_metrics_name_the_engine_and_the_status_sums(server: RunningServer, texts: Any):
    with server.http(ALICE) as client:
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    samples = [
        sample
        for family in families
        for sample in family.samples
        if sample.name == "kvgraft:requests_total"
    ]
    by_engine = {
        engine: sum(one.value for one in samples if one.labels["engine"] == engine)
        for engine in ("0", "1")
    }
    assert min(by_engine.values()) > 0
    pool = server.status(ADMIN)["pool"]
    assert pool["used"] + pool["free"] > 0


def test_an_engine_finds_what_another_has_stored(tmp_path: Path, texts: Any):
    document = texts.document()
    with start(tmp_path / "log", "--kvgraft-store-dir", str(tmp_path / "store")) as server:
        ask(server, ALICE, document, engine=0)
        deadline = time.monotonic() + 60.0
        while sum(1 for _ in (tmp_path / "store").rglob("*.safetensors")) < 2:
            assert time.monotonic() < deadline, "the document was not written"
            time.sleep(0.1)
        ask(server, ALICE, texts.document(), engine=1)  # a step, in which it looks
        _, report = ask(server, ALICE, elsewhere(document), engine=1)
        assert report["engine"] == 1
        assert report["grafted_tokens"] >= 500
