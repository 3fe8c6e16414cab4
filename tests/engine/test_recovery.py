"""What must hold for every policy: recomputing everything is exact, grafts read their source,
nothing leaks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft import Engine, Policy, Request, RequestError, Result, SamplingParams
from kvgraft.core.matches import MatchQuery, grafted_tokens
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.policies import (
    CacheBlend,
    Epic,
    Full,
    Naive,
    Prophet,
    RedKnot,
    Similar,
    SparseX,
    Spread,
    Transitive,
)
from kvgraft.prefill.context import Hidden, PrefillContext
from models import FAMILIES, VOCAB_SIZE, make_head_map
from properties import examples

TOLERANCE = 1e-4  # logits of order 5 in float32
EVERYTHING = [
    *(SparseX(boundary_layers=b, recompute_share=1.0) for b in (0, 1, 2, 99)),
    SparseX(boundary_layers=1, recompute_share=1.0, rows="question", reduction="max", unit="block"),
    Epic(start_tokens=10_000),
    *(CacheBlend(check_layer=layer, recompute_share=1.0) for layer in (0, 1, 99)),
    Prophet(recompute_share=1.0),
    *(
        Transitive(probe_layers=probe, recompute_share=1.0, hops=hops)
        for probe, hops in ((0, 2), (1, 1), (99, 0))
    ),
    *(
        Spread(score_layer=layer, recompute_share=1.0, hops=hops)
        for layer, hops in ((0, 0), (1, 2), (98, 0))
    ),
    Spread(start_tokens=10_000, start_share=1.0, recompute_share=0.0, spread_share=1.0),
    *(
        RedKnot(dense_layers=layers, mass_share=1.0, windows="off", reuse="off")
        for layers in (0, 1, 99)
    ),
    Similar(reused_layers=0),
    Similar(reused_layers=1, halo_tokens=10_000),
    Similar(reused_layers=2, halo_tokens=3, probe_tokens=2, max_kl=0.0),
]
APPROXIMATE = [
    Naive(),
    Epic(),
    CacheBlend(),
    Prophet(),
    SparseX(boundary_layers=0),
    SparseX(boundary_layers=1),
    SparseX(boundary_layers=1, rows="question", reduction="max", unit="block"),
    Transitive(),
    Spread(),
    RedKnot(recent_tokens=8, min_ffn_tokens=4),
    RedKnot(
        dense_layers=0,
        mass_share=0.2,
        recent_tokens=0,
        min_ffn_tokens=0,
        edge_mass_share=0.01,
        reuse="off",
    ),
    SparseX(boundary_layers=1, shallow="fresh"),
    Similar(reused_layers=1, halo_tokens=2, probe_tokens=0),
    Similar(reused_layers=2, halo_tokens=4, max_kl=0.05),
]


@pytest.fixture(scope="module")
def engines(model_dirs: dict[str, Path]) -> dict[tuple[str, int], Engine]:
    return {
        (family, size): Engine(
            model_dirs[family],
            dtype="float32",
            block_size=size,
            head_map=make_head_map(model_dirs[family]),
            residual_layers=(0, 1, 2),
            poison_dropped_pages=True,
        )
        for family in FAMILIES
        for size in (16, 32)
    }


@pytest.fixture
def engine(engines: dict[tuple[str, int], Engine]) -> Engine:
    engine = engines["qwen3", 16]
    engine.clear_cache()
    return engine


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def ask(engine: Engine, prompt: list[int], policy: Policy, **fields: object) -> Result:
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    return engine.generate([Request(prompt, policy, sampling, return_logits=True, **fields)])[0]  # type: ignore[arg-type]


def truth(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Logits of full prefill without any cache."""
    result = ask(engine, prompt, Full(), namespace="nobody else", remember=False)
    assert (result.report.prefix_tokens, result.report.grafted_tokens) == (0, 0)
    return result.first_logits  # type: ignore[return-value]


def difference(a: Result | torch.Tensor, b: torch.Tensor) -> float:
    logits = a.first_logits if isinstance(a, Result) else a
    return float((logits - b).abs().max())  # type: ignore[operator]


def reads_deep_values(policy: Policy) -> bool:
    """Whether it trusts grafted values in upper layers."""
    return getattr(policy, "reuse", "on") == "on" and not isinstance(policy, Similar)


def test_full_prefill_equals_transformers(
    engines: dict[tuple[str, int], Engine], model_dirs: dict[str, Path]
):
    from transformers import AutoModelForCausalLM

    for family, directory in model_dirs.items():
        engine = engines[family, 16]
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        prompt = tokens(90, 1)
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        assert difference(truth(engine, prompt), expected) < TOLERANCE, family


@examples(60)
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_everything_is_full_prefill(
    engines: dict[tuple[str, int], Engine], family: str, data: st.DataObject
):
    check_recomputing_everything(engines, family, data)


@pytest.mark.soak
@settings(max_examples=500)
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_everything_is_full_prefill_at_length(
    engines: dict[tuple[str, int], Engine], family: str, data: st.DataObject
):
    check_recomputing_everything(engines, family, data)


def check_recomputing_everything(
    engines: dict[tuple[str, int], Engine], family: str, data: st.DataObject
) -> None:
    """Any interleaving: segments of any length, order and offset, repeats, exact prefixes, other
    namespaces."""
    engine = engines[family, data.draw(st.sampled_from([16, 32]), label="block size")]
    engine.clear_cache()
    segments = [
        tokens(data.draw(st.integers(1, 70)), seed) for seed in range(data.draw(st.integers(1, 4)))
    ]
    order = st.lists(st.integers(0, len(segments) - 1), min_size=1, max_size=5)

    def compose(seed: int, opening: list[int]) -> list[int]:
        parts = opening + [
            token
            for place, number in enumerate(data.draw(order))
            for token in tokens(data.draw(st.integers(0, 20)), 100 * seed + place)
            + segments[number]
        ]
        return (parts + tokens(data.draw(st.integers(0, 20)), 100 * seed + 99))[:400]

    opening = tokens(data.draw(st.sampled_from([0, 17, 40])), 7)
    for number in range(data.draw(st.integers(1, 3))):
        namespace = data.draw(st.sampled_from(["default", "default", "other"]))
        ask(engine, compose(number + 1, opening), Full(), namespace=namespace)
    prompt = compose(50, data.draw(st.sampled_from([opening, []])))
    policy = data.draw(st.sampled_from(EVERYTHING))
    result = ask(engine, prompt, policy)
    report = result.report
    assert report.prefix_tokens + report.grafted_tokens + report.fresh_tokens == len(prompt)
    assert report.recomputed_tokens == report.grafted_tokens
    assert difference(result, truth(engine, prompt)) < TOLERANCE
    engine.check()


@pytest.mark.parametrize("policy", [*APPROXIMATE, *EVERYTHING])
def test_mixed_batches_answer_as_alone(engine: Engine, policy: Policy):
    """Requests with and without reuse, with exact prefixes, and under several policies, in one
    step."""
    known = tokens(80, 1)
    ask(engine, known, Full())
    prompts = [
        tokens(5, 2) + known[20:] + tokens(6, 3),
        tokens(70, 4),
        known[:50] + tokens(9, 5),
        known,
    ]
    policies = [policy, policy, policy, Full()]
    alone = [ask(engine, p, q, remember=False) for p, q in zip(prompts, policies, strict=True)]
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    together = engine.generate(
        [
            Request(p, q, sampling, remember=False, return_logits=True)
            for p, q in zip(prompts, policies, strict=True)
        ]
    )
    for one, many in zip(alone, together, strict=True):
        assert difference(many, one.first_logits) < TOLERANCE  # type: ignore[arg-type]
        assert one.report.grafted_tokens == many.report.grafted_tokens
    assert together[0].report.grafted_tokens >= 48
    assert together[1].report.grafted_tokens == 0
    assert together[2].report.prefix_tokens == 48


def test_a_prompt_without_reuse_is_computed_bit_for_bit_as_in_full(engine: Engine):
    prompt = tokens(150, 1)
    for policy in (*APPROXIMATE, *EVERYTHING):
        assert torch.equal(
            ask(engine, prompt, policy, remember=False).first_logits, truth(engine, prompt)
        )  # type: ignore[arg-type]


def test_grafted_kv_is_approximate_and_recomputation_repairs_it(engine: Engine):
    known = tokens(160, 1)
    ask(engine, known, Full())
    prompt = tokens(30, 2) + known + tokens(10, 3)
    expected = truth(engine, prompt)
    naive, some, more, everything = (
        difference(ask(engine, prompt, policy, remember=False), expected)
        for policy in (
            Naive(),
            SparseX(boundary_layers=1, recompute_share=0.1),
            SparseX(boundary_layers=2, recompute_share=0.6),
            SparseX(recompute_share=1.0),
        )
    )
    assert naive > some > more > everything
    assert naive > 0.1
    assert everything < TOLERANCE


@pytest.mark.parametrize("policy", [policy for policy in APPROXIMATE if reads_deep_values(policy)])
def test_a_graft_reads_its_source(engine: Engine, policy: Policy):
    """Poison: what is changed in the source pages changes the answer; the same change elsewhere
    does not."""
    known, prompt = tokens(80, 1), tokens(9, 2) + tokens(80, 1) + tokens(5, 3)
    ask(engine, known, Full())
    before = ask(engine, prompt, policy, remember=False)
    cache, index = engine.memory.cache, engine.index.segments.blocks
    scope = engine.scope_of("default")
    slots = grafted_tokens(index.match(MatchQuery(np.array(known, np.int64), (scope,)))[:1], 16)[1]
    unrelated = np.setdiff1d(np.arange(cache.values.shape[1]), slots)[:64]
    deep = cache.values[2 * 2 :]  # streams of the layers from the third on
    for place, changes in ((unrelated, False), (slots, True)):
        saved = deep[:, place].clone()
        deep[:, place] = 3.0
        after = ask(engine, prompt, policy, remember=False)
        deep[:, place] = saved
        assert (difference(after, before.first_logits) > 0.01) == changes  # type: ignore[arg-type]


@dataclass(frozen=True)
class KeysBeforeAndAfter(Policy):
    """A policy of the test's own: what is grafted, then what full prefill makes of it."""

    name: ClassVar[str] = "keys before and after"
    seen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list, hash=False)

    def recover(self, ctx: PrefillContext) -> Hidden:
        layers, grafted = range(ctx.num_layers), ctx.plan.grafted
        ctx.graft(layers)
        before = [ctx.keys(layer, grafted).clone() for layer in layers]
        hidden = ctx.run(layers, ctx.embed(ctx.plan.active))
        self.seen.extend(
            (old, ctx.keys(layer, grafted)) for layer, old in zip(layers, before, strict=True)
        )
        return hidden


@pytest.mark.parametrize("moved", [-70, 130])
def test_grafted_keys_of_the_first_layer_are_those_of_full_prefill(engine: Engine, moved: int):
    """They depend on token and position only, so alignment must make them right at any distance,
    either way."""
    known, early = tokens(96, 1), tokens(80, 9)
    ask(engine, early + known if moved < 0 else known, Full())
    policy = KeysBeforeAndAfter()
    result = ask(
        engine, tokens(80 + moved if moved < 0 else moved, 2) + known, policy, remember=False
    )
    assert result.report.grafted_tokens >= 80
    (first_before, first_after), *others = policy.seen
    torch.testing.assert_close(first_before, first_after, atol=1e-4, rtol=1e-4)
    assert all(float((before - after).abs().max()) > 0.01 for before, after in others)


def test_non_finite_grafts_fall_back_to_full_prefill(engine: Engine):
    known, prompt = tokens(80, 1), tokens(9, 2) + tokens(80, 1) + tokens(5, 3)
    ask(engine, known, Full())
    expected = truth(engine, prompt)
    engine.memory.cache.values[-2:, :] = float("nan")  # the last layer
    count = engine.memory.fallbacks["non_finite"]
    result = ask(engine, prompt, Naive(), remember=False)
    assert result.report.fallback == "non_finite"
    assert result.report.grafted_tokens == 0
    assert engine.memory.fallbacks["non_finite"] == count + 1
    assert difference(result, expected) < TOLERANCE


def test_namespaces_are_isolated_and_their_own_content_is_found(engine: Engine):
    known, prompt = tokens(96, 1), tokens(9, 2) + tokens(96, 1)
    ask(engine, known, Full(), namespace="a")
    for text in (known, prompt):
        stranger = ask(engine, text, Naive(), namespace="b", remember=False).report
        assert (stranger.prefix_tokens, stranger.grafted_tokens) == (0, 0)
    assert ask(engine, prompt, Naive(), namespace="a", remember=False).report.grafted_tokens >= 80
    assert ask(engine, known, Naive(), namespace="a", remember=False).report.prefix_tokens == 80


@pytest.mark.parametrize("evict", [False, True])
def test_prefix_lookups_never_see_grafted_blocks(model_dirs: dict[str, Path], evict: bool):
    engine = Engine(model_dirs["qwen3"], dtype="float32", num_pages=24, poison_dropped_pages=True)
    known = tokens(80, 1)
    prompt = tokens(20, 2) + known + tokens(40, 3)
    expected = truth(engine, prompt)
    ask(engine, known, Full())
    approximate = ask(engine, prompt, Naive())  # remembered
    assert approximate.report.grafted_tokens >= 64
    if evict:
        for seed in range(10, 14):
            ask(engine, tokens(120, seed), Full())
    again = ask(engine, prompt, Full())
    assert again.report.prefix_tokens <= 16  # at most the block before the first graft
    assert difference(again, expected) < TOLERANCE
    exact = ask(engine, prompt, Full())
    assert exact.report.prefix_tokens == 128
    assert difference(exact, expected) < TOLERANCE
    engine.check()


def test_blocks_after_a_graft_are_sources_only_if_configured(model_dirs: dict[str, Path]):
    known, later = tokens(80, 1), tokens(64, 3)
    for allowed in (False, True):
        engine = Engine(model_dirs["llama"], dtype="float32", max_depth=int(allowed))
        ask(engine, known, Full())
        assert ask(engine, tokens(9, 2) + known + later, Naive()).report.grafted_tokens >= 64
        grafted = ask(engine, tokens(5, 4) + later, Naive()).report.grafted_tokens
        assert (grafted > 0) == allowed


def test_a_document_read_behind_another_is_a_source_unless_clean_context_is_required(
    model_dirs: dict[str, Path],
):
    hostile, document = tokens(40, 1), tokens(80, 2)
    for required in (False, True):
        engine = Engine(model_dirs["llama"], dtype="float32", require_clean_context=required)
        ask(engine, hostile + document, Full())
        moved = tokens(9, 3) + document
        assert (ask(engine, moved, Naive()).report.grafted_tokens > 0) != required
        ask(engine, document, Full())
        assert ask(engine, tokens(7, 4) + document, Naive()).report.grafted_tokens >= 64


def test_an_exact_hit_behind_a_gap_is_used_and_is_exact(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["llama"], dtype="float32", poison_dropped_pages=True)
    prompt = tokens(100, 1)
    expected = truth(engine, prompt)
    ask(engine, prompt, Full())
    pages = engine.memory.lookup.find_prefix(prompt, engine.scope_of("default"))
    engine.memory.pool._drop([pages[2]])  # as if only this one had been reclaimed
    result = ask(engine, prompt, Naive())
    assert result.report.prefix_tokens == 80
    assert result.report.fresh_tokens == 20
    assert difference(result, expected) < TOLERANCE


def test_generated_text_is_a_source_as_well(engine: Engine):
    prompt = tokens(40, 1)
    first = engine.generate(
        [Request(prompt, "full", SamplingParams(max_tokens=60, ignore_eos=True))]
    )[0]
    second = ask(engine, tokens(7, 2) + first.token_ids, Naive())
    assert second.report.grafted_tokens >= 32


def test_a_prompt_known_to_its_end_recomputes_its_tail(engine: Engine):
    known = tokens(160, 1)
    ask(engine, known, Full())
    prompt = tokens(9, 2) + known[:150]
    result = ask(
        engine,
        prompt,
        SparseX(boundary_layers=0, recompute_share=0.0, overflow_blocks=0, tail_tokens=64),
        remember=False,
    )
    assert result.report.fresh_tokens <= 12
    assert result.report.recomputed_tokens == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_grafts_and_stays_close_to_float32(
    model_dirs: dict[str, Path], engine: Engine, dtype: str
):
    """Recomputing everything: the error is that of the dtype, not of the graft."""
    half = Engine(model_dirs["qwen3"], dtype=dtype)
    known = tokens(96, 1)
    prompt = tokens(9, 2) + known + tokens(5, 3)
    ask(half, known, Full())
    full = truth(half, prompt)
    for policy in (
        SparseX(boundary_layers=0, recompute_share=1.0),
        SparseX(boundary_layers=1, recompute_share=1.0),
    ):
        result = ask(half, prompt, policy, remember=False)
        assert result.report.grafted_tokens >= 80
        assert difference(result, full) < 0.2  # logits of order 5 with 8 bits
    assert difference(full, truth(engine, prompt)) < 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", [Full(), *APPROXIMATE, *EVERYTHING])
def test_cuda_answers_as_the_cpu_does(model_dirs: dict[str, Path], policy: Policy):
    known = tokens(96, 1)
    prompts = [tokens(9, 2) + known + tokens(5, 3), tokens(70, 4), known]
    logits = []
    for device in ("cpu", "cuda"):
        engine = Engine(
            model_dirs["qwen3"],
            dtype="float32",
            device=device,
            head_map=make_head_map(model_dirs["qwen3"]),
            residual_layers=(0, 1, 2),
        )
        ask(engine, known, Full())
        logits.append(
            [ask(engine, prompt, policy, remember=False).first_logits for prompt in prompts]
        )
    for cpu, cuda in zip(*logits, strict=True):
        torch.testing.assert_close(cuda, cpu, atol=1e-3, rtol=1e-3)


def test_redknot_with_all_heads_global_and_all_mass_is_full_prefill(model_dirs: dict[str, Path]):
    engine = Engine(
        model_dirs["qwen3"],
        dtype="float32",
        head_map=all_heads(model_dirs["qwen3"], HeadClass.GLOBAL),
    )
    known = tokens(96, 1)
    ask(engine, known, Full())
    prompt = tokens(9, 2) + known + tokens(5, 3)
    result = ask(engine, prompt, RedKnot(mass_share=1.0), remember=False)
    assert result.report.grafted_tokens >= 80
    assert difference(result, truth(engine, prompt)) < TOLERANCE


def test_each_part_of_redknot_changes_the_answer_and_saves_work(model_dirs: dict[str, Path]):
    head_map = make_head_map(model_dirs["qwen3"], window=16)
    engine = Engine(model_dirs["qwen3"], dtype="float32", head_map=head_map)
    known = tokens(200, 1)
    ask(engine, known, Full())
    prompt = tokens(9, 2) + known + tokens(9, 3)
    off = {
        "mass_share": 1.0,
        "windows": "off",
        "reuse": "off",
        "dense_layers": 1,
        "edge_mass_share": 1.0,
        "recent_tokens": 0,
        "min_ffn_tokens": 0,
    }
    exact = ask(engine, prompt, RedKnot(**off), remember=False)
    expected = truth(engine, prompt)
    assert difference(exact, expected) < TOLERANCE
    reports = {}
    for part in ({"mass_share": 0.5}, {"windows": "on"}, {"reuse": "on"}):
        result = ask(engine, prompt, RedKnot(**off | part), remember=False)
        assert difference(result, expected) > 0.001, part
        reports[next(iter(part))] = result.report
    attention = {name: report.flops - report.ffn_flops for name, report in reports.items()}
    assert reports["mass_share"].ffn_flops < reports["windows"].ffn_flops == exact.report.ffn_flops
    assert attention["windows"] < attention["reuse"] == exact.report.flops - exact.report.ffn_flops
    promoting = ask(
        engine, prompt, RedKnot(**off | {"windows": "on", "edge_mass_share": 0.0}), remember=False
    )
    assert promoting.report.counts["promoted_heads"] == sum(
        sum(head_map.heads(layer, HeadClass.LOCAL)) for layer in range(len(head_map.classes))
    )
    assert difference(promoting, expected) < TOLERANCE


def test_redknot_computes_what_local_heads_have_lost(model_dirs: dict[str, Path]):
    """In a cache by head classes a segment is grafted though only the first list still holds its
    middle."""
    head_map = make_head_map(model_dirs["qwen3"])
    engine = Engine(
        model_dirs["qwen3"],
        dtype="float32",
        head_map=head_map,
        head_paging=True,
        poison_dropped_pages=True,
    )
    known = tokens(160, 1)
    ask(engine, known, Full())
    prompt = tokens(9, 2) + known + tokens(9, 3)
    expected = ask(engine, prompt, Full(), namespace="nobody else", remember=False)
    pages = np.array(engine.memory.lookup.find_prefix(known, engine.scope_of("default")))
    engine.memory.pool._drop(engine.memory.lookup.local_pages.of(pages[2:6]).ravel().tolist())
    everything = RedKnot(
        mass_share=1.0, reuse="off", edge_mass_share=0.0
    )  # nobody is promoted: there is nothing more to see
    for policy in (everything, RedKnot(recent_tokens=8, min_ffn_tokens=4), Naive()):
        result = ask(engine, prompt, policy, remember=False)
        assert result.report.grafted_tokens == 160 - 64 * isinstance(policy, Naive)
        assert torch.isfinite(result.first_logits).all()  # type: ignore[arg-type]
        engine.check()
    assert (
        difference(ask(engine, prompt, everything, remember=False), expected.first_logits)
        < TOLERANCE
    )  # type: ignore[arg-type]


def test_redknot_needs_a_head_map(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["qwen3"], dtype="float32")
    with pytest.raises(
        RequestError, match="policy 'redknot' needs a head map: run `kvgraft profile-heads MODEL`"
    ):
        ask(engine, tokens(9, 1), RedKnot())


def all_heads(model_dir: Path, head_class: HeadClass) -> HeadMap:
    head_map = make_head_map(model_dir)
    classes = tuple((head_class,) * len(row) for row in head_map.classes)
    return HeadMap(head_map.model, head_map.sinks, head_map.window, classes)
