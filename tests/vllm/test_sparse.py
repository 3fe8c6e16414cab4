"""Flows in vLLM: dense with all blocks, the native engine's answers with some, and caches that are
never stale."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from draft_models import make_eagle, make_target
from engines import BLOCK, EVERYTHING, NAIVE, OFF, Ask, words
from families import DEEPSEEK, make_family
from jobs import MIXED, natively
from jobs import follow as run
from processes import HostProcess
from test_compat import configure

from kvgraft import Engine
from kvgraft.server import serve
from kvgraft.server.arguments import parse
from kvgraft.vllm.compat import FLOW, WORKER_CLASS, transfer_config
from kvgraft.vllm.compat.support import UnsupportedConfiguration
from kvgraft.vllm.sparse.program import install
from kvgraft_lab.testbed import MODEL_DIR

MINE = Path(__file__).parents[2] / "docs" / "my_flow.py"  # a user's own
PROPOSED = Path(__file__).parents[2] / "research" / "vortex" / "proposed"
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
# of models with windows; `kvgraft serve` sets the second one
STEADY = {"max_model_len": 1536, "prefix_cache_retention_interval": None}


def slow(flow: str) -> Any:
    """A flow for `make test-all`."""
    return pytest.param(flow, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def native(model: Path) -> Engine:
    return Engine(model, dtype="float32", block_size=BLOCK)


@pytest.mark.parametrize(
    "flow", ["quest", slow(f"{PROPOSED}/opus.py:opus_coarse_fine"), slow("streaming")]
)
def test_with_all_blocks_a_flow_is_dense_attention(model: Path, plain: HostProcess, flow: str):
    said = run(model, f"{flow}:topk_blocks=64,layers_skip=none", MIXED, everything=True)
    assert said["tokens"][0] == [answer.tokens for answer in plain.ask(*MIXED)]
    assert (said["taken_up"] > 0, said["stale"], said["problems"]) == (True, 0, [])


@pytest.mark.parametrize(
    "flow",
    [
        "block_topk:topk_blocks=3",
        slow("double_sparse:topk_blocks=2,layers_skip=0+2"),
        # one of the prompts gets there while it is answered
        slow("streaming:topk_blocks=1,from_tokens=430"),
        slow(f"{MINE}:topk_blocks=2,fine=1.5"),
    ],
)
def test_answers_are_those_of_the_native_engine(
    model: Path, native: Engine, plain: HostProcess, flow: str
):
    said = run(model, flow, MIXED)
    assert said["tokens"][0] == natively(native, flow, MIXED)
    dense = [answer.tokens for answer in plain.ask(*MIXED)]
    assert [a == b for a, b in zip(said["tokens"][0], dense, strict=True)] == [
        False,
        True,
        False,
        False,
        True,
    ]


def test_grafted_prompts_are_decoded_sparsely_and_caches_are_never_stale(
    model: Path, native: Engine
):
    """Blocks are written by recoveries out of order, evicted, preempted, shared: caches follow."""
    flow, text = "quest:topk_blocks=3", words(15 * BLOCK, 1)
    read = Ask(text, max_tokens=1)
    exact = Ask(words(70, 2) + text + words(60, 3), EVERYTHING, max_tokens=24)
    shared = Ask(words(70, 2) + text + words(90, 4), EVERYTHING, max_tokens=24)
    trouble = [asdict(Ask(words(500, seed), max_tokens=24)) for seed in (7, 8)]
    grafted = Ask(words(33, 5) + text + words(60, 6), NAIVE, max_tokens=24)
    said = run(model, flow, [read], [exact], [shared, grafted], trouble=trouble)
    assert (said["taken_up"] > 0, said["stale"], said["problems"]) == (True, 0, [])
    assert min(said["grafted"][1] + said["cached"][2]) >= 14 * BLOCK
    assert said["grafted"][2] == [0, 15 * BLOCK], (
        "the first one goes on with the last request, up to where they part"
    )
    found = [said["tokens"][1][0], said["tokens"][2][0]]
    assert found == natively(native, flow, [exact, shared])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma 2", "Gemma 3", "OLMo 3", "gpt-oss"])
def test_layers_with_windows_attend_as_before_and_full_layers_follow_the_flow(
    family: str, tmp_path: Path
):
    model, settings = make_family(family, tmp_path / "model"), STEADY
    dense, all_blocks, few_blocks = (
        run(model, flow, MIXED, everything=flow.startswith("quest"), settings=settings)
        for flow in ("dense", "quest:topk_blocks=64,layers_skip=none", "quest:topk_blocks=1")
    )
    assert all_blocks["tokens"] == dense["tokens"]
    assert all_blocks["taken_up"] > 0
    assert few_blocks["tokens"] != dense["tokens"]
    for said in (all_blocks, few_blocks):
        assert (said["stale"], said["misread"], said["problems"]) == (0, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize("family", DEEPSEEK)
def test_a_flow_chooses_latents(family: str, tmp_path: Path):
    model = make_family(family, tmp_path / "model")
    settings = {
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}, "block_size": 16,
        "attention_backend": "CPU_MLA", "num_gpu_blocks_override": 200,
    }  # fmt: skip
    dense, all_blocks, few_blocks = (
        run(model, flow, MIXED, everything=everything, settings=settings, latent=True)
        for flow, everything in (
            ("dense", False),
            ("quest:topk_blocks=128,layers_skip=none", True),
            ("quest:topk_blocks=2", False),
        )
    )
    assert all_blocks["tokens"] == dense["tokens"]
    assert all_blocks["taken_up"] > 0
    # vLLM decodes the short prompt beside the others, and dense until a flow leaves a block out
    is_dense = [
        few[:8] == all_of_it[:8]
        for few, all_of_it in zip(few_blocks["tokens"][0], dense["tokens"][0], strict=True)
    ]
    assert is_dense[1]
    assert not all(is_dense)
    for said in (all_blocks, few_blocks):
        assert (said["stale"], said["misread"], said["problems"]) == (0, 0, [])


def test_a_model_without_a_full_layer_follows_no_flow(tmp_path: Path):
    own = tmp_path / "model"
    own.mkdir()
    for path in MODEL_DIR.iterdir():
        (own / path.name).symlink_to(path)
    (own / "config.json").unlink()
    config = json.loads((MODEL_DIR / "config.json").read_text())
    windows = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"sliding_window": 64, "layer_types": windows}
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="all layers attend to a window only"):
        run(own, "quest", MIXED)


@pytest.mark.slow
def test_a_quantised_cache_is_read_with_its_scales(model: Path):
    fp8 = {"kv_cache_dtype": "fp8"}
    dense, all_blocks, few_blocks = (
        run(model, flow, MIXED, everything=flow.startswith("quest"), settings=fp8, scales=(0.5, 2))
        for flow in ("dense", "quest:topk_blocks=64,layers_skip=none", "quest:topk_blocks=3")
    )
    assert all_blocks["tokens"] == dense["tokens"]
    assert few_blocks["tokens"] != dense["tokens"]
    for said in (all_blocks, few_blocks):
        assert said["taken_up"] > 0
        assert (said["stale"], said["misread"], said["problems"]) == (0, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["ngram", "eagle", pytest.param("draft_model", marks=pytest.mark.soak)]
)
def test_drafts_change_no_answer_of_a_flow(
    model: Path, native: Engine, tmp_path: Path, method: str
):
    """Each drafted token chooses the blocks that it would have chosen alone, also where the flow
    begins: it reads up to six blocks."""
    drafts, flow = NGRAM, "quest:topk_blocks=3"
    if method == "draft_model":
        drafts = {"method": method, "model": str(model), "num_speculative_tokens": 3}
    if method == "eagle":
        model, flow = make_target(tmp_path / "target"), f"{flow},layers_skip=none"
        native = Engine(model, dtype="float32", block_size=BLOCK)
        head = make_eagle(tmp_path / "eagle", model)
        drafts = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    lengths = [*(len(ask.prompt) for ask in MIXED), *range(170, 186, 3)]
    if method == "eagle":  # its own layer takes blocks: longer prompts would be preempted
        lengths = [length for length in lengths if length < 900]
    asks = [Ask(words(length, length), max_tokens=80) for length in lengths]
    said = run(model, flow, asks, asks, settings={"speculative_config": drafts})
    expected = natively(native, flow, asks)
    assert expected != natively(native, "dense", asks)
    assert said["tokens"] == [expected, expected]
    assert said["accepted"] > 20
    assert said["taken_up"] > 0
    assert (said["stale"], said["misread"], said["problems"]) == (0, 0, [])


@pytest.mark.slow
def test_answers_under_a_flow_are_never_found_as_exact(model: Path):
    prompt = words(10 * BLOCK, 1)
    first = Ask(prompt, max_tokens=5 * BLOCK)
    for flow, cached in (
        ("streaming:topk_blocks=1", 10 * BLOCK),
        ("streaming:topk_blocks=40", 14 * BLOCK),
    ):
        answer = run(model, flow, [first])["tokens"][0][0]
        exact, going_on = (
            Ask(prompt + answer, OFF, max_tokens=1),
            Ask(prompt + answer, max_tokens=1),
        )
        said = run(model, flow, [first], [going_on], [exact])
        assert said["cached"][1:] == [[14 * BLOCK], [cached]]
        assert said["grafted"][1:] == [[0], [0]]


@pytest.mark.slow
def test_a_flow_with_state_is_served_without_shared_pages(model: Path, native: Engine):
    said = run(model, "h2o:topk_blocks=3", MIXED, MIXED, reuse=False)
    assert said["tokens"][0] == said["tokens"][1] == natively(native, "h2o:topk_blocks=3", MIXED)
    # 15 blocks each at the end, of 60
    crowd = [Ask(words(300, seed), max_tokens=150) for seed in range(6)]
    said = run(
        model,
        "h2o:topk_blocks=11",
        crowd,
        reuse=False,
        settings={"num_gpu_blocks_override": 61, "max_model_len": 1024},
    )
    assert said["preempted"] > 0
    # nothing is left out, whatever was lost
    assert said["tokens"][0] == natively(native, "dense", crowd)


@pytest.mark.parametrize(
    ("flow", "changes", "reason"),
    [
        ("h2o", {}, "prefix caching: the flow keeps state in pages"),
        ("quest", {"kv_transfer_config": None}, "prefix caching without reuse"),
        ("h2o", {"speculative_config": NGRAM}, "state of rejected tokens could not be removed"),
    ],
)
def test_what_cannot_be_right_is_refused(
    model: Path, flow: str, changes: dict[str, Any], reason: str
):
    settings = {
        "model": str(model),
        "worker_cls": WORKER_CLASS,
        "kv_transfer_config": transfer_config(),
    } | changes
    with pytest.raises(UnsupportedConfiguration, match=reason):
        install(configure(**settings, additional_config={FLOW: flow}))


def test_a_server_checks_its_flow_before_it_starts(model: Path):
    plain = {"model": str(model), "kv_transfer_config": None, "additional_config": {FLOW: "quest"}}
    without = Namespace(no_kvgraft=True)
    with pytest.raises(ValueError, match="prefix caching without reuse"):
        serve._check(without, configure(**plain))
    serve._check(without, configure(**plain, enable_prefix_caching=False))
    both = plain | {"additional_config": {FLOW: "h2o"}, "kv_transfer_config": transfer_config()}
    with pytest.raises(ValueError, match=r"worker class .*; .*keeps state in pages"):
        serve._check(Namespace(no_kvgraft=False), configure(**both, worker_cls="auto"))


def test_the_flag_names_the_flow_to_every_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert parse([str(model), "--flow", "quest:topk_blocks=9"]).additional_config == {
        FLOW: "quest:topk_blocks=9"
    }
    plain = parse([str(model), "--no-kvgraft", "--no-enable-prefix-caching", "--flow", "h2o"])
    assert (plain.additional_config, plain.worker_cls, plain.kv_transfer_config) == (
        {FLOW: "h2o"},
        WORKER_CLASS,
        None,
    )
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from kvgraft.flows.quest import Quest\n\n\nclass Mine(Quest):\n    name = 'mine'\n"
    )
    assert parse([str(model), "--flow", "mine.py:mine:topk_blocks=2"]).additional_config == {
        FLOW: f"{tmp_path}/mine.py:mine:topk_blocks=2"
    }
    with pytest.raises(ValueError, match="unknown flow 'guess': choose from block_topk"):
        parse([str(model), "--flow", "guess"])
