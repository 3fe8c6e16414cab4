"""Each family that people run, in vLLM's own class: exact where all is recomputed, grafts that read their source,
nothing of other namespaces, and exact prefixes beside all that."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import warm
from engines import ENVIRONMENT
from families import DEEPSEEK, FAMILIES, WINDOWED, make_family

pytestmark = pytest.mark.slow
ENGINE = Path(__file__).with_name("family_engine.py")
BLOCKS = 96  # for each group of layers
REQUESTS = 40
NATIVE_ROTARY = {"custom_ops": ["all", "-rotary_embedding"]}  # vLLM's CPU kernel reads DeepSeek's queries wrongly


def engine_of(family: str, *, one_group: bool = False) -> dict[str, Any]:
    """Arguments of its engine."""
    if family in WINDOWED and not one_group:
        return {"prefix_cache_retention_interval": None, "num_gpu_blocks_override": 2 * BLOCKS}
    settings: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True} if family in WINDOWED else {}
    return settings | ({"compilation_config": NATIVE_ROTARY} if family in DEEPSEEK else {})


CASES = [(family, False) for family in FAMILIES] + [("gpt-oss", True), ("Gemma 3", True)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def facts(directory: Path, family: str, one_group: bool) -> dict[str, Any]:
    return facts_of(directory, family, one_group)


@cache
def facts_of(directory: Path, family: str, one_group: bool) -> dict[str, Any]:
    model = directory / family
    if not model.exists():
        make_family(family, model)
    job = {"model": str(model), "engine": engine_of(family, one_group=one_group), "requests": REQUESTS}
    found: dict[str, Any] = warm.run(ENGINE, job, **ENVIRONMENT, VLLM_MLA_DISABLE=str(int(family in DEEPSEEK)))
    return found


@pytest.mark.parametrize(
    ("family", "one_group"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else ("one group" if value else ""),
)
def test_a_family(facts: dict[str, Any], family: str, one_group: bool):
    plain, naive = facts["plain"], facts["naive"]
    assert (facts["groups"] > 1) == (family in WINDOWED and not one_group)
    for policy in ("sparsex", "spread"):  # all of it recomputed
        assert facts[policy]["tokens"] == plain
        assert facts[policy]["report"]["recomputed_tokens"] == facts[policy]["report"]["grafted_tokens"] > 480
    assert naive["report"]["grafted_tokens"] > 480
    assert naive["report"]["recomputed_tokens"] == 0
    assert facts["default"]["report"]["grafted_tokens"] > 480
    assert 0 < facts["default"]["report"]["recomputed_tokens"] < 60
    assert facts["copied"], "grafted values are those of the source"
    assert facts["poisoned"]["tokens"] != naive["tokens"]
    assert facts["elsewhere"] == 0
    assert facts["problems"] == []
    assert facts["wrong"] == [], "exact answers beside grafts are plain vLLM's"
    assert facts["num_exact"] > REQUESTS / 4
    assert facts["counts"]["outcome grafted"] > 5
    print(json.dumps(facts["counts"]))
