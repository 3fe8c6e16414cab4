"""Local heads as sinks and windows in vLLM: its answers are those of the native engine on the same
head map."""

from dataclasses import replace as replace_field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import by_head_grafts
import numpy as np
import pytest
import torch
import warm
from engines import ENVIRONMENT, EVERYTHING, NAIVE, OFF, Ask, words
from family_engine import DOCUMENTS, PROMPT, WITH_WINDOWS
from jobs import KNOWN, MIXED, MOVED, follow, graft, natively
from msgspec.structs import replace
from test_compat import configure
from test_windows import check_every_end
from vllm import ModelRegistry
from vllm.config import KVTransferConfig, VllmConfig

from kvgraft import Engine, Request, SamplingParams
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.server.arguments import parse
from kvgraft.vllm.compat import BY_HEAD, FLOW, HEAD_MAP_DIGEST, support, transfer_config
from kvgraft.vllm.compat.families import BY_HEAD_ARCHITECTURES
from kvgraft.vllm.compat.group_attention import pseudo_sequences
from kvgraft.vllm.compat.support import UnsupportedConfiguration, check_head_map
from kvgraft.vllm.heads.attention import HeadBuilder, HeadPool
from kvgraft.vllm.heads.spec import SinkWindowSpec
from kvgraft.vllm.plugin import register
from models import make_head_map, make_model

WINDOW, SINKS, BLOCK = 96, 40, 32
REQUESTS = 40
BLOCKS, HEAD_DIM = 6, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 of 16 KV heads, of which 6 keep everything."""
    shape = {"num_hidden_layers": 4, "num_key_value_heads": 4, "num_attention_heads": 8}
    return make_model(
        tmp_path_factory.mktemp("by_head"), "qwen3", max_position_embeddings=4096, **shape
    )


@pytest.fixture(scope="module")
def head_map(model: Path) -> Path:
    path = model / "heads.json"
    make_head_map(model, window=WINDOW, sinks=SINKS).save(path)
    return path


@pytest.fixture(scope="module")
def native(model: Path, head_map: Path) -> Engine:
    return Engine(model, dtype="float32", head_map=head_map, head_paging=True)


def expected(native: Engine, prompt: list[int], max_tokens: int) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return native.generate([Request(prompt, "full", sampling, namespace="truth")])[0].token_ids


def settings_of(head_map: Path, **changes: Any) -> dict[str, Any]:
    return {
        "hf_overrides": {"architectures": ["KVGraftByHeadQwen3ForCausalLM"]},
        "additional_config": {"kvgraft_head_map": str(head_map)},
        "prefix_cache_retention_interval": None,
    } | changes


def run(
    model: Path, settings: dict[str, Any], rounds: list[list[tuple[list[int], int]]], **more: Any
) -> dict[str, Any]:
    """What `by_head.py` says of these rounds of (prompt, max_tokens)."""
    given = {"model": str(model), "settings": settings, "rounds": rounds} | more
    said: dict[str, Any] = warm.run(Path(__file__).with_name("by_head.py"), given, **ENVIRONMENT)
    assert said["left"] == said["blocks"], "all blocks come back"
    assert said["refs"] == 0
    return said


@pytest.fixture(scope="module")
def conversation(model: Path, head_map: Path) -> tuple[list[Any], dict[str, Any]]:
    shared = words(700, 4)
    rounds = [
        [(words(20, 1), 60)],
        [(words(300, 2), 60)],  # prompts of several steps of 256 tokens
        [(shared + words(40, 5), 30)],
        # a hit: the sinks, the last window, everything of the other heads
        [(shared + words(40, 6), 30)],
        [(words(450, 7), 5), (words(33, 8), 20), (shared + words(90, 9), 20)],
        [(shared + words(40, 10), 30)],  # after the first group of local heads has lost everything
    ]
    return rounds, run(
        model,
        settings_of(head_map, num_gpu_blocks_override=400),
        rounds,
        evict_before={"rounds": [5], "groups": [0]},
    )


@pytest.mark.slow
def test_answers_are_those_of_the_native_engine(
    native: Engine, conversation: tuple[list[Any], dict[str, Any]]
):
    rounds, said = conversation
    for asks, answers in zip(rounds, said["rounds"], strict=True):
        for (prompt, max_tokens), tokens in zip(asks, answers["tokens"], strict=True):
            assert tokens == expected(native, prompt, max_tokens)
    assert [answers["cached"] for answers in said["rounds"]] == [
        [0],
        [0],
        [0],
        [672],
        [0, 0, 672],
        [0],
    ]


@pytest.mark.slow
def test_one_call_serves_all_heads_of_a_layer(
    model: Path, head_map: Path, conversation: tuple[list[Any], dict[str, Any]]
):
    """As with Triton, here with our kernel for CPUs."""
    rounds, apart = conversation
    settings = settings_of(head_map, num_gpu_blocks_override=400, heads_together=True)
    together = run(model, settings, rounds, evict_before={"rounds": [5], "groups": [0]})
    assert (together["apart"], apart["apart"]) == (0, 6)
    for found, other in zip(together["rounds"], apart["rounds"], strict=True):
        assert found["likely"] == pytest.approx(other["likely"], abs=1e-4)
        for what in ("tokens", "cached", "held"):
            assert found[what] == other[what]
    assert together["groups"] == apart["groups"]


@pytest.mark.slow
def test_heads_that_see_everything_may_have_several_block_tables(model: Path, tmp_path: Path):
    """A KV cache group of vLLM has as few layers as the rarer kind of heads."""
    kinds = [[HeadClass.GLOBAL] * 3 + [HeadClass.LOCAL] for _ in range(4)]
    kinds[1] = kinds[1][::-1]
    given = HeadMap.load(model / "heads.json")
    path = tmp_path / "heads.json"
    replace(given, classes=tuple(map(tuple, kinds))).save(path)
    asks = [(words(300, 2), 20), (words(90, 3), 20)]
    settings = settings_of(path, num_gpu_blocks_override=400, heads_together=True)
    said = run(model, settings, [asks])
    assert [kind for kind, _ in said["groups"]].count("FullAttentionSpec") > 1
    assert said["apart"] == 0
    native = Engine(model, dtype="float32", head_map=path, head_paging=True)
    assert said["rounds"][0]["tokens"] == [expected(native, *ask) for ask in asks]


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_a_compiled_model_attends_by_head(
    model: Path, head_map: Path, native: Engine, together: bool
):
    asks = [(words(300, 2), 20), (words(90, 3), 20)]
    settings = settings_of(head_map, enforce_eager=False, heads_together=together)
    said = run(model, settings, [asks])
    assert (said["apart"] == 0) is together
    assert said["additional_config"][HEAD_MAP_DIGEST] == HeadMap.load(head_map).digest
    assert said["rounds"][0]["tokens"] == [expected(native, *ask) for ask in asks]


@pytest.mark.slow
def test_layers_of_one_local_head_get_the_changes_that_a_policy_spreads(tmp_path: Path):
    """As where each tensor-parallel rank has one KV head."""
    shape = {"num_hidden_layers": 6, "num_key_value_heads": 1, "num_attention_heads": 4}
    model = make_model(tmp_path / "one", "qwen3", max_position_embeddings=4096, **shape)
    path = model / "heads.json"
    make_head_map(model, window=WINDOW, sinks=SINKS).save(path)
    policies = ["spread", "spread:spread_share=0.0"]
    prompt = MOVED[: 7 + 17 * BLOCK] + words(20, 9)
    engine = {"model": str(model), "num_gpu_blocks_override": 300} | settings_of(path)
    [found] = graft([prompt], [{"policy": name} for name in policies], [KNOWN], engine=engine)

    native = Engine(model, dtype="float32", head_map=path, head_paging=True, block_size=BLOCK)
    native.generate([Request(KNOWN, "full", SamplingParams(max_tokens=1))])
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    for name, one in zip(policies, found, strict=True):
        asked = Request(prompt, name, sampling, remember=False, return_logits=True)
        [answer] = native.generate([asked])
        assert one["report"]["grafted_tokens"] == answer.report.grafted_tokens > 500
        assert one["tokens"] == answer.token_ids
        assert answer.logits is not None
        chosen = torch.tensor(answer.token_ids)[:, None]
        expected_logprobs = answer.logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        assert one["logprobs"] == pytest.approx(expected_logprobs, abs=1e-4)
    assert found[0]["logprobs"] != pytest.approx(found[1]["logprobs"], abs=1e-4)


@pytest.mark.slow
def test_heads_that_see_everything_follow_a_flow(model: Path, head_map: Path):
    flow, text = "quest:topk_blocks=3", words(15 * BLOCK, 1)
    both = settings_of(head_map)["additional_config"] | {FLOW: flow}
    grafted = Ask(words(33, 5) + text + words(60, 6), NAIVE, max_tokens=24)
    said = follow(
        model,
        flow,
        MIXED,
        [Ask(text, max_tokens=1)],
        [grafted],
        settings=settings_of(head_map, additional_config=both, num_gpu_blocks_override=600),
    )
    engine = Engine(model, dtype="float32", block_size=BLOCK, head_map=head_map, head_paging=True)
    assert said["tokens"][0] == natively(engine, flow, MIXED) != natively(engine, "dense", MIXED)
    assert said["taken_up"] > 0
    assert (said["stale"], said["misread"], said["problems"]) == (0, 0, [])
    assert said["grafted"][2] == [len(text)]


@pytest.mark.slow
def test_the_last_token_of_a_prompt_sees_the_windows_of_local_heads(model: Path, head_map: Path):
    check_every_end({"model": str(model)} | settings_of(head_map))


@pytest.mark.slow
def test_a_store_gives_back_the_kv_of_all_heads(
    model: Path, head_map: Path, native: Engine, tmp_path: Path
):
    """And nothing under another head map, whose model is another one. A flow reads what came
    back."""
    other = tmp_path / "other.json"
    make_head_map(model, window=WINDOW - BLOCK, sinks=SINKS).save(other)
    engine, elsewhere = (
        {"model": str(model), "num_gpu_blocks_override": 41 * 3} | settings_of(path)
        for path in (head_map, other)
    )
    store, options = str(tmp_path / "store"), [NAIVE, EVERYTHING, OFF]
    graft([], [], [KNOWN], engine=engine, store_dir=store)
    moved, known = graft([MOVED, KNOWN], options, [], engine=engine, store_dir=store)
    assert moved[0]["report"]["grafted_tokens"] == moved[1]["report"]["grafted_tokens"] >= 544
    assert moved[1]["tokens"] == expected(native, MOVED, 16)
    assert known[-1]["report"]["prefix_tokens"] == 576
    assert known[-1]["tokens"] == expected(native, KNOWN, 16)
    [found] = graft([MOVED], [NAIVE], [], engine=elsewhere, store_dir=store)
    assert found[0]["report"]["grafted_tokens"] == 0
    flow = "quest:topk_blocks=3"
    engine["additional_config"] = engine["additional_config"] | {FLOW: flow}
    prompt = [17, *MOVED]  # the other one is stored as a whole by now
    [[under_flow]] = graft([prompt], [EVERYTHING], [], engine=engine, store_dir=store)
    assert under_flow["report"]["grafted_tokens"] >= 544
    blocks = Engine(model, dtype="float32", block_size=BLOCK, head_map=head_map, head_paging=True)
    assert [under_flow["tokens"]] == natively(blocks, flow, [Ask(prompt, max_tokens=16)])
    assert under_flow["tokens"] != expected(native, prompt, 16)


@pytest.mark.slow
def test_the_pool_holds_sinks_and_windows_only(conversation: tuple[list[Any], dict[str, Any]]):
    _, said = conversation
    kinds = dict(map(tuple, said["groups"]))
    assert kinds == {"SinkWindowSpec": 5, "FullAttentionSpec": 6}
    local = [number for number, (kind, _) in enumerate(said["groups"]) if kind == "SinkWindowSpec"]
    # [steps, groups] while a prompt of 740 tokens is answered
    held = np.array(said["rounds"][2]["held"])
    assert held[1:, local].max() <= 2 + -(-WINDOW // BLOCK) + 1
    assert held[:, [g for g in range(held.shape[1]) if g not in local]].min() == -(-740 // BLOCK)


@pytest.mark.soak
def test_more_sessions_are_admitted_in_the_same_memory(model: Path, head_map: Path, native: Engine):
    """1000 tokens take 32 blocks of 6 heads that keep everything and 7 of the 10 others, instead of
    32 of 16."""
    sessions = [[(words(1000, seed), 40) for seed in range(10)]]
    plain = run(
        model, {"kv_cache_memory_bytes": 12 << 20, "num_gpu_blocks_override": None}, sessions
    )
    ours = run(
        model,
        settings_of(head_map, kv_cache_memory_bytes=12 << 20, num_gpu_blocks_override=None),
        sessions,
    )
    assert ours["most_decoding"] >= 1.7 * plain["most_decoding"] > 0
    for (prompt, max_tokens), tokens in zip(sessions[0], ours["rounds"][0]["tokens"], strict=True):
        assert tokens == expected(native, prompt, max_tokens)


@pytest.mark.soak
def test_a_full_pool_preempts_and_answers_all_the_same(model: Path, head_map: Path, native: Engine):
    rounds = [[(words(200 + 10 * seed, seed), 200) for seed in range(6)]]
    said = run(model, settings_of(head_map, num_gpu_blocks_override=90, max_model_len=512), rounds)
    assert said["preempted"] > 0
    for (prompt, max_tokens), tokens in zip(rounds[0], said["rounds"][0]["tokens"], strict=True):
        assert tokens == expected(native, prompt, max_tokens)


@pytest.fixture(scope="module")
def grafts(model: Path, head_map: Path) -> dict[str, Any]:
    return grafts_of(model, head_map)


def grafts_of(model: Path, head_map: Path, **settings: Any) -> dict[str, Any]:
    """What is reused of known text where local heads keep sinks and windows, and plain vLLM's
    answers on such heads."""
    engine = settings_of(head_map, num_gpu_blocks_override=600, **settings)
    job = {"model": str(model), "engine": engine, "latent": False, "requests": REQUESTS}
    facts: dict[str, Any] = warm.run(
        Path(__file__).with_name("family_engine.py"), job, **ENVIRONMENT
    )
    return facts


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache_dtype": "fp8"}, {"heads_together": True}],
    ids=["numbers", "fp8", "heads together"],
)
def test_grafts_go_beside_heads_that_keep_sinks_and_windows(
    model: Path, head_map: Path, settings: dict[str, Any], request: pytest.FixtureRequest
):
    if settings:
        grafts = grafts_of(model, head_map, **settings)
    else:
        grafts = request.getfixturevalue("grafts")
    if "heads_together" in settings:
        others = request.getfixturevalue("grafts")
        for name in ("naive", "with windows", "redknot"):
            assert grafts[name]["tokens"] == others[name]["tokens"]
    plain = grafts["plain"]
    assert grafts["groups"].count("SinkWindowSpec") > 1
    for policy in ("sparsex", "spread"):  # all of it recomputed
        assert grafts[policy]["tokens"] == plain
        assert (
            grafts[policy]["report"]["recomputed_tokens"]
            == grafts[policy]["report"]["grafted_tokens"]
            > 480
        )
    assert grafts["naive"]["report"]["grafted_tokens"] > 480
    assert grafts["copied"], "grafted values are those of the source"
    assert grafts["poisoned"]["tokens"] != grafts["naive"]["tokens"]
    assert grafts["beginning"] == 96, "what stands before the grafts is an exact prefix for others"
    assert grafts["elsewhere"] == 0
    assert grafts["problems"] == []
    assert grafts["wrong"] == [], "exact answers beside grafts are those without"
    assert grafts["num_exact"] > REQUESTS / 4
    assert grafts["counts"]["outcome grafted"] > 1
    assert grafts["near_duplicates"]["tokens"] == grafts["plain_edited"]
    assert grafts["documents"]["reason"] == "unsupported_model"
    assert (
        grafts["redknot"]["report"]["grafted_tokens"]
        == grafts["redknot"]["report"]["recomputed_tokens"]
        > 480
    )
    assert grafts["with windows"]["report"]["grafted_tokens"] > 480


@pytest.mark.slow
@pytest.mark.parametrize("case", ["naive", "with windows"])
def test_grafts_answer_as_in_the_native_engine(
    model: Path, head_map: Path, grafts: dict[str, Any], case: str
):
    """Block tables by head here, page lists by class there."""
    found = grafts[case]
    engine = Engine(model, dtype="float32", head_map=head_map, head_paging=True, block_size=BLOCK)
    for text in DOCUMENTS:
        engine.generate([Request(text, "full", SamplingParams(max_tokens=1))])
    sampling = SamplingParams(max_tokens=len(found["tokens"]), ignore_eos=True)
    [answer] = engine.generate(
        [Request(PROMPT, WITH_WINDOWS["policy"] if case == "with windows" else case, sampling)]
    )
    assert answer.report.grafted_tokens == found["report"]["grafted_tokens"]
    assert answer.token_ids == found["tokens"]


@pytest.fixture(scope="module")
def paged(model: Path, head_map: Path) -> dict[str, Any]:
    """What becomes of grafts and conversations of whose local heads something was reclaimed
    (`by_head_grafts.py`)."""
    given = {"model": str(model), "engine": settings_of(head_map, num_gpu_blocks_override=600)}
    facts: dict[str, Any] = warm.run(
        Path(__file__).with_name("by_head_grafts.py"), given, **ENVIRONMENT
    )
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("policy", by_head_grafts.POLICIES)
def test_what_local_heads_have_lost_is_computed_by_redknot_alone(
    model: Path, head_map: Path, paged: dict[str, Any], policy: str
):
    """The native engine, which loses the same, grafts as much and answers alike."""
    found, source = paged["reclaimed"][policy], by_head_grafts.SOURCE
    assert found["problems"] == []
    assert 0 < sum(found["complete"]) < len(found["complete"]) == len(source) // BLOCK
    engine = Engine(model, dtype="float32", head_map=head_map, head_paging=True, block_size=BLOCK)
    engine.generate([Request(source, "full", SamplingParams(max_tokens=1))])
    lookup, pool = engine.memory.lookup, engine.memory.pool
    pages = np.array(lookup.find_prefix(source, engine.scope_of("default")))
    pool._drop(lookup.local_pages.of(pages[~np.array(found["complete"])]).ravel().tolist())
    sampling = SamplingParams(max_tokens=len(found["tokens"]), ignore_eos=True)
    request = Request(by_head_grafts.PROMPT, by_head_grafts.POLICIES[policy]["policy"], sampling)
    [answer] = engine.generate([request])
    assert answer.report.grafted_tokens == found["report"]["grafted_tokens"]
    assert answer.token_ids == found["tokens"]
    assert found["again"] > 800 - 64 - BLOCK, "what has been computed anew is a source, too"
    if policy == "redknot":
        assert found["report"]["grafted_tokens"] == found["report"]["recomputed_tokens"] == 800 - 64
    else:
        assert 0 < found["report"]["grafted_tokens"] < 800 - 64 - BLOCK
    if policy == "sparsex":  # all of it recomputed
        assert found["tokens"] == expected(engine, by_head_grafts.PROMPT, len(found["tokens"]))


def kinds(turn: dict[str, Any]) -> tuple[int, int, int]:
    """Prefix, continued and grafted tokens."""
    report = turn["report"]
    return report["prefix_tokens"], report["continued_tokens"], report["grafted_tokens"]


@pytest.mark.slow
def test_conversations_go_on_beside_heads_that_keep_sinks_and_windows(
    native: Engine, paged: dict[str, Any]
):
    said = paged["conversations"]
    assert said["problems"] == []
    for policy in ("everything", "naive", "redknot"):
        assert [kinds(turn) for _, turn in said[policy]] == [
            (0, 0, 288),
            (64, 416 - 64, 0),
            (64, 512 - 64, 0),
        ]
    for prompt, turn in said["everything"]:
        assert turn["tokens"] == expected(native, prompt, len(turn["tokens"]))
    assert (
        said["elsewhere"]["tokens"]
        == said["everything"][1][1]["tokens"][: len(said["elsewhere"]["tokens"])]
    )
    assert kinds(said["elsewhere"]) == (0, 0, 0)


@pytest.mark.slow
def test_who_finds_no_window_to_go_on_with_is_computed_and_no_mixture(
    native: Engine, paged: dict[str, Any]
):
    said = paged["conversations"]
    assert [kinds(turn) for _, turn in said["lost"]] == [(0, 0, 288), (0, 0, 0), (0, 0, 0)]
    assert [kinds(turn) for _, turn in said["lost once"]] == [(0, 0, 288), (0, 0, 0), (512, 0, 0)]
    assert [kinds(turn) for _, turn in said["redknot lost"]][:2] == [(0, 0, 288), (0, 0, 384)]
    for prompt, turn in [*said["lost"], *said["lost once"][1:]]:
        assert turn["tokens"] == expected(native, prompt, len(turn["tokens"]))


@pytest.mark.slow
def test_what_local_heads_have_left_behind_of_a_prefix_is_never_read(
    native: Engine, paged: dict[str, Any]
):
    for answers in paged["prefix"].values():
        assert [kinds(answer) for answer in answers] == [(672, 0, 288)] * 3
        assert answers[0]["tokens"] == answers[1]["tokens"] == answers[2]["tokens"]
    assert answers[0]["tokens"] == expected(native, by_head_grafts.BEHIND, 8), (
        "local heads see windows"
    )


@pytest.mark.slow
def test_a_plan_that_waits_is_made_anew_when_local_heads_have_lost_what_it_takes_of_them(
    paged: dict[str, Any],
):
    assert paged["waiting"] == {
        "redknot": [736, 736, True],
        "naive": [736, 704, False],
        "sparsex": [736, 704, False],
    }


def config_of(model: Path, **changes: Any) -> VllmConfig:
    return configure(
        **{"model": str(model), "worker_cls": "auto", "kv_transfer_config": None} | changes
    )


def test_what_cannot_work_is_refused_with_every_reason(model: Path, head_map: Path, tmp_path: Path):
    assert check_head_map(config_of(model), str(head_map)).window == WINDOW
    assert (
        check_head_map(config_of(model, kv_transfer_config=transfer_config()), str(head_map)).window
        == WINDOW
    )
    theirs = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    for changes, reason in (
        ({"pipeline_parallel_size": 2}, "2 pipeline stages: they would have other heads"),
        ({"kv_transfer_config": theirs}, "KV connector 'ExampleConnector'"),
        ({"kv_cache_dtype": "nvfp4"}, "KV cache dtype nvfp4"),
        ({"disable_hybrid_kv_cache_manager": True}, "the hybrid KV cache manager off"),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                }
            },
            "speculative decoding",
        ),
    ):
        with pytest.raises(
            UnsupportedConfiguration, match=f"^heads cannot be kept by class with .*{reason}"
        ):
            check_head_map(config_of(model, **changes), str(head_map))
    with pytest.raises(UnsupportedConfiguration, match="no head map"):
        check_head_map(config_of(model), None)
    other = tmp_path / "other.json"
    HeadMap("0" * 64, SINKS, WINDOW, ((HeadClass.GLOBAL,) * 4,) * 4).save(other)
    with pytest.raises(ValueError, match="the head map was made for model 000000000000"):
        check_head_map(config_of(model), str(other))


def test_an_untested_version_is_refused_unless_it_is_allowed(
    model: Path, head_map: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(support, "vllm_version", lambda: "0.99.0")
    with pytest.raises(
        UnsupportedConfiguration,
        match=r"vLLM 0\.99\.0: supported are 0\.31 .*--kvgraft-allow-untested",
    ):
        check_head_map(config_of(model), str(head_map))
    allowed = parse(
        [str(model), "--kvgraft-head-paging", "--kvgraft-allow-untested"]
    ).additional_config
    assert (
        check_head_map(config_of(model, additional_config=allowed), str(head_map)).window == WINDOW
    )
    assert [record.message for record in caplog.records if "0.99.0 is not tested" in record.message]


def test_a_runner_that_asks_how_far_a_window_reaches_is_left_the_sinks():
    spec = SinkWindowSpec(
        block_size=32,
        num_kv_heads=1,
        head_size=32,
        dtype=torch.float32,
        sliding_window=WINDOW,
        sinks=SINKS,
    )
    for num_computed_tokens in (WINDOW + 1, 1 << 20):
        assert max(num_computed_tokens - spec.num_retained_tokens, 0) // spec.block_size == 0


@pytest.mark.slow
def test_a_quantised_cache_is_within_its_rounding(model: Path, head_map: Path, tmp_path: Path):
    """Of the first token's log-probability, with heads that keep all and without local ones."""
    shared = words(700, 4)
    rounds = [[(words(20, 1), 1), (words(300, 2), 1), (shared + words(40, 5), 1)],
              [(shared + words(40, 6), 1)]]  # fmt: skip
    by_map = HeadMap.load(head_map)
    everywhere = replace(by_map, window=4096)  # as with plain attention
    everywhere.save(tmp_path / "all.json")
    settings = [
        settings_of(path, num_gpu_blocks_override=1500)
        for path in (head_map, tmp_path / "all.json")
    ]
    by_head = [run(model, own | {"kv_cache_dtype": dtype}, rounds)
               for own in settings for dtype in ("auto", "fp8")]  # fmt: skip
    assert not any(said["zeroes"] for said in by_head), "vLLM clears no blocks before it uses them"
    found = [said["rounds"] for said in by_head]
    plain = [run(model, {"kv_cache_dtype": dtype}, rounds)["rounds"] for dtype in ("auto", "fp8")]
    likely = torch.tensor([
        [likely for answers in said for likely in answers["likely"]] for said in (*found, *plain)
    ])  # fmt: skip
    assert [answers["cached"] for answers in found[1]] == [[0, 0, 0], [672]]
    windows, all_tokens, stock = (likely[1::2] - likely[::2]).abs()
    assert 0 < windows.mean() < 2 * stock.mean()
    assert 0 < all_tokens.mean() < 2 * stock.mean()
    assert torch.allclose(likely[2], likely[4], atol=1e-4)


@pytest.mark.parametrize(
    ("cache_dtype", "quantisation", "is_refused"),
    [
        ("fp8", SimpleNamespace(kv_cache_scheme={"num_bits": 8}), True),
        ("auto", SimpleNamespace(kv_cache_scheme={"num_bits": 8}), True),
        ("bfloat16", SimpleNamespace(kv_cache_scheme={"num_bits": 8}), False),
        ("fp8", SimpleNamespace(kv_cache_scheme=None), False),  # of weights alone
        ("fp8", SimpleNamespace(), True),  # of a kind that does not say
        ("auto", SimpleNamespace(), False),
        ("fp8", None, False),
    ],
)
def test_scales_of_a_checkpoint_are_refused_with_a_quantised_cache(
    model: Path, head_map: Path, cache_dtype: str, quantisation: Any, is_refused: bool
):
    config = config_of(model, kv_cache_dtype=cache_dtype)
    config.quant_config = quantisation
    if not is_refused:
        assert check_head_map(config, str(head_map)).window == WINDOW
        return
    with pytest.raises(UnsupportedConfiguration, match="checkpoint that may have scales for it"):
        check_head_map(config, str(head_map))


@pytest.mark.parametrize("architecture", BY_HEAD_ARCHITECTURES)
def test_classes_by_head_are_vllms_with_other_attention(architecture: str):
    register()
    ours = ModelRegistry._try_load_model_cls(BY_HEAD + architecture)
    assert issubclass(ours, ModelRegistry._try_load_model_cls(architecture))
    assert ours.__name__ == architecture.replace("ForCausalLM", "ByHead")


@pytest.mark.slow
def test_experts_answer_as_in_the_native_engine(tmp_path: Path):
    model = make_model(tmp_path, "qwen3_moe", max_position_embeddings=4096)
    make_head_map(model, window=WINDOW, sinks=SINKS).save(model / "heads.json")
    native = Engine(model, dtype="float32", head_paging=True)
    asks = [(words(300, 2), 20), (words(90, 3), 20)]
    architectures = {"architectures": ["KVGraftByHeadQwen3MoeForCausalLM"]}
    settings = settings_of(model / "heads.json", hf_overrides=architectures)
    [answers] = run(model, settings, [asks])["rounds"]
    assert answers["tokens"] == [expected(native, *ask) for ask in asks]


def test_the_flag_names_model_class_and_map(model: Path, head_map: Path, tmp_path: Path):
    args = parse([str(model), "--kvgraft-head-paging"])
    given_plain = [str(model), "--kvgraft-head-paging", "--no-kvgraft"]
    assert args.hf_overrides == {"architectures": ["KVGraftByHeadQwen3ForCausalLM"]}
    assert args.additional_config == {"kvgraft_head_map": str(head_map)}
    assert args.kv_transfer_config.kv_connector == "KVGraftConnector"
    assert parse([*given_plain, "--kvgraft-head-map", str(head_map)]).kv_transfer_config is None
    elsewhere = head_map.rename(tmp_path / "map.json")
    given = [str(model), "--kvgraft-head-paging", "--kvgraft-head-map", str(elsewhere)]
    assert parse(given).additional_config == {"kvgraft_head_map": str(elsewhere)}
    with pytest.raises(
        ValueError,
        match=f"--kvgraft-head-paging: no head map {head_map}; run `kvgraft profile-heads",
    ):
        parse(given[:2])
    elsewhere.rename(head_map)
    beside = parse([*given[:2], "--flow", "quest", "--kvgraft-store-ram-gib", "1"])
    assert beside.additional_config == {"kvgraft_head_map": str(head_map), FLOW: "quest"}
    for more, message in (
        (
            ["--kvgraft-residual-layers", "1"],
            "--kvgraft-residual-layers does not go with --kvgraft-head-paging",
        ),
        (["--hf-overrides", '{"a": 1}'], "--hf-overrides does not go with --kvgraft-head-paging"),
    ):
        with pytest.raises(ValueError, match=message):
            parse([str(model), "--kvgraft-head-paging", *more])


def test_runs_of_a_prompt_share_what_they_read():
    """While they follow each other; otherwise rows would change places."""
    runs = [(0, 3, 5), (0, 9, 12), (1, 0, 2), (0, 20, 21), (0, 6, 7)]
    tables = [np.array([4, 2]), np.array([5])]
    common = pseudo_sequences(runs, tables, torch.zeros(9, dtype=torch.int64), lambda rows: rows)
    spec = SinkWindowSpec(
        block_size=16, num_kv_heads=1, head_size=4, dtype=torch.float32, sliding_window=8, sinks=4
    )
    builder = HeadBuilder(spec, ["a", "b"], None, torch.device("cpu"))
    found = builder.build(0, common)
    assert [part.tolist() for part in found.positions] == [[3, 4, 9, 10, 11], [0, 1], [20], [6]]
    assert [part.tolist() for part in found.pages] == [[4], [5], [4, 2], [4]]
    assert (found.group, found.is_local) == ("a", True)
    whole = replace_field(found, group="z", is_local=False, pages=[p + 9 for p in found.pages])
    layout = whole.layout(16, 4, 8, found)
    assert layout.complete_lists == 1
    assert [c.slots[:, 0].tolist() for c in layout.contexts[:2]] == [[13 * 16, 64], [14 * 16, 80]]


@pytest.mark.parametrize("outermost", ["heads", "blocks"])
def test_caches_of_one_allocation_are_streams_of_one_pool(outermost: str):
    whole = torch.zeros(5, BLOCKS, 1, BLOCK, 2 * HEAD_DIM)  # of five heads
    if outermost == "blocks":
        whole = torch.zeros(BLOCKS, 5, 1, BLOCK, 2 * HEAD_DIM).transpose(0, 1)
    pool = HeadPool.of([whole[4], whole[1], whole[2]])
    keys, values = (torch.randn(3, 2, HEAD_DIM) for _ in "kv")
    slots = torch.tensor([[70, -1], [3, 64], [BLOCK * BLOCKS - 1, 0]])
    pool.write(keys, values, slots)
    for head, number in enumerate((4, 1, 2)):
        rows = whole[number].reshape(-1, 2 * HEAD_DIM)
        written = torch.cat((keys[head], values[head]), dim=-1)
        assert rows[slots[head].clamp(min=0)].equal(written)
        at = slots[head].clamp(min=0) // BLOCK * pool.stride + slots[head].clamp(min=0) % BLOCK
        assert pool.rows.flatten(0, 1)[at + pool.streams[head] * pool.rows.shape[1]].equal(written)
    assert int(whole.abs().sum(-1).ne(0).sum()) == slots.numel()


def test_caches_of_several_allocations_are_refused():
    caches = [torch.zeros(BLOCKS, 1, BLOCK, 2 * HEAD_DIM) for _ in range(2)]
    with pytest.raises(ValueError, match="not rows of tokens in one allocation"):
        HeadPool.of(caches)
