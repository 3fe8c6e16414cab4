"""Requests that graft from namespaces beside their own: whose text they find, and whose they never
touch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvgraft import Engine, Request, RequestError, Result, SamplingParams, Segment
from kvgraft.core.prompt import Part
from kvgraft.policies import SparseX
from kvgraft.store import StoreOptions
from models import VOCAB_SIZE

TOLERANCE = 1e-4
EVERYTHING = SparseX(recompute_share=1.0)
WIKI = {"shared_namespaces": ("wiki",)}


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


KNOWN = tokens(200, 1)
MOVED = [*tokens(9, 2), *KNOWN, *tokens(5, 3)]


@pytest.fixture(scope="module")
def model(model_dirs: dict[str, Path]) -> Path:
    return model_dirs["qwen3"]


@pytest.fixture(scope="module")
def started(model: Path) -> Engine:
    settings = {"match": "similar:tau=0.3,window_tokens=64", "continuation": True, "max_depth": 1}
    return Engine(model, dtype="float32", num_pages=120, poison_dropped_pages=True, **settings)  # type: ignore[arg-type]


@pytest.fixture
def engine(started: Engine) -> Engine:
    started.clear_cache()
    return started


def ask(
    engine: Engine,
    prompt: list[int],
    policy: object = "naive",
    namespace: str = "mine",
    **more: object,
) -> Result:
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    request = Request(prompt, policy, sampling, namespace, return_logits=True, **more)  # type: ignore[arg-type]
    return engine.generate([request])[0]


def read(engine: Engine, text: list[int], namespace: str) -> None:
    ask(engine, text, "full", namespace)


@pytest.mark.parametrize("others", [(), ("law",), ("wik", "wiki "), ("yours",)])
def test_shared_text_is_grafted_by_who_names_it_and_by_nobody_else(
    engine: Engine, others: tuple[str, ...]
):
    read(engine, KNOWN, "wiki")
    without = ask(engine, MOVED, shared_namespaces=others, remember=False)
    assert (without.report.grafted_tokens, without.report.reason) == (0, "no_known_text")
    found = ask(engine, MOVED, EVERYTHING, shared_namespaces=(*others, "wiki"), remember=False)
    assert found.report.grafted_tokens >= 192
    truth = ask(engine, MOVED, "full", "nobody else", remember=False)
    assert float((found.first_logits - truth.first_logits).abs().max()) < TOLERANCE  # type: ignore[operator]


def test_shared_text_is_a_copy_also_where_it_begins_the_prompt(engine: Engine):
    read(engine, KNOWN, "wiki")
    result = ask(engine, KNOWN, **WIKI)
    assert (result.report.prefix_tokens, result.report.grafted_tokens) == (0, 192)
    again = ask(engine, KNOWN, "full", "wiki")
    assert again.report.prefix_tokens == 192, "its owner has it as it was"


def test_what_a_reader_leaves_is_its_own(engine: Engine):
    read(engine, KNOWN, "wiki")
    mine = tokens(100, 4)
    ask(engine, [*KNOWN, *mine], **WIKI)
    read(engine, mine, "mine")
    prompt = [*tokens(5, 5), *mine]
    for namespace, shared in (("wiki", ()), ("yours", ("wiki",)), ("yours", ())):
        stranger = ask(
            engine, prompt, namespace=namespace, shared_namespaces=shared, remember=False
        )
        assert stranger.report.grafted_tokens == 0
    assert ask(engine, prompt).report.grafted_tokens >= 96


def test_own_text_and_shared_text_are_grafted_together(engine: Engine):
    mine, law = tokens(100, 4), tokens(100, 6)
    for text, namespace in ((KNOWN, "wiki"), (law, "law"), (mine, "mine")):
        read(engine, text, namespace)
    prompt = [*tokens(3, 7), *law, *mine, *KNOWN, *tokens(3, 8)]
    everything = {"remember": False, "shared_namespaces": ("wiki", "law")}
    truth = ask(engine, prompt, "full", "nobody else", remember=False)
    result = ask(engine, prompt, EVERYTHING, **everything)
    assert result.report.grafted_tokens >= 96 + 96 + 192
    assert float((result.first_logits - truth.first_logits).abs().max()) < TOLERANCE  # type: ignore[operator]
    assert (
        ask(engine, prompt, **WIKI, remember=False).report.grafted_tokens
        < result.report.grafted_tokens - 90
    )


def test_near_duplicates_are_shared(engine: Engine):
    read(engine, KNOWN, "wiki")
    edited = [
        (token + 1) % VOCAB_SIZE if place % 20 == 19 else token for place, token in enumerate(KNOWN)
    ]
    prompt = [*tokens(9, 2), *edited, *tokens(5, 3)]
    exact = ask(engine, prompt, match="exact", remember=False, **WIKI).report.grafted_tokens
    assert ask(engine, prompt, remember=False).report.grafted_tokens == 0
    assert ask(engine, prompt, remember=False, **WIKI).report.grafted_tokens > exact + 50


def test_only_who_reads_the_same_goes_on_with_what_was_left(engine: Engine):
    """An answer over shared text rests on it; who does not share it does not take it up, though it
    is its own."""
    read(engine, KNOWN, "wiki")
    ask(engine, MOVED, **WIKI)
    follow_up = [*MOVED, *tokens(40, 9)]
    assert ask(engine, follow_up, remember=False).report.continued_tokens == 0
    assert (
        ask(engine, follow_up, namespace="yours", remember=False, **WIKI).report.continued_tokens
        == 0
    )
    assert ask(engine, follow_up, remember=False, **WIKI).report.continued_tokens >= 192


def test_a_reader_under_pressure_sheds_its_own_pinned_text_and_none_of_what_it_reads(model: Path):
    engine = Engine(model, dtype="float32", num_pages=40, watermark=0.5)
    engine.pin("manual", Request(KNOWN, namespace="wiki"))
    engine.pin("notes", Request(tokens(100, 4), namespace="mine"))
    result = ask(engine, [*MOVED, *tokens(120, 5)], **WIKI)
    assert result.report.grafted_tokens >= 192
    entries = {entry.name: (len(entry.pages), entry.num_shed) for entry in engine.pins.list()}
    assert entries["manual"] == (12, 0)
    assert entries.get("notes", (0, 6))[1] > 0
    engine.check()


@pytest.mark.parametrize(
    "policy", ["condense:kept_share=0.5", "samkv:block_tokens=16,kept_share=0.5"]
)
def test_documents_that_others_have_read_are_not_read_again(engine: Engine, policy: str):
    documents = [
        Segment(" ".join(f"w{token % 100}" for token in tokens(60, seed))) for seed in (31, 32)
    ]
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)

    def answer(namespace: str, *parts: Part, **more: Any) -> Result:
        request = Request(
            [*parts, "w1 w2 w3"], policy, sampling, namespace, return_logits=True, **more
        )
        return engine.generate([request])[0]

    answer("wiki", documents[0])
    alone = answer("nobody else", *documents, remember=False)
    found = answer("mine", *documents, **WIKI)
    counts = [result.report.counts["documents_read"] for result in (alone, found)]
    assert counts == [2, 1]
    assert torch.equal(found.first_logits, alone.first_logits)  # type: ignore[arg-type]
    for namespace, more in (("mine", {}), ("yours", WIKI), ("wiki", {})):
        again = answer(namespace, *documents, remember=False, **more)
        assert again.report.counts["documents_read"] == 1, (
            "what was read there stays there, and nowhere else"
        )
    request = Request([*documents, "w1"], policy, namespace="yours", **WIKI)  # type: ignore[arg-type]
    assert engine.read_documents(request) == 1
    assert engine.read_documents(request) == 0


def test_a_deleted_segment_is_found_until_its_blocks_and_the_store_have_lost_it(model: Path):
    with Engine(model, dtype="float32", num_pages=40, store=StoreOptions()) as engine:
        engine.pin("manual", Request(KNOWN, namespace="wiki"))
        engine.pins.delete("manual", "wiki")
        assert ask(engine, MOVED, remember=False, **WIKI).report.grafted_tokens >= 192, (
            "its blocks are still there"
        )
        assert engine.store is not None
        engine.store.flush()
        engine.clear_cache()
        result = ask(engine, MOVED, remember=False, **WIKI)
        assert (result.report.counts["restored_blocks"], len(engine.pins.list())) == (12, 0)
        assert result.report.grafted_tokens >= 192


@pytest.mark.parametrize("disk", [False, True])
def test_shared_text_comes_back_from_the_store_for_its_readers_only(
    model: Path, tmp_path: Path, disk: bool
):
    options = StoreOptions(tmp_path / "store", ram_gib=0, disk_gib=1) if disk else StoreOptions()
    with Engine(
        model, dtype="float32", num_pages=40, store=options, poison_dropped_pages=True
    ) as engine:
        read(engine, KNOWN, "wiki")
        read(engine, tokens(100, 4), "mine")
        assert engine.store is not None
        prompt = [*tokens(5, 6), *tokens(100, 4), *MOVED]
        at_once = ask(engine, prompt, remember=False, **WIKI)
        for shared, num_restored in (((), 6), (("wiki",), 18)):
            engine.store.flush()
            for seed in range(20, 24):
                ask(engine, tokens(400, seed), "full", remember=False)
            engine.clear_cache()
            result = ask(engine, prompt, remember=False, shared_namespaces=shared)
            assert result.report.counts["restored_blocks"] == num_restored
        assert result.report.grafted_tokens == at_once.report.grafted_tokens
        assert torch.equal(result.first_logits, at_once.first_logits)  # type: ignore[arg-type]
        own = ask(engine, KNOWN, "full", "wiki", remember=False)
        assert own.report.prefix_tokens == 192, "what came back is the owner's, as it was"
        engine.check()


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ("wiki", "must be a sequence of strings, got 'wiki'"),
        (("wiki", 3), r"must be a sequence of strings, got \('wiki', 3\)"),
        (("wiki", "wiki"), r"must be distinct and others than 'mine', got \['wiki', 'wiki'\]"),
        (("mine",), r"must be distinct and others than 'mine', got \['mine'\]"),
    ],
)
def test_what_names_no_other_namespaces_is_refused(engine: Engine, shared: object, message: str):
    with pytest.raises(RequestError, match=f"shared_namespaces {message}"):
        ask(engine, KNOWN, shared_namespaces=shared)
