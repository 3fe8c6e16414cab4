"""Near-duplicates in the native engine: what is found, what partial-layer reuse computes, and when
it gives up."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvgraft import Engine, Policy, Request, RequestError, Result, SamplingParams
from kvgraft.policies import Full, Naive, Similar, SparseX
from kvgraft_lab.evaluate.recording import PrefillRecord, Recorded
from models import VOCAB_SIZE

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def shared(model_dirs: dict[str, Path]) -> Engine:
    return Engine(
        model_dirs["qwen3"],
        dtype="float32",
        match="similar:tau=0.3,window_tokens=64",
        residual_layers=(1, 2, 3),
        poison_dropped_pages=True,
    )


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.clear_cache()
    return shared


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def ask(engine: Engine, prompt: list[int], policy: Policy | str, **fields: object) -> Result:
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    return engine.generate([Request(prompt, policy, sampling, return_logits=True, **fields)])[0]  # type: ignore[arg-type]


def truth(engine: Engine, prompt: list[int]) -> torch.Tensor:
    return ask(engine, prompt, "full", namespace="nobody else", remember=False).first_logits  # type: ignore[return-value]


def difference(result: Result, expected: torch.Tensor) -> float:
    return float((result.first_logits - expected).abs().max())  # type: ignore[operator]


def edited(known: list[int], every: int = 20) -> list[int]:
    """Every so many-th token replaced by another."""
    return [
        (token + 1) % VOCAB_SIZE if place % every == every - 1 else token
        for place, token in enumerate(known)
    ]


def test_near_duplicates_are_grafted_where_exact_matching_finds_little(engine: Engine):
    known = tokens(200, 1)
    ask(engine, known, "full")
    prompt = tokens(9, 2) + edited(known) + tokens(5, 3)
    exact = ask(engine, prompt, "naive", match="exact", remember=False).report.grafted_tokens
    similar = ask(engine, prompt, "naive", match="similar", remember=False).report.grafted_tokens
    assert exact <= 100 < 160 <= similar
    assert ask(engine, prompt, "naive", namespace="b", remember=False).report.grafted_tokens == 0
    engine.check()


def test_edited_tokens_are_computed_and_the_rest_reads_its_source(engine: Engine):
    known = tokens(200, 1)
    ask(engine, known, "full")
    prompt = tokens(9, 2) + edited(known)
    record = PrefillRecord()
    ask(engine, prompt, Recorded(Naive(), record), remember=False)
    assert record.plan is not None
    wrong = [place for place in range(200) if known[place] != edited(known)[place]]
    assert not record.plan.grafted[[9 + place for place in wrong]].any()
    assert (
        difference(
            ask(engine, prompt, SparseX(recompute_share=1.0), remember=False), truth(engine, prompt)
        )
        < TOLERANCE
    )


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_reuse_computes_upper_layers_and_halos(engine: Engine, exit_layer: int):
    known = tokens(96, 1)
    ask(engine, known, "full")
    prompt, record = tokens(9, 2) + known + tokens(5, 3), PrefillRecord()
    ask(
        engine,
        prompt,
        Recorded(Similar(reused_layers=exit_layer, halo_tokens=8, probe_tokens=0), record),
        remember=False,
    )
    assert record.plan is not None
    grafted = record.plan.grafted.nonzero()[:, 0]
    inside = torch.zeros(len(prompt), dtype=torch.bool)
    inside[grafted[8:-8]] = True
    assert int(inside.sum()) >= 60
    for layer in range(4):
        assert torch.equal(
            record.computed[layer], ~inside if layer < exit_layer else torch.ones_like(inside)
        )


def test_the_residual_stream_is_that_of_the_source(engine: Engine):
    """Text in its own context, at another position: reuse is exact but for rounding. What is stored
    is what is read."""
    known = tokens(96, 1)
    ask(engine, tokens(7, 5), "full")
    ask(engine, known, "full")
    prompt = known + tokens(5, 3)
    engine.memory.pool._page_by_hash.clear()  # so that it is no prefix hit
    engine.memory.pool._hash_by_page.clear()
    policy = Similar(reused_layers=2, halo_tokens=4)
    result = ask(engine, prompt, policy, remember=False)
    assert result.report.grafted_tokens >= 90
    assert result.report.counts["probed_segments"] == 1
    assert not result.report.counts["rejected_segments"]
    assert difference(result, truth(engine, prompt)) < TOLERANCE
    engine.memory.cache.residuals[2][:] += 1.0
    assert (
        difference(
            ask(engine, prompt, Similar(reused_layers=2, probe_tokens=0), remember=False),
            truth(engine, prompt),
        )
        > 0.01
    )


def test_generated_text_has_a_residual_stream_too(engine: Engine):
    prompt = tokens(40, 1)
    first = engine.generate(
        [Request(prompt, "full", SamplingParams(max_tokens=80, ignore_eos=True))]
    )[0]
    result = ask(
        engine,
        tokens(7, 2) + first.token_ids,
        Similar(reused_layers=2, halo_tokens=2, probe_tokens=0),
    )
    assert result.report.grafted_tokens >= 64
    assert result.report.fallback is None


def test_non_finite_residuals_are_rejected_by_the_probe_and_without_it_computed_in_full(
    engine: Engine,
):
    known, prompt = tokens(96, 1), tokens(9, 2) + tokens(96, 1) + tokens(5, 3)
    ask(engine, known, "full")
    expected = truth(engine, prompt)
    engine.memory.cache.residuals[2][:] = float("nan")
    probed = ask(engine, prompt, Similar(reused_layers=2), remember=False)
    assert probed.report.counts["rejected_segments"] == 1
    unprobed = ask(engine, prompt, Similar(reused_layers=2, probe_tokens=0), remember=False)
    assert unprobed.report.fallback == "non_finite"
    for result in (probed, unprobed):
        assert difference(result, expected) < TOLERANCE


def test_the_probe_rejects_what_depends_on_its_context(engine: Engine):
    known, prompt = tokens(96, 1), tokens(60, 2) + tokens(96, 1) + tokens(5, 3)
    ask(engine, known, "full")
    count, expected = engine.memory.fallbacks["probe"], truth(engine, prompt)
    divergences = {}
    for max_kl in (0.0, 1e-6, 100.0):
        result = ask(engine, prompt, Similar(reused_layers=2, max_kl=max_kl), remember=False)
        divergences[max_kl] = difference(result, expected)
        assert bool(result.report.counts["rejected_tokens"]) == (max_kl < 1)
    assert divergences[0.0] < TOLERANCE < divergences[100.0]
    assert engine.memory.fallbacks["probe"] == count + 2


def test_shallow_layers_of_sparsex_need_not_run_known_text(engine: Engine):
    known, prompt = tokens(96, 1), tokens(9, 2) + tokens(96, 1) + tokens(5, 3)
    ask(engine, known, "full")
    records = {shallow: PrefillRecord() for shallow in ("all", "fresh")}
    for shallow, record in records.items():
        ask(
            engine,
            prompt,
            Recorded(SparseX(boundary_layers=2, shallow=shallow), record),
            remember=False,
        )  # type: ignore[arg-type]
    fresh, all_of_it = records["fresh"].computed, records["all"].computed
    assert all_of_it[0].all()
    assert int(fresh[:2].sum()) == 2 * (len(prompt) - int(records["fresh"].plan.grafted.sum()))  # type: ignore[union-attr]
    assert 0 < int(fresh[2].sum()) < len(prompt)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"match": "close"}, "match must be one of exact, similar, got 'close'"),
        ({"match": "similar"}, "only identical text is known here, make the engine with match"),
        ({"policy": "similar:reused_layers=1"}, "enters layer 1 is not kept"),
        ({"policy": "sparsex:boundary_layers=2,shallow=fresh"}, "enters layer 2 is not kept"),
    ],
)
def test_what_the_engine_does_not_keep_is_refused(
    model_dirs: dict[str, Path], fields: dict[str, str], message: str
):
    engine = Engine(model_dirs["llama"], dtype="float32", num_pages=16)
    with pytest.raises(RequestError, match=message):
        engine.generate([Request(tokens(20, 1), **fields)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residual_layers"):
        Engine(model_dirs["llama"], num_pages=16, residual_layers=(7, -1))


def test_the_policy_of_the_engine_says_what_is_kept(model_dirs: dict[str, Path]):
    engine = Engine(
        model_dirs["llama"], dtype="float32", policy="similar:reused_layers=1,halo_tokens=2"
    )
    assert list(engine.memory.cache.residuals) == [1]
    known = tokens(200, 1)
    ask(engine, known, Full())
    result = engine.generate([Request(edited(known), sampling=SamplingParams(1))])[0]
    assert result.report.policy == "similar"
    assert result.report.grafted_tokens > 0


def test_policies_that_requests_may_name_are_prepared_for(model_dirs: dict[str, Path]):
    named = ["naive", "similar:reused_layers=1", "sparsex:boundary_layers=2,shallow=fresh"]
    engine = Engine(model_dirs["llama"], dtype="float32", policies=named)
    assert list(engine.memory.cache.residuals) == [1, 2]
    assert engine.index.segments.similar is not None
    known = tokens(200, 1)
    ask(engine, known, Full())
    for policy in named:
        assert ask(engine, edited(known), policy, remember=False).report.grafted_tokens > 0
    assert (
        Engine(model_dirs["llama"], dtype="float32", policies=["naive"]).index.segments.similar
        is None
    )


def test_each_report_counts_its_own_prompt(engine: Engine):
    """Also of prompts that are recovered together."""
    policy, texts = "similar:reused_layers=1,max_kl=0.0", [tokens(200, seed) for seed in range(3)]
    for known in texts:
        ask(engine, known, "full")
    prompts = [
        tokens(9, 10) + edited(texts[0]),
        tokens(9, 11) + edited(texts[1]) + texts[2],
        tokens(9, 12) + texts[0],
    ]
    requests = [
        Request(prompt, policy, SamplingParams(max_tokens=1), remember=False) for prompt in prompts
    ]
    alone = [engine.generate([request])[0].report for request in requests]
    together = [result.report for result in engine.generate(requests)]
    names = ("probed_segments", "rejected_segments", "rejected_tokens")
    counted = [{name: report.counts[name] for name in names} for report in alone]
    assert [{name: report.counts[name] for name in names} for report in together] == counted
    assert all(min(counts.values()) > 0 for counts in counted)
    assert counted[0] != counted[1]
