from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvgraft import Engine, Policy, Request, RequestError, SamplingParams, Segment
from kvgraft.engine.options import EngineOptions
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.setting_schema import declarations
from models import VOCAB_SIZE


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def request(count: int, seed: int = 0, max_tokens: int = 8, **fields: object) -> Request:
    return Request(
        tokens(count, seed), "full", SamplingParams(max_tokens, ignore_eos=True), **fields
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(model_dirs: dict[str, Path]) -> Engine:
    return Engine(model_dirs["llama"], dtype="float32")


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.clear_cache()
    return shared


def test_greedy_generation_equals_transformers(engine: Engine, model_dirs: dict[str, Path]):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"], dtype=torch.float32)
    prompts = [tokens(n, n) for n in (1, 16, 33, 100)]
    ours = engine.generate(
        [Request(p, "full", SamplingParams(20, ignore_eos=True)) for p in prompts]
    )
    for prompt, result in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert result.token_ids == theirs[0, ids.shape[1] :].tolist()


def test_batched_decoding_equals_one_at_a_time(engine: Engine):
    requests = [
        request(count, count, max_tokens)
        for count, max_tokens in ((5, 20), (90, 3), (17, 11), (200, 1))
    ]
    together = [r.token_ids for r in engine.generate(requests)]
    engine.clear_cache()
    assert together == [engine.generate([one])[0].token_ids for one in requests]


def test_sampling_depends_on_the_seed_only(engine: Engine):
    def sampled(seed: int) -> Request:
        return Request(
            tokens(20), "full", SamplingParams(12, temperature=1.0, top_p=0.95, top_k=50, seed=seed)
        )

    alone = engine.generate([sampled(1)])[0].token_ids
    batch = [r.token_ids for r in engine.generate([sampled(2), sampled(1), sampled(1)])]
    assert batch[1] == batch[2] == alone
    assert batch[0] != alone


def test_streaming_gives_the_same_text_piece_by_piece(engine: Engine):
    requests = [request(10, 1), request(30, 2, max_tokens=3)]
    results = engine.generate(requests)
    engine.clear_cache()
    pieces, final = {0: "", 1: ""}, {}
    for event in engine.stream(requests):
        assert event.index not in final
        pieces[event.index] += event.text
        if event.result:
            final[event.index] = event.result
    assert (
        pieces
        == {i: r.text for i, r in enumerate(results)}
        == {i: r.text for i, r in final.items()}
    )


def test_streams_can_be_interleaved_and_abandoned(engine: Engine):
    alone = engine.generate([request(20, 1)])[0].text
    engine.clear_cache()
    kept, dropped = engine.stream([request(20, 1)]), engine.stream([request(40, 2, max_tokens=50)])
    text = next(kept).text
    next(dropped)
    next(dropped)
    dropped.close()
    text += "".join(event.text for event in kept)
    assert text == alone
    engine.check()
    assert engine.memory.pool.num_used == 0


def test_stop_strings_end_the_text_before_them(engine: Engine):
    text = engine.generate([request(20, 1, max_tokens=12)])[0].text
    words = text.split()
    stop = words[4]
    sampling = SamplingParams(12, stop=(stop,), ignore_eos=True)
    result = engine.generate([Request(tokens(20, 1), "full", sampling)])[0]
    assert result.finish_reason == "stop"
    assert result.text == text[: text.index(stop)]


def test_eos_ends_the_answer(model_dirs: dict[str, Path], engine: Engine):
    token = engine.generate([request(20, 1)])[0].token_ids[3]
    other = Engine(model_dirs["llama"], dtype="float32")
    other.scheduler.decoder.config = type(other.config)(
        **{**vars(other.config), "eos_token_ids": (token,)}
    )
    result = other.generate([Request(tokens(20, 1), "full", SamplingParams(8))])[0]
    assert result.finish_reason == "eos"
    assert result.token_ids[-1] == token
    assert len(result.token_ids) <= 4


def test_a_full_pool_makes_requests_wait_not_fail(model_dirs: dict[str, Path], engine: Engine):
    small = Engine(model_dirs["llama"], dtype="float32", num_pages=10, poison_dropped_pages=True)
    requests = [request(60, seed, max_tokens=30) for seed in range(7)]
    results = small.generate(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in engine.generate(requests)]
    small.check()
    assert small.memory.pool.num_used == 0


def test_grafts_are_given_up_when_their_sources_fill_the_pool(
    model_dirs: dict[str, Path], engine: Engine, caplog: pytest.LogCaptureFixture
):
    small = Engine(model_dirs["llama"], dtype="float32", num_pages=10, poison_dropped_pages=True)
    small.generate([request(80, 1, max_tokens=1)])
    prompt = tokens(17, 2) + tokens(80, 1)
    result = small.generate([Request(prompt, "naive", SamplingParams(4, ignore_eos=True))])[0]
    assert result.report.fallback == "pool_pressure"
    assert small.memory.fallbacks["pool_pressure"] == 1
    assert [record.getMessage() for record in caplog.records] == [
        "request 0 falls back to full recomputation: pool_pressure"
    ]
    expected = engine.generate(
        [Request(prompt, "full", SamplingParams(4, ignore_eos=True), "elsewhere")]
    )[0]
    assert result.token_ids == expected.token_ids


def test_a_request_that_can_never_fit_ends_with_an_error_and_the_others_go_on(
    model_dirs: dict[str, Path],
):
    small = Engine(model_dirs["llama"], dtype="float32", num_pages=4)
    results = small.generate([request(20, 1), request(100, 2), request(20, 3)])
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert (
        results[1].error
        == "7 pages needed, 4 of 4 can be freed (0 are pinned): the KV pool must be larger"
    )
    small.check()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request(""), "request 0: the prompt has no tokens"),
        (Request([]), "request 0: the prompt has no tokens"),
        (Request([7, VOCAB_SIZE]), "token ids must be in 0..199, got 7..200"),
        (Request([-1]), "token ids must be in 0..199, got -1..-1"),
        (Request("w3", policy="magic"), "unknown policy 'magic'"),
        (
            Request("w3", policy="sparsex:recompute_share=7"),
            "recompute_share must be a share from 0 to 1, got 7",
        ),
        (request(600), "600 prompt tokens and 8 to generate exceed the limit of 512"),
        (
            request(100, max_tokens=500),
            "100 prompt tokens and 500 to generate exceed the limit of 512",
        ),
        (Request([1.5]), "request 0"),  # type: ignore[list-item]
    ],
)
def test_bad_requests_are_refused_before_anything_runs(engine: Engine, bad: Request, message: str):
    with pytest.raises(RequestError, match=message):
        engine.generate([bad, request(5)])
    assert not engine.scheduler.waiting


def test_a_prompt_by_itself_is_one_prompt(engine: Engine):
    ids = tokens(20)
    text = engine.tokenizer.decode(ids)
    for prompts, expected in (
        (text, [text]),
        (ids, [ids]),
        (np.array(ids), [ids]),
        (tuple(ids), [ids]),
        (Request(ids), [ids]),
        ([ids, ids[:7]], [ids, ids[:7]]),
        ((one for one in (text, ids)), [text, ids]),
        ([], []),
    ):
        results = engine.generate(prompts)  # type: ignore[arg-type]
        wanted = engine.generate([Request(one) for one in expected])
        assert [result.token_ids for result in results] == [result.token_ids for result in wanted]
        assert [result.report.prompt_tokens for result in results] == [
            result.report.prompt_tokens for result in wanted
        ]
    assert {event.index for event in engine.stream(text)} == {0}
    pinned = [engine.pin("text", one) for one in (ids, Request(ids))]
    engine.pins.delete("text", "default")
    assert len(pinned[0].pages) == len(pinned[1].pages) == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"hello", "request 0 is of type bytes: must be text, token ids or a Request"),
        (5, "request 0 is of type int"),
        ({"prompt": "hello"}, "request 0 is of type dict"),
        (["hello", {"prompt": "hello"}], "request 1 is of type dict"),
        (
            ["hello", Segment("hello")],
            r"request 1 is of type Segment: .* \(parts: Request\(\[\.\.\.\]\)\)",
        ),
        ([[]], "request 0 is of type list"),
        ([[1, 2.5]], "request 0 is of type list"),
    ],
)
def test_what_is_no_prompt_is_refused(engine: Engine, prompts: object, message: str):
    with pytest.raises(RequestError, match=message):
        engine.generate(prompts)  # type: ignore[arg-type]


def test_parts_and_text_give_the_same_answer(engine: Engine):
    text = engine.generate([Request("w5 w6 w7 w8", "full")])[0]
    parts = engine.generate([Request(["w5", Segment("w6 w7"), "w8"], "full")])[0]
    assert text.token_ids == parts.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of float32, bfloat16, float16"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens must be an integer of at least 1, got 0"),
        ({"max_length": 10_000}, "max_length 10000 is not in 2..512"),
        ({"policy": "magic"}, "unknown policy"),
        ({"device": "tpu"}, "device 'tpu' is not available: choose from cpu"),
        ({"watermark": 2.0}, "watermark must be a share above 0, up to 1, got 2.0"),
        ({"num_pages": 0}, "num_pages must be an integer of at least 1, got 0"),
        ({"kv_gib": 0.0}, "kv_gib must be a number above 0, got 0.0"),
        ({"kv_gib": 1e-9}, "num_pages and block_size must be positive"),
        ({"policy": 3}, "policy must be a name or name:option=value,..., got 3"),
        ({"head_map": 3}, "head_map must be a path, got 3"),
        ({"store": "DIR"}, "store must be StoreOptions, got 'DIR'"),
        ({"continuation": 1}, "continuation must be true or false, got 1"),
        ({"exactness_weight": 2}, "exactness_weight must be a share from 0 to 1, got 2"),
    ],
)
def test_bad_engine_options_are_refused(
    model_dirs: dict[str, Path], options: dict[str, object], message: str
):
    with pytest.raises(ValueError, match=message):
        Engine(model_dirs["llama"], **options)  # type: ignore[arg-type]


def test_the_keywords_of_an_engine_are_its_declared_options(model_dirs: dict[str, Path]):
    assert list(signature(Engine).parameters) == ["model_dir", *declarations(EngineOptions)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocksize'"):
        Engine(model_dirs["llama"], blocksize=16)


def test_prompts_of_one_batch_share_its_time_by_what_they_computed(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["llama"], dtype="float32", num_pages=40)
    short, long = (result.report for result in engine.generate([request(40, 1), request(200, 2)]))
    assert short.stages["dense"] / long.stages["dense"] == pytest.approx(40 / 200)


def test_pinned_text_outlives_a_flood_and_is_reused(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["llama"], dtype="float32", num_pages=40, poison_dropped_pages=True)
    manual = tokens(100, 1)
    entry = engine.pin("manual", Request(manual))
    assert len(entry.pages) == 6
    for seed in range(10, 20):
        engine.generate([request(200, seed, max_tokens=1)])
    ask = Request(tokens(9, 2) + manual, "naive", SamplingParams(1), remember=False)
    assert engine.generate([ask])[0].report.grafted_tokens >= 95
    engine.check()
    engine.pins.delete("manual", "default")
    for seed in range(20, 30):
        engine.generate([request(300, seed, max_tokens=1)])
    assert engine.generate([ask])[0].report.grafted_tokens == 0
    engine.check()


def test_pinned_text_is_shed_when_requests_need_the_room(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["llama"], dtype="float32", num_pages=20, watermark=0.9)
    engine.pin("used", Request(tokens(70, 1)))
    engine.pin("unused", Request(tokens(70, 2)))
    engine.generate(
        [Request(tokens(5, 3) + tokens(70, 1), "naive", SamplingParams(1), remember=False)]
    )
    engine.generate([request(200, 4, max_tokens=1)])  # 13 pages and 8 pinned ones: above 18
    assert {entry.name: len(entry.pages) for entry in engine.pins.list()} == {
        "used": 4,
        "unused": 1,
    }
    engine.check()


def test_a_request_does_not_shed_what_it_uses_itself(model_dirs: dict[str, Path]):
    """Even if nobody used it before: its own pages would free nothing."""
    engine = Engine(model_dirs["llama"], dtype="float32", num_pages=20, watermark=0.9)
    engine.pin("wanted", Request(tokens(70, 1)))
    engine.pin("other", Request(tokens(70, 2)))
    ask = Request(
        tokens(5, 3) + tokens(70, 1) + tokens(100, 4), "naive", SamplingParams(1), remember=False
    )
    [result] = engine.generate([ask])  # 11 pages and 8 pinned ones: above 18
    assert result.report.grafted_tokens >= 64
    assert {entry.name: len(entry.pages) for entry in engine.pins.list()} == {
        "wanted": 4,
        "other": 3,
    }
    engine.check()


def test_a_request_that_has_to_wait_sheds_nothing(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["llama"], dtype="float32", num_pages=20)
    engine.pin("manual", Request(tokens(70, 1)))  # 4 pages
    running = engine.stream([request(100, 2, max_tokens=100)])  # 13 pages
    next(running)
    # 8 pages: 4 pinned ones would not help
    waiting = engine.stream([request(100, 3, max_tokens=20)])
    next(waiting)  # steps until the other has ended
    assert len(engine.pins.list()[0].pages) == 4
    list(running)
    list(waiting)
    engine.check()


@dataclass(frozen=True)
class Broken(Policy):
    name: ClassVar[str] = "broken"

    def recover(self, ctx: PrefillContext) -> Hidden:
        raise ArithmeticError("a mistake of its author")


def test_a_failing_policy_leaves_no_request_half_prefilled(model_dirs: dict[str, Path]):
    """A step that another stream drives admits the broken request; it must not go on to decode
    unwritten pages."""
    engine = Engine(
        model_dirs["llama"], dtype="float32", max_prefill_tokens=32, poison_dropped_pages=True
    )
    engine.generate([request(32, 9)])
    first = engine.stream([request(30, 1, max_tokens=30), Request([7, *tokens(32, 9)], Broken())])
    next(first)
    with pytest.raises(ArithmeticError, match="a mistake of its author"):
        next(engine.stream([request(20, 3)]))
    with pytest.raises(ArithmeticError, match="a mistake of its author"):
        list(first)
    engine.check()
    assert engine.memory.pool.num_used == 0
    assert engine.generate([request(20, 3)])[0].finish_reason == "length"


def test_pinning_too_much_or_nothing_is_refused(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["llama"], dtype="float32", num_pages=20)
    with pytest.raises(ValueError, match="'short': the text fills no whole block"):
        engine.pin("short", "w3")
    with pytest.raises(
        ValueError, match="'long' needs 12 pinned pages, but 0 of at most 10 are taken"
    ):
        engine.pin("long", Request(tokens(200)))
    engine.check()


def test_the_report_adds_up(engine: Engine):
    known = tokens(80, 1)
    engine.generate([Request(known, "full")])
    prompt = known[:40] + tokens(3, 2) + known[40:] + tokens(4, 3)
    report = engine.generate([Request(prompt, "sparsex:boundary_layers=2,overflow_blocks=0")])[
        0
    ].report
    assert report.prefix_tokens == 32
    assert (
        report.prefix_tokens + report.grafted_tokens + report.fresh_tokens
        == report.prompt_tokens
        == 87
    )
    assert 0 < report.recomputed_tokens <= report.grafted_tokens
    assert {"queue", "match", "align", "dense", "select", "sparse"} == set(report.stages)
    assert sum(report.stages.values()) <= report.ttft_s
    assert 0 < report.computed_share < 1
    assert report.policy == "sparsex"


def test_floating_point_operations_are_counted(engine: Engine, model_dirs: dict[str, Path]):
    """Of every linear layer of transformers' model twice its weights a token, and both products of
    attention."""
    import torch
    from transformers import AutoModelForCausalLM

    layer = AutoModelForCausalLM.from_pretrained(model_dirs["llama"]).model.layers[0]
    linear = [
        module.weight.numel() for module in layer.modules() if isinstance(module, torch.nn.Linear)
    ]
    config, known = engine.config, tokens(64, 1)
    by_key = 4 * config.num_heads * config.head_dim
    full = engine.generate([Request(known, "full")])[0].report
    assert full.flops == config.num_layers * (64 * 2 * sum(linear) + by_key * (64 * 65 // 2))
    [naive, probe] = (
        engine.generate([Request([5, *known, 9], policy, remember=False)])[0].report
        for policy in ("naive", "transitive:hops=0,recompute_share=0.0,probe_layers=0")
    )
    seen = 1 + 66  # keys that the first and the last token attend to
    assert naive.flops == config.num_layers * (2 * 2 * sum(linear) + by_key * seen)
    projected = (
        2 * config.hidden_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    )
    assert probe.flops == naive.flops + 2 * projected + by_key // 2 * 66


def test_padding_aligns_segments_to_blocks(
    model_dirs: dict[str, Path], engine: Engine, tmp_path: Path
):
    from models import make_model

    directory = make_model(tmp_path, "llama")
    with pytest.raises(ValueError, match="pad_segments needs a tokenizer with a pad token"):
        Engine(model_dirs["llama"], pad_segments=True)
    engine.tokenizer.pad_token = "<unk>"
    engine.tokenizer.save_pretrained(directory)
    padded = Engine(directory, dtype="float32", pad_segments=True)
    segment = Segment(" ".join(f"w{i}" for i in range(3, 3 + 32)))
    sampling = SamplingParams(1, ignore_eos=True)
    first = padded.generate([Request(["w5 w6", segment, "w7"], "full", sampling)])[0].report
    assert first.prompt_tokens == 16 + 32 + 1
    again = padded.generate([Request(["w9 " * 20, segment, "w8"], "naive", sampling)])[0].report
    assert again.prompt_tokens == 32 + 32 + 1
    assert again.grafted_tokens >= 32


def test_anchors_make_the_tokens_of_a_passage_independent_of_what_precedes_it(tmp_path: Path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from models import make_model

    directory = make_model(tmp_path, "llama", vocab_size=300)
    newline, *others = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: c != "\u010a")
    vocabulary = {piece: i for i, piece in enumerate([newline, *others, f".{newline}"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(".", newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    passage = "\nPassage: the bell is blue and old."

    def ids(engine: Engine, text: str) -> list[int]:
        return engine.token_ids(Request(text, sampling=SamplingParams(1)))

    plain, anchored = Engine(directory), Engine(directory, anchors=["\nPassage:"])
    alone = ids(anchored, passage)
    assert ids(anchored, "so he said." + passage)[-len(alone) :] == alone
    assert ids(plain, "so he said." + passage)[-len(alone) :] != alone
