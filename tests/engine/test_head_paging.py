"""The engine on per-head pages computes the model that the head map describes, and frees what local
heads leave."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvgraft import Engine, Policy, Request, RequestError, Result, SamplingParams
from kvgraft.engine.config import load_config
from kvgraft.engine.decoder import Decoder
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.kv.pages import PoolExhausted
from kvgraft.policies import CacheBlend, Epic, Full, Naive, Prophet, SparseX, Transitive
from models import VOCAB_SIZE
from properties import examples

TOLERANCE = 1e-4  # logits of order 5 in float32
SINKS, WINDOW, BLOCK = 3, 24, 8
L, G, R = HeadClass.LOCAL, HeadClass.GLOBAL, HeadClass.RETRIEVAL
CLASSES = ((L, G), (L, L), (R, L), (L, L))  # of the tiny qwen3: 4 layers of 2 KV heads


def head_map(
    model_dir: Path, classes: Sequence[Sequence[HeadClass]] = CLASSES, window: int = WINDOW
) -> HeadMap:
    return HeadMap(load_config(model_dir).identity, SINKS, window, tuple(map(tuple, classes)))


@pytest.fixture(scope="module")
def model_dir(model_dirs: dict[str, Path]) -> Path:
    return model_dirs["qwen3"]


@pytest.fixture(scope="module")
def decoder(model_dir: Path) -> Decoder:
    return Decoder.from_pretrained(model_dir, torch.float32)


def make_engine(model_dir: Path, **settings: object) -> Engine:
    given: dict = {"block_size": BLOCK, "num_pages": 600, "max_prefill_tokens": 40} | settings
    return Engine(
        model_dir,
        dtype="float32",
        head_map=head_map(model_dir),
        head_paging=True,
        poison_dropped_pages=True,
        **given,
    )


@pytest.fixture
def engine(model_dir: Path) -> Engine:
    return make_engine(model_dir)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def masked_logits(
    decoder: Decoder,
    prompt: list[int],
    classes: Sequence[Sequence[HeadClass]] = CLASSES,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dense attention with a mask for every head: the truth, [n, V]. Heads that are not local see
    `chosen` bool [n, n], by default all."""
    config, here = decoder.config, torch.arange(len(prompt))
    cos, sin = config.rope.fresh_table(here)
    hidden = decoder.embed(torch.tensor(prompt))
    causal = here <= here[:, None]
    windowed = causal & ((here < SINKS) | (here > here[:, None] - WINDOW))
    seen = causal if chosen is None else causal & chosen
    for layer, row in enumerate(classes):
        query, keys, values = decoder.project(layer, hidden, cos, sin)
        groups = query.shape[1] // keys.shape[1]
        mask = torch.stack([windowed if found is L else seen for found in row]).repeat_interleave(
            groups, 0
        )
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (query, keys, values)), attn_mask=mask, enable_gqa=True
        )
        hidden = decoder.add_attention(layer, hidden, attended.transpose(0, 1).flatten(1))
        hidden = decoder.feed_forward(layer, hidden)
    return decoder.logits(hidden)


def ask(
    engine: Engine,
    prompt: list[int],
    policy: Policy | None = None,
    max_tokens: int = 1,
    **fields: object,
) -> Result:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    [result] = engine.generate([Request(prompt, policy, sampling, return_logits=True, **fields)])  # type: ignore[arg-type]
    assert result.error is None
    engine.check()
    assert engine.memory.pool.num_used == len(engine.pins.pages)
    return result


def difference(result: Result, expected: torch.Tensor) -> float:
    return float((result.first_logits - expected).abs().max())  # type: ignore[operator]


@pytest.mark.parametrize("count", [1, 2, 8, 24, 27, 39, 40, 41, 130, 200])
def test_prefill_and_decode_are_those_of_masked_dense_attention(
    engine: Engine, decoder: Decoder, count: int
):
    """Prompts of one chunk and of several; the window leaves blocks behind in both phases."""
    prompt = tokens(count, 1)
    result = ask(engine, prompt, max_tokens=40)
    assert difference(result, masked_logits(decoder, prompt)[-1]) < TOLERANCE
    expected = (
        masked_logits(decoder, prompt + result.token_ids[:-1])[count - 1 :].argmax(-1).tolist()
    )
    assert result.token_ids == expected


def test_prompts_answered_together_are_answered_as_alone(engine: Engine, decoder: Decoder):
    prompts = [tokens(count, seed) for seed, count in enumerate([5, 70, 31, 120, 16])]
    requests = [
        Request(prompt, None, SamplingParams(max_tokens=30, ignore_eos=True)) for prompt in prompts
    ]
    for prompt, result in zip(prompts, engine.generate(requests), strict=True):
        logits = masked_logits(decoder, prompt + result.token_ids[:-1])
        assert result.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_heads_that_see_everything_follow_a_flow(engine: Engine, decoder: Decoder):
    """And no other head: windows and sinks stay."""
    prompt = tokens(90, 1)
    result = ask(engine, prompt, max_tokens=30, flow="streaming:topk_blocks=1,layers_skip=none")
    whole = prompt + result.token_ids[:-1]
    here = torch.arange(len(whole))
    block, query = here // BLOCK, here[:, None]
    # the first block, the last two, and the last full one
    chosen = (block == 0) | (block >= query // BLOCK - 1) | (block == (query + 1) // BLOCK - 1)
    # the prompt was computed densely
    chosen |= query < len(prompt)
    logits, dense = (
        masked_logits(decoder, whole, chosen=seen)[len(prompt) - 1 :] for seen in (chosen, None)
    )
    assert result.token_ids == logits.argmax(-1).tolist()
    assert float((logits - dense)[1:].abs().amax(-1).min()) > 100 * TOLERANCE


def test_under_a_flow_that_takes_all_blocks_nothing_changes(
    engine: Engine, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
):
    """In a batch of sequences that follow it and others that do not."""
    monkeypatch.setattr("kvgraft.decode.flow.Program.reaches", lambda *_: True)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    quest, h2o = (f"{name}:topk_blocks=60,layers_skip=none" for name in ("quest", "h2o"))
    asked = {5: quest, 70: h2o, 31: "dense", 120: quest, 16: h2o}
    requests = [
        Request(tokens(count, count), None, sampling, flow=flow, remember=False)
        for count, flow in asked.items()
    ]
    for request, result in zip(requests, engine.generate(requests), strict=True):
        prompt = list(request.prompt)
        logits = masked_logits(decoder, prompt + result.token_ids[:-1])
        assert result.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_a_long_session_holds_the_windows_of_local_heads_only(engine: Engine):
    layout = engine.memory.cache.layout
    assert (layout.width, layout.num_lists) == (2, 4)
    stream = engine.stream(
        [Request(tokens(160, 1), None, SamplingParams(max_tokens=100, ignore_eos=True))]
    )
    most = 0
    for _ in stream:
        used = engine.memory.pool.num_used
        most = max(most, used)
        if engine.scheduler.running:
            assert used == -(-259 // BLOCK) + 3 * layout.window_blocks(BLOCK)
    assert most == -(-259 // BLOCK) + 3 * layout.window_blocks(BLOCK) < 4 * -(-259 // BLOCK)


def test_exact_hits_are_exact_while_local_pages_live_and_after(engine: Engine, decoder: Decoder):
    shared = tokens(100, 1)
    ask(engine, shared + tokens(30, 2))
    for seed in (3, 4):
        prompt = shared + tokens(30, seed)
        result = ask(engine, prompt)
        assert result.report.prefix_tokens == 96
        assert difference(result, masked_logits(decoder, prompt)[-1]) < TOLERANCE
    local = engine.memory.lookup.local_pages
    pages = engine.memory.lookup.find_prefix(shared, engine.scope_of("default"))
    # what the next token would see
    engine.memory.pool._drop(local.of(np.array(pages[9:11])).ravel().tolist())
    prompt = shared + tokens(30, 5)
    result = ask(engine, prompt)
    assert result.report.prefix_tokens == 80  # blocks 9 and 10 are computed again
    assert difference(result, masked_logits(decoder, prompt)[-1]) < TOLERANCE
    assert ask(engine, shared + tokens(30, 6)).report.prefix_tokens == 96  # whole again


def test_a_conversation_goes_on_where_it_ended(engine: Engine, decoder: Decoder):
    prompt = tokens(90, 1)
    answer = ask(engine, prompt, max_tokens=60).token_ids
    follow_up = prompt + answer + tokens(20, 2)
    result = ask(engine, follow_up)
    assert result.report.prefix_tokens == 144
    assert difference(result, masked_logits(decoder, follow_up)[-1]) < TOLERANCE


EVERYTHING = [
    SparseX(boundary_layers=1, recompute_share=1.0),
    Epic(start_tokens=999),
    CacheBlend(recompute_share=1.0),
    Prophet(recompute_share=1.0),
]
EVERYTHING += [Transitive(recompute_share=1.0)]


@pytest.mark.parametrize("policy", EVERYTHING, ids=str)
def test_recomputing_everything_is_full_prefill(engine: Engine, decoder: Decoder, policy: Policy):
    known = tokens(120, 1)
    ask(engine, known, Full())
    prompt = tokens(37, 2) + known[11:] + tokens(9, 3)
    result = ask(engine, prompt, policy)
    assert result.report.grafted_tokens >= 96
    assert result.report.recomputed_tokens == result.report.grafted_tokens
    assert difference(result, masked_logits(decoder, prompt)[-1]) < TOLERANCE


@pytest.mark.parametrize("page_list", [0, 1, 2, 3])
def test_a_graft_reads_every_list_of_its_source(engine: Engine, page_list: int):
    known = tokens(80, 1)
    ask(engine, known, Full())
    prompt = tokens(9, 2) + known + tokens(5, 3)
    before = ask(engine, prompt, Naive(), remember=False)
    pages = np.array(engine.memory.lookup.find_prefix(known, engine.scope_of("default")))
    source = np.column_stack((pages, engine.memory.lookup.local_pages.of(pages)))[:, page_list]
    slots = (source[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    engine.memory.cache.values[:, slots] = 3.0
    after = ask(engine, prompt, Naive(), remember=False)
    assert difference(after, before.first_logits) > 0.01  # type: ignore[arg-type]


def test_what_local_heads_have_lost_is_computed(engine: Engine, decoder: Decoder):
    known = tokens(120, 1)
    ask(engine, known, Full())
    pages = np.array(engine.memory.lookup.find_prefix(known, engine.scope_of("default")))
    engine.memory.pool._drop(engine.memory.lookup.local_pages.of(pages[4:9]).ravel().tolist())
    prompt = tokens(9, 2) + known + tokens(5, 3)
    result = ask(engine, prompt, SparseX(recompute_share=1.0))
    assert result.report.grafted_tokens == 32 + 120 - 72 - 0
    assert difference(result, masked_logits(decoder, prompt)[-1]) < TOLERANCE


def test_pinned_text_keeps_what_its_heads_need_and_is_an_exact_prefix(
    engine: Engine, decoder: Decoder
):
    known = tokens(120, 1)
    entry = engine.pin("manual", Request(known))
    # all blocks of the first list; sinks and last window of the others
    assert len(entry.pages) == 15 + 3 * (1 + 3)
    for seed in range(2, 9):
        ask(engine, tokens(400, seed))  # the pool turns over
    prompt = known + tokens(20, 9)
    result = ask(engine, prompt, Full())
    assert result.report.prefix_tokens == 120
    assert difference(result, masked_logits(decoder, prompt)[-1]) < TOLERANCE
    engine.pins.delete("manual", "default")
    engine.check()


@examples(15)
@given(data=st.data())
def test_pages_are_conserved_and_answers_exact_under_random_load(
    model_dir: Path, decoder: Decoder, data: st.DataObject
):
    """A pool that is often full, prompts with common parts, several policies."""
    engine = make_engine(model_dir, num_pages=data.draw(st.integers(70, 200)))
    texts = [tokens(60, seed) for seed in range(3)]
    for _ in range(data.draw(st.integers(1, 4))):
        requests, prompts = [], []
        for seed in range(data.draw(st.integers(1, 4))):
            parts = [
                texts[i] for i in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
            ]
            prompt = tokens(data.draw(st.integers(0, 30)), 10 + seed) + [
                t for part in parts for t in part
            ]
            policy = data.draw(st.sampled_from([Full(), *EVERYTHING]))
            sampling = SamplingParams(max_tokens=data.draw(st.integers(1, 50)), ignore_eos=True)
            requests.append(Request(prompt, policy, sampling, return_logits=True))
            prompts.append(prompt)
        for prompt, result in zip(prompts, engine.generate(requests), strict=True):
            if result.error is None:
                assert difference(result, masked_logits(decoder, prompt)[-1]) < TOLERANCE
            else:
                assert "the KV pool must be larger" in result.error
        engine.check()
        assert engine.memory.pool.num_used == 0


@pytest.mark.parametrize("head_paging", [False, True])
@pytest.mark.parametrize("count", [5, 40, 131])
def test_a_prompt_computed_here_is_answered_there(
    model_dir: Path, tmp_path: Path, count: int, head_paging: bool
):
    path, prompt = tmp_path / "payload.safetensors", tokens(count, 1)
    here, there = (
        Engine(model_dir, dtype="float32", head_map=head_map(model_dir), head_paging=head_paging)
        for _ in range(2)
    )
    request = Request(prompt, "full", SamplingParams(max_tokens=50, ignore_eos=True))
    assert here.prefill(request, path).prompt_tokens == count
    here.check()
    assert here.memory.pool.num_used == 0
    result = there.resume(path)
    assert result.token_ids == here.generate([request])[0].token_ids
    assert result.finish_reason == "length"
    there.check()
    assert there.memory.pool.num_used == 0
    assert ask(there, prompt, Full()).report.prefix_tokens == 0


def test_local_heads_send_sinks_and_windows_only(model_dir: Path, tmp_path: Path):
    sizes = {}
    for head_paging in (False, True):
        engine = Engine(
            model_dir, dtype="float32", head_map=head_map(model_dir), head_paging=head_paging
        )
        engine.prefill(Request(tokens(400, 1)), tmp_path / "payload")
        sizes[head_paging] = sum(
            tensor.nbytes for tensor in load_file(tmp_path / "payload").values()
        )
    per_token = 2 * 32 * 4  # keys and values of a head of 32 numbers
    assert sizes[False] == 8 * 400 * per_token
    assert sizes[True] == (2 * 400 + 6 * (SINKS + WINDOW - 1)) * per_token


def test_payloads_that_do_not_fit_are_refused(
    model_dir: Path, model_dirs: dict[str, Path], tmp_path: Path
):
    engine, other = Engine(model_dir, dtype="float32"), Engine(model_dirs["llama"], dtype="float32")
    path = tmp_path / "payload"
    with pytest.raises(FileNotFoundError, match="no such file"):
        engine.resume(path)
    other.prefill(Request(tokens(20, 1)), path)
    with pytest.raises(ValueError, match=r"was computed by model [0-9a-f]+\.\.\., not by this one"):
        engine.resume(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no payload"):
        engine.resume(path)
    engine.prefill(Request(tokens(20, 1)), path)
    stored, header = load_file(path), dict(safe_open(path, "pt").metadata())
    save_file(stored | {"keys.0": stored["keys.0"][:, :-1].contiguous()}, path, header)
    with pytest.raises(ValueError, match="its tensors do not fit its header"):
        engine.resume(path)
    with pytest.raises(RequestError, match="the answer ends with its first token"):
        engine.prefill(Request(tokens(20, 1), None, SamplingParams(max_tokens=1)), path)
    small = Engine(model_dir, dtype="float32", num_pages=4)
    with pytest.raises(RequestError, match="the KV pool must be larger"):
        small.prefill(Request(tokens(100, 1)), path)
    engine.prefill(Request(tokens(100, 1)), path)
    with pytest.raises(PoolExhausted, match="8 pages needed, 4 are free"):
        small.resume(path)
    small.check()


def test_maps_that_do_not_fit_are_refused(model_dirs: dict[str, Path], model_dir: Path):
    for changed, message in (
        (head_map(model_dirs["llama"]), "made for model"),
        (head_map(model_dir, CLASSES[:3]), "2 classes in each of 4 layers"),
        (head_map(model_dir, [(L, L)] * 4), "at least one must see everything"),
        (head_map(model_dir, window=0), "window at least 1, got 3 and 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model_dir, head_map=changed)
    with pytest.raises(ValueError, match="head_paging needs a head map"):
        Engine(model_dir, head_paging=True)


def test_another_map_is_another_cache(model_dir: Path):
    scopes = set()
    for classes, paging in ((CLASSES, False), (CLASSES, True), ([(G, G), *CLASSES[1:]], True)):
        engine = Engine(model_dir, head_map=head_map(model_dir, classes), head_paging=paging)
        scopes.add(engine.scope_of("default"))
    assert len(scopes) == 3


def test_maps_are_read_as_they_are_written(model_dir: Path, tmp_path: Path):
    path = tmp_path / "heads.json"
    head_map(model_dir).save(path)
    assert HeadMap.load(path) == head_map(model_dir)
    path.write_text('{"model": "x", "sinks": 1, "window": 4, "classes": [["sideways"]]}')
    with pytest.raises(ValueError, match=r"heads.json is no head map: .*sideways"):
        HeadMap.load(path)
