"""With every answer scored, what is exact is what plain vLLM says, in float32; also on KV computed
to score, and beside a store, shared namespaces and text that is read anew."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import ADMIN, ALICE, BOB, RunningServer, running
from test_conversations import WANT_EXACT, Conversation, check_that_nobody_else_goes_on, share
from test_guard import LENGTH, complete, painted, scored, told

from kvgraft.engine.text import load_tokenizer
from kvgraft_lab.testbed import MODEL_DIR

pytestmark = pytest.mark.slow
SERVE = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--dtype", "float32"]
GUARD = ["--kvgraft-costs", "tokens", "--kvgraft-guard", "1.0", "--kvgraft-guard-tokens", "1000000"]
BESIDE = ["--kvgraft-idle-refresh", "1.0", "--kvgraft-share", "wiki=*"]
TOLERANCE = 1e-3  # nats


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("guarded")
    arguments = [*SERVE, *GUARD, *BESIDE, "--kvgraft-store-dir", str(folder / "store")]
    with running(arguments, folder / "log", {**os.environ, "KVGRAFT_ADMIN_KEY": ADMIN}) as started:
        yield started


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(
        [*SERVE, "--no-kvgraft"], tmp_path_factory.mktemp("plain") / "log", {**os.environ}
    ) as started:
        yield started


def answered(
    server: RunningServer, prompt: str | list[int], key: str = ALICE, **options: Any
) -> Any:
    """A greedy completion with log-probabilities, which is never scored."""
    extra = {"kv_transfer_params": {"kvgraft": options}} if options else {}
    return server.openai(key).completions.create(
        model="bundled", prompt=prompt, max_tokens=LENGTH, temperature=0, logprobs=5,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True, **extra},
    )  # fmt: skip


def assert_equal(ours: Any, theirs: Any) -> None:
    assert ours.choices[0].text == theirs.choices[0].text
    for here, there in zip(told(ours), told(theirs), strict=True):
        assert here == pytest.approx(there, abs=TOLERANCE)


@pytest.mark.parametrize("policy", ["spread", "sparsex", "transitive"])
def test_everything_recomputed_is_what_plain_vllm_says_and_scored_as_such(
    guarded: RunningServer, plain: RunningServer, policy: str
):
    here = {"namespace": f"all {policy}"}
    document, prompt = painted(f"all {policy}")
    complete(guarded, document, **here)
    everything = {"policy": policy, "recompute_share": 1.0}
    _, report = complete(guarded, prompt, **here, **everything)
    assert (report["outcome"], report["guard"]) == ("grafted", "pending")
    found = scored(guarded, ALICE)[0]["scored"]
    assert found["flips"] == 0
    assert found["answer_kl"] < TOLERANCE
    assert abs(found["loglik"]) < TOLERANCE
    assert_equal(answered(guarded, prompt, namespace=f"again {policy}"), answered(plain, prompt))


def test_exact_prefixes_that_were_computed_to_score_are_what_plain_vllm_says(
    guarded: RunningServer, plain: RunningServer
):
    here = {"namespace": "scored"}
    for number in range(3):
        document, prompt = painted(f"prefix {number}", 700)
        complete(guarded, document, **here)
        _, report = complete(guarded, prompt, **here, policy="naive")
        assert report["guard"] == "pending"
        assert scored(guarded, ALICE)[0]["scored"]["answer_kl"] > TOLERANCE, (
            "what was grafted is not exact"
        )
        for longer in (prompt, f"{prompt} {document}"):
            for options in ({}, {"quality": "exact"}):
                answer = answered(guarded, longer, **here, **options)
                report = answer.model_extra["kv_transfer_params"]["kvgraft"]
                assert report["depth"] == 0 or not options
                if report["depth"] == 0:
                    assert report["prefix_tokens"] > 600
                    assert_equal(answer, answered(plain, longer))


@pytest.mark.soak
def test_conversations_of_two_tenants_are_scored_turn_by_turn(
    guarded: RunningServer, plain: RunningServer, texts: Any
):
    """Alice waits until her turn has been scored, and goes on with exact KV; Bob does not wait."""
    wiki = texts.document(300)
    share(guarded, "wiki", wiki)
    alice, bob = Conversation(ALICE), Conversation(BOB)
    private = {key: [texts.document(270) for _ in range(3)] for key in (ALICE, BOB)}
    for turn in range(3):
        for one, other in ((alice, BOB), (bob, ALICE)):
            before, text = len(one.tokens), private[one.key][turn]
            answered(guarded, load_tokenizer(MODEL_DIR).encode(text), one.key, reuse="off")
            one.say("the old river slept .", text)
            one.quote(wiki)
            one.say("question : code of lamp ? answer :")
            report = one.listen(guarded)
            assert (report["outcome"], report["guard"]) == ("grafted", "pending")
            assert report["prefix_tokens"] + report["continued_tokens"] > before - 64
            if one is alice:
                assert (report["continued_tokens"], report["depth"]) == (0, 1), (
                    "only this turn is approximate"
                )
                scored(guarded, ALICE)
            check_that_nobody_else_goes_on(guarded, one, other)
    for one in (alice, bob):
        scored(guarded, one.key)
        for options in WANT_EXACT:
            assert_equal(
                answered(guarded, one.tokens, one.key, **options), answered(plain, one.tokens)
            )


def test_beside_a_flow_only_what_reuse_changes_is_scored(tmp_path: Path):
    arguments = [*SERVE, *GUARD, "--kvgraft-flow", "quest:topk_blocks=4"]
    with running(arguments, tmp_path / "log", {**os.environ, "KVGRAFT_ADMIN_KEY": ADMIN}) as server:
        for policy, is_exact in (
            ({"policy": "naive"}, False),
            ({"policy": "spread", "recompute_share": 1.0}, True),
        ):
            document, prompt = painted(f"flow {is_exact}")
            complete(server, document)
            assert complete(server, prompt, **policy)[1]["outcome"] == "grafted"
            assert (scored(server, ALICE)[0]["scored"]["answer_kl"] < TOLERANCE) == is_exact
