"""Each family that people run, in vLLM's own class: exact where all is recomputed, grafts that read
their source, nothing of other namespaces, and exact prefixes beside all that."""

from functools import cache
from pathlib import Path
from typing import Any

import multimodal
import pytest
import warm
from engines import ENVIRONMENT
from families import DEEPSEEK, FAMILIES, make_family
from families import WINDOWED as WINDOWED_TEXT
from family_table import row, table, written

from kvgraft.vllm.compat.families import FLOWS, IN_STEPS, PLAIN

pytestmark = pytest.mark.slow
ENGINE = Path(__file__).with_name("family_engine.py")
BLOCKS = 96  # for each group of layers
REQUESTS = 40
# vLLM's CPU kernel reads DeepSeek's queries wrongly
NATIVE_ROTARY = {"custom_ops": ["all", "-rotary_embedding"]}
WINDOWED = (*WINDOWED_TEXT, *multimodal.WINDOWED)
# cases of the tests that take minutes; the others are soaks
SLOW = [("DeepSeek-V2", ""), ("Qwen2.5-VL", "")]

ONE_GROUP, NO_MLA = "one group", "no MLA"
CASES = [
    *((family, "") for family in FAMILIES), ("gpt-oss", ONE_GROUP), ("Gemma 3", ONE_GROUP),
    ("DeepSeek-V2", NO_MLA), *((family, "") for family in multimodal.FAMILIES),
]  # fmt: skip


def engine_of(family: str, variant: str) -> dict[str, Any]:
    """Arguments of its engine."""
    settings: dict[str, Any] = {}
    if family in WINDOWED and variant == ONE_GROUP:
        settings = {"disable_hybrid_kv_cache_manager": True}
    elif family in WINDOWED:
        settings = {"prefix_cache_retention_interval": None, "num_gpu_blocks_override": 2 * BLOCKS}
    if family in DEEPSEEK:
        settings = {"compilation_config": NATIVE_ROTARY}
    if family in DEEPSEEK and variant != NO_MLA:
        # which its CPU kernel wants
        settings |= {"block_size": 16, "num_gpu_blocks_override": 2 * BLOCKS}
        # vLLM prefers AMX_MLA on some CPUs, which cannot do float32
        settings |= {"attention_backend": "CPU_MLA"}
    return settings


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def facts(directory: Path, family: str, variant: str) -> dict[str, Any]:
    return facts_of(directory, family, variant)


@cache
def facts_of(directory: Path, family: str, variant: str) -> dict[str, Any]:
    """What a process finds out about a family."""
    model, latent = directory / family, family in DEEPSEEK and variant != NO_MLA
    has_images = family in multimodal.FAMILIES
    if not model.exists():
        make = multimodal.make_apart if has_images else make_family
        make(family, model)
    job = {
        "model": str(model),
        "engine": engine_of(family, variant),
        "latent": latent,
        "requests": REQUESTS,
        "image": multimodal.image_token(family) if has_images else None,
    }
    if has_images:
        return multimodal.run(ENGINE, job, ENVIRONMENT)
    found: dict[str, Any] = warm.run(
        ENGINE, job, **ENVIRONMENT, VLLM_MLA_DISABLE=str(int(variant == NO_MLA))
    )
    return found


@pytest.mark.parametrize(
    ("family", "variant"),
    [case if case in SLOW else pytest.param(*case, marks=pytest.mark.soak) for case in CASES],
)
def test_a_family(facts: dict[str, Any], family: str, variant: str):
    plain, naive = facts["plain"], facts["naive"]
    assert (len(facts["groups"]) > 1) == (family in WINDOWED and variant != ONE_GROUP)
    for policy in ("sparsex", "spread"):  # all of it recomputed
        assert facts[policy]["tokens"] == plain
        assert (
            facts[policy]["report"]["recomputed_tokens"]
            == facts[policy]["report"]["grafted_tokens"]
            > 480
        )
    assert naive["report"]["grafted_tokens"] > 480
    assert naive["report"]["recomputed_tokens"] == 0
    assert facts["default"]["report"]["grafted_tokens"] > 480
    assert 0 < facts["default"]["report"]["recomputed_tokens"] < 60
    assert facts["copied"], "grafted values are those of the source"
    assert facts["poisoned"]["tokens"] != naive["tokens"]
    assert facts["beginning"] == 96, "what stands before the grafts is an exact prefix for others"
    assert facts["elsewhere"] == 0
    assert facts["problems"] == []
    assert facts["wrong"] == [], "exact answers beside grafts are plain vLLM's"
    assert facts["num_exact"] > REQUESTS / 4
    assert facts["counts"]["outcome grafted"] > 1
    assert facts["near_duplicates"]["tokens"] == facts["plain_edited"]
    assert facts["near_duplicates"]["report"]["grafted_tokens"] > 100
    keeps = facts["language model"] in PLAIN and family != "Phi-4-mini"
    assert facts["documents"]["outcome"] == ("grafted" if keeps else "off")
    by_head = facts["redknot"]["report"]
    has_map = family not in (*multimodal.FAMILIES, "Phi-4-mini")
    if facts["language model"] in IN_STEPS and has_map:
        assert facts["redknot"]["tokens"] == plain
        assert by_head["grafted_tokens"] == by_head["recomputed_tokens"] > 480
        assert facts["with windows"]["report"]["grafted_tokens"] > 480
    else:
        assert by_head["reason"] == facts["with windows"]["report"]["reason"] == "unsupported_model"
    assert facts["stored"]
    flow = facts["flow"]
    if facts["language model"] in FLOWS:
        assert flow["dense"] == plain
        assert flow["is_followed"]
    else:
        assert "cannot be followed with" in flow["refused"]
    assert facts["positions"] == (200 if "VL" in family else None)
    if images := facts.get("images"):
        for answer in images["answers"]:
            assert not answer["wrong"], "prompts with images are answered as plain vLLM does"
            assert answer["report"]["reason"] == "multimodal"
            assert answer["report"]["grafted_tokens"] == 0
        assert images["off"] == "multimodal", "else it would wait for the store"
        assert images["left"] == 0, "text beside an image is nobody's source"


@pytest.mark.soak
def test_the_table_of_families_is_what_these_tests_find(directory: Path):
    """Made again by: python tests/vllm/family_table.py"""
    rows = {case: row(*case, directory / case[0], facts_of(directory, *case)) for case in CASES}
    assert table(rows) == written()
