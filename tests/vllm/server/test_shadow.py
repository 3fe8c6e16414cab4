"""A server in shadow mode: exact answers, and what grafting would have made of them."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from running import ADMIN, ALICE, BOB, RunningServer, running
from test_guard import complete, painted, scored
from test_server import elsewhere

pytestmark = pytest.mark.slow
ARGUMENTS = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--kvgraft-costs", "tokens"]
GUARD = ["--kvgraft-guard", "1.0", "--kvgraft-guard-tokens", "1000000"]


@pytest.fixture(scope="module")
def shadowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("shadowing") / "log"
    environment = {**os.environ, "KVGRAFT_ADMIN_KEY": ADMIN}
    with running([*ARGUMENTS, *GUARD, "--kvgraft-mode", "shadow"], log, environment) as started:
        yield started


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("live") / "log"
    with running([*ARGUMENTS, *GUARD], log, {**os.environ, "KVGRAFT_ADMIN_KEY": ADMIN}) as started:
        yield started


@pytest.mark.parametrize("policy", ["naive", "spread"])
def test_what_it_says_is_what_a_live_server_does(
    shadowing: RunningServer, live: RunningServer, policy: str
):
    here = f"as if {policy}"
    document, prompt = painted(here)
    for server in (shadowing, live):
        complete(server, document, namespace=here)
    exact, would = complete(shadowing, prompt, namespace=here, policy=policy)
    tokens = exact.choices[0].model_extra["token_ids"]
    _, did = complete(live, prompt, namespace=here, policy=policy, forced_output=tokens)
    assert (would["outcome"], would["reason"], would["grafted_tokens"]) == ("miss", "shadow", 0)
    assert would["shadow_graftable_tokens"] == did["grafted_tokens"] > 500
    assert (would["estimated_full_s"], would["estimated_reuse_s"]) == (
        did["estimated_full_s"],
        did["estimated_reuse_s"],
    )
    assert (did["shadow_graftable_tokens"], did["guard"], would["guard"]) == (
        0,
        "pending",
        "pending",
    )
    found, truth = (scored(server, ALICE)[0]["scored"] for server in (shadowing, live))
    assert found == pytest.approx(truth, abs=0.1)  # bfloat16
    assert (found["answer_kl"] > 0.05) == (policy == "naive")


def test_documents_are_not_kept_in_part(shadowing: RunningServer, texts: Any):
    document, here = texts.document(), "in part"
    complete(shadowing, document, namespace=here)
    kept, report = complete(
        shadowing,
        elsewhere(document),
        namespace=here,
        policy="condense",
        kept_share=0.25,
        quality="fast",
    )
    assert (report["outcome"], report["reason"], report["kept_tokens"]) == ("miss", "shadow", None)
    assert kept.usage.prompt_tokens == report["prompt_tokens"] == report["fresh_tokens"]
    whole, _ = complete(shadowing, elsewhere(document), namespace=here, quality="exact")
    assert kept.choices[0].text == whole.choices[0].text


def test_nothing_that_is_tried_is_left(shadowing: RunningServer, texts: Any):
    document, here = texts.document(), "left"
    complete(shadowing, document, namespace=here)
    complete(shadowing, elsewhere(document), namespace=here)
    entries = shadowing.status(ADMIN)["index_entries"]
    scored(shadowing, ALICE)
    assert shadowing.status(ADMIN)["index_entries"] == entries
    _, again = complete(shadowing, elsewhere(document), namespace=here)
    assert (again["outcome"], again["depth"], again["shadow_graftable_tokens"]) == (
        "prefix_only",
        0,
        0,
    )


def test_tenants_are_apart(shadowing: RunningServer, texts: Any):
    document = texts.document()
    complete(shadowing, document)
    _, report = complete(shadowing, elsewhere(document), BOB)
    assert (report["reason"], report["shadow_graftable_tokens"]) == ("no_known_text", 0)


def test_metrics_add_up(shadowing: RunningServer, texts: Any):
    def total(name: str) -> float:
        with shadowing.http(ADMIN) as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"kvgraft:{name}")
        )

    document, here = texts.document(), "sums"
    before = {
        name: total(name)
        for name in ("shadow_graftable_tokens_total", "shadow_saved_seconds_total")
    }
    complete(shadowing, document, namespace=here)
    _, report = complete(shadowing, elsewhere(document), namespace=here)
    scored(shadowing, ALICE)
    assert (
        total("shadow_graftable_tokens_total") - before["shadow_graftable_tokens_total"]
        == report["shadow_graftable_tokens"]
    )
    expected = report["estimated_full_s"] - report["estimated_reuse_s"]
    assert total("shadow_saved_seconds_total") - before[
        "shadow_saved_seconds_total"
    ] == pytest.approx(expected)
    assert total('requests_total{engine="0",model_name="bundled",outcome="grafted"') == 0
