"""Documents kept in part: exact where everything is recomputed, right where it is not, and nothing
else is resident."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Engine, Request, Result, SamplingParams
from kvgraft.core.prompt import Part, Segment
from kvgraft.engine.decoder import causal_attention
from kvgraft.kv.documents import Document
from kvgraft.kv.importance import Received
from kvgraft.kv.rope import rotate
from kvgraft.policies import Condense, SamKV
from kvgraft.prefill.documents.context import DocumentContext
from kvgraft.prefill.documents.keeping import KeepsDocuments
from models import VOCAB_SIZE, make_head_map
from properties import examples

# transformers replaces the word tokenizer of a qwen2
FAMILIES = ("llama", "mistral", "qwen3", "qwen3_moe", "deepseek_v3")
TOLERANCE = 1e-4  # logits of order 5 in float32
EVERYTHING: dict[str, Any] = {"kept_share": 1.0, "recomputed": "kept", "update": "overwrite"}
EXACT = [
    SamKV(top_p="off", **EVERYTHING),
    Condense(**EVERYTHING),
    Condense(rounds=1, halo_blocks=0, **EVERYTHING),
]
POLICIES = [
    *EXACT,
    SamKV(),
    SamKV(block_tokens=8),
    SamKV(bias="off", recomputed="none", block_tokens=8),
    SamKV(selection="off", update="overwrite", block_tokens=8),
    SamKV(
        top_p="off",
        kept_share=0.5,
        recomputed="kept",
        block_tokens=8,
        initial_blocks=0,
        local_blocks=0,
        halo_blocks=2,
    ),
    SamKV(top_p="off", kept_share=0.0, initial_blocks=0, local_blocks=0),
    Condense(),
    Condense(kept_share=0.4, rounds=3, hop_tokens=0, update="fusion"),
    Condense(kept_share=0.4, initial_blocks=2, local_blocks=0, recomputed="none"),
]


@pytest.fixture(scope="module")
def engines(model_dirs: dict[str, Path]) -> dict[str, Engine]:
    return {
        family: Engine(
            model_dirs[family], dtype="float32", poison_dropped_pages=True, stable_layers=[1, 2]
        )
        for family in FAMILIES
    }


@pytest.fixture
def engine(engines: dict[str, Engine]) -> Engine:
    engine = engines["qwen3"]
    engine.clear_cache()
    return engine


def words(count: int, seed: int) -> str:
    return " ".join(
        f"w{number}" for number in np.random.default_rng(seed).integers(3, VOCAB_SIZE - 3, count)
    )


def prompt_of(lengths: list[int], question: int = 7, opening: int = 5) -> list[Part]:
    documents: list[Part] = [
        Segment(words(length, 10 + number)) for number, length in enumerate(lengths)
    ]
    return (
        [words(opening, 1), *documents, words(question, 2)]
        if opening
        else [*documents, words(question, 2)]
    )


def ask(
    engine: Engine,
    prompt: list[Part],
    policy: str | KeepsDocuments,
    max_tokens: int = 1,
    **fields: Any,
) -> Result:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    [result] = engine.generate([Request(prompt, policy, sampling, return_logits=True, **fields)])
    engine.check()
    return result


def truth(engine: Engine, prompt: list[Part], max_tokens: int = 1) -> Result:
    return ask(engine, prompt, "full", max_tokens, namespace="nobody else", remember=False)


def difference(one: Result, other: Result) -> float:
    return float((one.first_logits - other.first_logits).abs().max())  # type: ignore[operator]


@examples(40)
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_any_documents_are_answered_and_recomputing_everything_is_full_prefill(
    engines: dict[str, Engine], family: str, data: st.DataObject
):
    """Any number and length of documents, twice the same, with and without text around them, and no
    question."""
    engine = engines[family]
    if data.draw(st.booleans()):
        engine.clear_cache()
    texts = [
        words(data.draw(st.integers(1, 90)), seed) for seed in range(data.draw(st.integers(1, 4)))
    ]
    prompt: list[Part] = []
    for number in data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=4)):
        if data.draw(st.booleans()):
            prompt.append(words(data.draw(st.integers(1, 20)), 50 + number))
        prompt.append(Segment(texts[number]))
    if data.draw(st.booleans()):
        prompt.append(words(data.draw(st.integers(1, 20)), 99))
    policy = data.draw(st.sampled_from(POLICIES))
    expected = truth(engine, prompt, 3)
    result = ask(engine, prompt, policy, 3)
    assert len(result.token_ids) == 3
    assert bool(result.first_logits.isfinite().all())  # type: ignore[union-attr]
    report = result.report
    assert report.fallback == (None if report.grafted_tokens else "no_documents")
    assert report.grafted_tokens + report.fresh_tokens == report.prompt_tokens
    assert report.counts["kept_tokens"] <= report.grafted_tokens
    if policy in EXACT:
        assert report.recomputed_tokens == report.counts["kept_tokens"] == report.grafted_tokens
        assert difference(result, expected) < TOLERANCE
        assert result.token_ids == expected.token_ids


def dense(engine: Engine, prompt: list[Part], steps: int) -> tuple[list[int], torch.Tensor]:
    """The answer where every document has read itself alone, and all else everything: masked
    attention, no cache."""
    decoder, config, device = engine.decoder, engine.config, engine.decoder.device
    tokenised = engine._reader.read(Request(prompt))
    tokens = tokenised.token_ids.tolist()
    visible = torch.ones(
        len(tokens) + steps, len(tokens) + steps, dtype=torch.bool, device=device
    ).tril()
    for start, stop in tokenised.segments:
        visible[start:stop, :start] = False
    first = torch.zeros(0)
    for step in range(steps):
        cos, sin = config.rope.fresh_table(torch.arange(len(tokens), device=device))
        hidden = decoder.embed(torch.tensor(tokens, device=device))
        for layer in range(config.num_layers):
            query, keys, values = decoder.project(layer, hidden, cos, sin)
            mask = visible[: len(tokens), : len(tokens)]
            attended = causal_attention(query, keys, values, config.attention_scale, mask)
            hidden = decoder.add_attention(layer, hidden, attended.flatten(1))
            hidden = decoder.feed_forward(layer, hidden)
        logits = decoder.logits(hidden[-1:])[0]
        first = logits if step == 0 else first
        tokens.append(int(logits.argmax()))
    return tokens[-steps:], first.cpu()


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_that_are_kept_whole_and_not_recomputed_have_read_themselves_alone(
    engines: dict[str, Engine], family: str
):
    """An answer of several tokens: places in the pages are not the positions that RoPE means."""
    engine = engines[family]
    prompt = prompt_of([70, 33, 90])
    expected, logits = dense(engine, prompt, 6)
    for policy in (
        SamKV(top_p="off", kept_share=1.0, recomputed="none"),
        Condense(kept_share=1.0, recomputed="none"),
    ):
        result = ask(engine, prompt, policy, 6)
        assert float((result.first_logits - logits).abs().max()) < TOLERANCE  # type: ignore[operator]
        assert result.token_ids == expected


class Watched(SamKV):
    """Notes what is kept."""

    seen: ClassVar[list[Any]] = []

    def choose(self, ctx: DocumentContext) -> torch.Tensor:
        kept = super().choose(ctx)
        self.seen.append((ctx, kept))
        return kept


@torch.inference_mode()
def test_pages_hold_what_each_layer_keeps_and_nothing_else(engine: Engine):
    """Layers keep different tokens; keys stand where the prompt has them."""
    prompt = prompt_of([100, 80, 120])
    sequence = engine._sequence(
        0, Request(prompt, Watched(recomputed="none", top_p="off", kept_share=0.5, block_tokens=8))
    )
    engine.scheduler.waiting.append(sequence)
    engine.scheduler.step()
    ctx, kept = Watched.seen.pop()
    assert not all(torch.equal(kept[0], other) for other in kept[1:])
    assert int(kept[0].sum()) == 150
    for layer in range(ctx.num_layers):
        tokens = (kept[layer] | ctx.plan.fresh).nonzero()[:, 0]
        keys, values = engine.memory.cache.read(layer, sequence.pages.slots[:, : len(tokens)])
        for place, token in enumerate(tokens.tolist()):
            if not ctx.plan.grafted[token]:
                continue
            [at] = [at for at in ctx.layout.placed if at.start <= token < at.stop]
            cos, sin = engine.config.rope.table(torch.tensor([at.start]))
            expected = rotate(at.document.keys[layer, :, token - at.start][None], cos, sin)[0]
            torch.testing.assert_close(keys[place].cpu(), expected)
            torch.testing.assert_close(
                values[place].cpu(), at.document.values[layer, :, token - at.start]
            )
    num_pages = -(-(150 + 12 + sequence.request.sampling.max_tokens - 1) // 16)
    assert engine.memory.pool.num_used == num_pages
    engine.scheduler.abort([sequence])
    assert engine.memory.pool.num_used == 0


class AsksTwice(Condense):
    """Notes what the question's tokens look for, when all fresh tokens are computed and then when
    they alone are."""

    seen: ClassVar[list[list[torch.Tensor]]] = []

    def choose(self, ctx: DocumentContext) -> torch.Tensor:
        fresh, question = ctx.plan.fresh, ctx.plan.question
        ctx.retain(fresh.repeat(ctx.num_layers, 1))
        for entering in (fresh, question):
            asked = self.ask(ctx, ctx.layout.anchors, question, entering)
            self.seen.append([ctx.query()[question[entering]] for _ in asked])
        return super().choose(ctx)


def test_a_question_asks_again_over_the_fresh_tokens_of_before(engine: Engine):
    ask(engine, prompt_of([60, 60]), AsksTwice())
    first, second = AsksTwice.seen
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("policy", [SamKV(block_tokens=8, kept_share=0.15), Condense()], ids=str)
def test_less_memory_is_held_than_by_full_prefill(engine: Engine, policy: KeepsDocuments):
    prompt = prompt_of([110] * 4, opening=0)
    expected = ask(engine, prompt, "full").report.kv_bytes
    report = ask(engine, prompt, policy).report
    # initial and local blocks of 8
    assert report.counts["kept_tokens"] == 4 * (8 + 14) < 0.21 * 440
    assert report.kv_bytes < 0.5 * expected  # on four layers what one layer reads weighs much


@pytest.mark.parametrize("policy", ["samkv", "condense:kept_share=0.5"])
def test_poison_in_a_document_is_seen_counted_and_computed_away(engine: Engine, policy: str):
    prompt = prompt_of([60, 60])
    expected = truth(engine, prompt, 4)
    engine.read_documents(Request(prompt, policy))
    with torch.inference_mode():
        for document in engine.library.store._documents.values():
            document.values[:, :, :8] = float("nan")
    result = ask(engine, prompt, policy, 4)
    assert result.report.fallback == "non_finite"
    assert engine.memory.fallbacks["non_finite"] >= 1
    assert result.token_ids == expected.token_ids
    assert difference(result, expected) < TOLERANCE
    assert (result.report.recomputed_tokens, result.report.grafted_tokens) == (0, 0)


def test_an_answer_reads_its_documents(engine: Engine):
    prompt = prompt_of([60, 60])
    before = ask(engine, prompt, "samkv:recomputed=none")
    with torch.inference_mode():
        for document in engine.library.store._documents.values():
            document.values.neg_()
    assert difference(ask(engine, prompt, "samkv:recomputed=none"), before) > 0.01


def test_documents_are_read_once_a_namespace(engine: Engine):
    prompt = prompt_of([40, 50, 40])
    samkv = "samkv:block_tokens=8"  # cuts documents as condense does
    request = Request(prompt, samkv)
    assert engine.read_documents(request) == 3
    assert engine.read_documents(request) == 0
    assert engine.read_documents(Request(prompt, "full")) == 0
    assert ask(engine, prompt, samkv).report.counts["documents_read"] == 0
    assert ask(engine, prompt, "condense").report.counts["documents_read"] == 0
    assert ask(engine, prompt, "condense:block_tokens=4").report.counts["documents_read"] == 3
    mine, theirs = (ask(engine, prompt, samkv, namespace=name) for name in ("default", "other"))
    assert (mine.report.counts["documents_read"], theirs.report.counts["documents_read"]) == (0, 3)
    assert torch.equal(mine.first_logits, theirs.first_logits)  # type: ignore[arg-type]


def test_nothing_approximate_is_found_by_others(engine: Engine):
    prompt = prompt_of([60, 60])
    ask(engine, prompt, "samkv", 20)
    report = ask(engine, prompt, "naive").report
    assert (report.prefix_tokens, report.grafted_tokens) == (0, 0)


def test_requests_of_all_kinds_in_one_step_answer_as_alone(engine: Engine):
    prompts = [prompt_of([60, 60]), prompt_of([30]), prompt_of([100, 100, 40])]
    kinds = ["samkv", "full", "condense"]
    alone = [ask(engine, prompt, kind, 8, remember=False) for prompt in prompts for kind in kinds]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [
        Request(prompt, kind, sampling, remember=False) for prompt in prompts for kind in kinds
    ]
    together = engine.generate(requests)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    engine.check()


def test_what_it_cannot_do_is_full_prefill_with_a_reason(
    model_dirs: dict[str, Path], engine: Engine
):
    plain = " ".join(words(60, 3).split())
    report = engine.generate([Request(plain, "samkv")])[0].report
    assert (report.fallback, report.computed_share) == ("no_documents", 1.0)
    before = engine.memory.fallbacks["no_documents"]
    # reading is no request: nothing is counted
    assert engine.read_documents(Request(plain, "samkv")) == 0
    assert engine.memory.fallbacks["no_documents"] == before >= 1
    paged = Engine(
        model_dirs["qwen3"],
        dtype="float32",
        head_map=make_head_map(model_dirs["qwen3"]),
        head_paging=True,
    )
    assert ask(paged, prompt_of([60, 60]), "condense").report.fallback == "head_paging"


def test_a_small_pool_takes_more_prompts_of_kept_documents(model_dirs: dict[str, Path]):
    """10 pages of 16 tokens: a prompt of 300 tokens never fits, one of which 80 are kept does, one
    after the other."""
    engine = Engine(model_dirs["qwen3"], dtype="float32", num_pages=10)
    prompt = prompt_of([140, 140], opening=0)
    assert "10 can be freed" in (ask(engine, prompt, "full").error or "")
    policy = "samkv:block_tokens=8,kept_share=0.25,initial_blocks=0,local_blocks=1"
    requests = [
        Request(prompt, policy, SamplingParams(max_tokens=30, ignore_eos=True)) for _ in range(3)
    ]
    results = engine.generate(requests)
    assert [result.error for result in results] == [None] * 3
    assert len({tuple(result.token_ids) for result in results}) == 1
    engine.check()


def test_a_document_larger_than_the_store_is_read_each_time(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["qwen3"], dtype="float32", document_gib=0.0)
    prompt = prompt_of([60, 60])
    results = [ask(engine, prompt, "condense", 5) for _ in range(2)]
    assert [result.report.counts["documents_read"] for result in results] == [2, 2]
    assert results[0].token_ids == results[1].token_ids


def test_a_prompt_kept_in_part_is_handed_over_in_part(
    engine: Engine, model_dirs: dict[str, Path], tmp_path: Path
):
    prompt = prompt_of([100, 100, 100])
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = ask(engine, prompt, "condense", 10).token_ids
    engine.prefill(Request(prompt, "condense", sampling), tmp_path / "kept")
    engine.prefill(Request(prompt, "full", sampling), tmp_path / "whole")
    assert (tmp_path / "kept").stat().st_size < 0.5 * (tmp_path / "whole").stat().st_size
    other = Engine(model_dirs["qwen3"], dtype="float32")
    assert other.resume(tmp_path / "kept").token_ids == expected
    other.check()
    engine.check()


def test_what_is_known_of_a_document_is_of_its_blocks(engine: Engine):
    engine.read_documents(Request(prompt_of([100]), "samkv:block_tokens=8"))
    [document] = engine.library.store._documents.values()
    assert isinstance(document, Document)
    layers, heads = engine.config.num_layers, engine.config.num_kv_heads
    assert (
        document.keys.shape == document.values.shape == (layers, heads, 100, engine.config.head_dim)
    )
    assert document.block_size == 8
    assert document.block_keys.shape == (layers, 13, heads, engine.config.head_dim)
    torch.testing.assert_close(document.block_keys[:, 12], document.keys[:, :, 96:].mean(2))
    assert document.exponents.shape == document.attention.shape == (layers, 13)
    assert document.exponents[:, 12].isinf().all()  # nothing to fit behind the last tokens
    assert document.outliers.shape == (layers, 100)


def test_outliers_stand_out_among_the_middle_blocks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """Sinks neither are outliers, which are recomputed anyway, nor do they hide those of the
    middle."""
    exponents = torch.linspace(0.9, 1.1, 200)
    # the first tokens of blocks 0, 10 and 24
    exponents[[0, 80, 192]] = torch.tensor([-50.0, 0.5, -40.0])

    def received(query: torch.Tensor, keys: torch.Tensor, over_heads: object) -> Received:
        return Received(torch.zeros(200), exponents)

    monkeypatch.setattr("kvgraft.prefill.documents.reading.received_attention", received)
    engine.read_documents(Request(prompt_of([200]), "samkv:block_tokens=8"))
    [document] = engine.library.store._documents.values()
    assert document.outliers.nonzero()[:, 1].tolist() == [80] * engine.config.num_layers


@pytest.mark.parametrize(
    ("stable", "message"),
    [
        ([], "different numbers"),
        ([1, 1], "different numbers"),
        ([4], r"must be in 0\.\.3, got \[4\]"),
    ],
)
def test_wrong_stable_layers_are_refused(
    model_dirs: dict[str, Path], stable: list[int], message: str
):
    with pytest.raises(ValueError, match=message):
        Engine(model_dirs["qwen3"], stable_layers=stable)


def test_the_room_for_documents_is_a_number(model_dirs: dict[str, Path]):
    with pytest.raises(ValueError, match="document_gib must be a number of at least 0, got nan"):
        Engine(model_dirs["qwen3"], document_gib=float("nan"))


def test_what_is_not_to_be_remembered_is_not(engine: Engine):
    prompt = prompt_of([40, 50])
    for _ in range(2):
        assert ask(engine, prompt, "samkv", remember=False).report.counts["documents_read"] == 2
    assert len(engine.library.store) == 0
