"""Two tensor-parallel ranks graft, recompute and keep exactly what one does (float32, greedy)."""

import os
from pathlib import Path
from typing import Any

import pytest
import warm
from engines import ALONE, TWO_RANKS

from kvgraft.engine.text import load_tokenizer
from kvgraft.kv.heads import HEAD_MAP_FILE, HeadMap
from kvgraft.vllm.compat import FLOW, HEAD_MAP
from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.testbed.scenarios import make_scenarios

pytestmark = pytest.mark.slow
ENGINE = Path(__file__).with_name("grafting_engine.py")
POLICIES = {
    "sparse": {"policy": "sparsex", "boundary_layers": 1, "recompute_share": 0.1},
    # scores from queries alone
    "projected": {"policy": "sparsex", "boundary_layers": 0, "recompute_share": 0.1},
    "everything": {"policy": "sparsex", "boundary_layers": 1, "recompute_share": 1.0},
    "naive": {"policy": "naive"},
    "cacheblend": {"policy": "cacheblend"},  # by differences over all heads
    "similar": {"policy": "similar:reused_layers=3,max_kl=0.01"},  # by logits
    # by queries, keys and a fit over all heads
    "samkv": {"policy": "samkv", "block_tokens": 8, "kept_share": 0.8},
    "condense": {"policy": "condense"},  # by the most attention in any head
    "by head": {"policy": "redknot:recent_tokens=16,min_ffn_tokens=8"},  # heads of either rank
    "off": {"reuse": "off"},
}
LOGPROBS_TOLERANCE = 1e-4  # ranks that choose differently are a hundred times as far apart
Asked = dict[str, dict[str, Any]]  # by policy: tokens, cached, report


def make_job(num_applications: int) -> dict[str, Any]:
    """What so many of three applications read, and what they then ask about the same text in
    another order."""
    tokenizer = load_tokenizer(MODEL_DIR)
    items = [item for scenario in make_scenarios(seed=1, num_items=1) for item in scenario.items][
        :num_applications
    ]

    def encode(segments: tuple[str, ...]) -> list[int]:
        return [
            token for text in segments for token in tokenizer.encode(text, add_special_tokens=False)
        ]

    return {
        "read": [encode(segments) for item in items for segments in item.phase_1],
        "prompts": [encode(prompt.segments) for item in items for prompt in item.phase_2[:1]],
        "options": list(POLICIES.values()),
        "settings": {"residual_layers": [3]},
    }


def run(job: dict[str, Any], ranks: int) -> list[Asked]:
    """Answers to every prompt, from an engine with that many ranks, one core each."""
    environment = TWO_RANKS if ranks > 1 else ALONE
    found = warm.run(ENGINE, job | {"engine": {"tensor_parallel_size": ranks}}, **environment)
    return [dict(zip(POLICIES, answers, strict=True)) for answers in found]


@pytest.fixture(scope="module", params=[1, pytest.param(3, marks=pytest.mark.soak)])
def one_and_two(request: pytest.FixtureRequest) -> list[tuple[Asked, Asked]]:
    """For each prompt, what one rank and what two ranks answered."""
    job = make_job(request.param)
    assert len(job["prompts"]) == request.param
    return list(zip(run(job, ranks=1), run(job, ranks=2), strict=True))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, one for each rank")
@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_answer_as_one(one_and_two: list[tuple[Asked, Asked]], policy: str):
    for one, two in one_and_two:
        counts = [
            {name: value for name, value in asked[policy]["report"].items() if name != "stages"}
            for asked in (one, two)
        ]
        assert counts[0] == counts[1]
        assert one[policy]["tokens"] == two[policy]["tokens"]
        assert one[policy]["logprobs"] == pytest.approx(
            two[policy]["logprobs"], abs=LOGPROBS_TOLERANCE
        )
        assert one[policy]["cached"] == two[policy]["cached"]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, one for each rank")
def test_two_ranks_graft_and_recompute(one_and_two: list[tuple[Asked, Asked]]):
    for _, asked in one_and_two:
        reports = {policy: answer["report"] for policy, answer in asked.items()}
        for policy in POLICIES.keys() - {"off"}:
            assert reports[policy]["grafted_tokens"] > 0.5 * reports[policy]["prompt_tokens"]
            assert reports[policy]["reason"] is None
            assert (
                asked[policy]["cached"]
                == reports[policy]["prefix_tokens"] + reports[policy]["grafted_tokens"]
            )
        assert reports["everything"]["recomputed_tokens"] == reports["everything"]["grafted_tokens"]
        assert (
            0 < reports["sparse"]["recomputed_tokens"] < 0.5 * reports["sparse"]["grafted_tokens"]
        )
        assert reports["naive"]["recomputed_tokens"] == reports["off"]["grafted_tokens"] == 0
        assert asked["everything"]["tokens"] == asked["off"]["tokens"]
        assert reports["similar"]["counts"]["rejected_segments"] > 0
        assert reports["condense"]["kept_tokens"] < 0.2 * reports["condense"]["prompt_tokens"]
    apart = [
        asked["naive"]["logprobs"] != pytest.approx(asked["off"]["logprobs"], abs=0.01)
        for _, asked in one_and_two
    ]
    assert any(apart), "grafts are read"
    kept = {asked["samkv"]["report"]["kept_tokens"] for _, asked in one_and_two}
    assert len(kept) == len(one_and_two)  # as Eq. 2 and 3 say


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, one for each rank")
def test_each_rank_keeps_sinks_and_windows_of_its_own_local_heads(tmp_path: Path):
    names = ("naive", "everything", "by head", "off")
    job = make_job(1) | {"options": [POLICIES[name] for name in names], "settings": {}}
    given = HeadMap.load(MODEL_DIR / HEAD_MAP_FILE)
    levelled = given.levelled(2)
    assert 0 < levelled.num_kept != given.num_kept  # ranks would differ
    paths = [tmp_path / f"{ranks}.json" for ranks in (1, 2)]
    for found, path in zip((levelled, given), paths, strict=True):
        found.save(path)

    def ask(ranks: int, path: Path) -> list[dict[str, Any]]:
        engine = {
            "tensor_parallel_size": ranks,
            "hf_overrides": {"architectures": ["KVGraftByHeadLlamaForCausalLM"]},
            "additional_config": {HEAD_MAP: str(path)},
            "prefix_cache_retention_interval": None,
        }
        settings = {"head_map": str(path)}
        environment = TWO_RANKS if ranks > 1 else ALONE
        wanted = job | {"engine": engine, "settings": settings}
        [answers] = warm.run(ENGINE, wanted, **environment)
        return answers

    one, two = (ask(ranks, path) for ranks, path in zip((1, 2), paths, strict=True))
    for name, alone, split in zip(names, one, two, strict=True):
        assert split["tokens"] == alone["tokens"]
        assert split["logprobs"] == pytest.approx(alone["logprobs"], abs=LOGPROBS_TOLERANCE)
        for key in ("grafted_tokens", "recomputed_tokens", "reason"):
            assert split["report"][key] == alone["report"][key]
        assert (split["report"]["grafted_tokens"] > 0) == (name != "off")
    assert two[1]["tokens"] == two[3]["tokens"]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, one for each rank")
def test_each_rank_follows_a_flow_with_its_own_heads():
    job = make_job(1) | {"options": [POLICIES["everything"], POLICIES["off"]]}

    def ask(ranks: int, **more: Any) -> list[dict[str, Any]]:
        engine = {"engine": {"tensor_parallel_size": ranks, **more}}
        environment = TWO_RANKS if ranks > 1 else ALONE
        [answers] = warm.run(ENGINE, job | engine, **environment)
        return answers

    flow = {FLOW: "quest:topk_blocks=2,layers_skip=none"}
    dense = ask(1)
    one, two = (ask(ranks, additional_config=flow) for ranks in (1, 2))
    for alone, split, whole in zip(one, two, dense, strict=True):
        assert split["tokens"] == alone["tokens"]
        assert split["logprobs"] == pytest.approx(alone["logprobs"], abs=LOGPROBS_TOLERANCE)
        assert split["logprobs"] != pytest.approx(whole["logprobs"], abs=LOGPROBS_TOLERANCE)
