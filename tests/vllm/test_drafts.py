"""Draft models beside recoveries: answers are those without drafts, and what is drafted is as good
as it was."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import warm
from draft_models import make_eagle, make_eagle3, make_target
from engines import BLOCK, ENVIRONMENT, EVERY_HEAD, EVERYTHING, NAIVE, OFF, words

from kvgraft.kv.heads import HEAD_MAP_FILE
from kvgraft.prefill.context import Hidden
from kvgraft.vllm.prefill import VllmPrefill
from models import make_head_map, make_model

pytestmark = pytest.mark.slow
ENGINE = Path(__file__).with_name("drafting_engine.py")
CONDENSE = {"policy": "condense"}
BY_HEAD = {"policy": "redknot:dense_layers=0,recent_tokens=8,min_ffn_tokens=4"}
POLICIES = {
    "off": OFF, "everything": EVERYTHING, "every head": EVERY_HEAD, "naive": NAIVE,
    "spread": {"policy": "spread"},
    "by head": BY_HEAD, "condense": CONDENSE,
}  # fmt: skip
DOCUMENT, QUESTION = words(300, 1), words(9, 2)
PROMPT = [*words(40, 3), *DOCUMENT, *QUESTION]
NUM_DRAFTED = 3  # in a step
SELDOM = [pytest.param(kind, marks=pytest.mark.soak) for kind in ("itself", "eagle3")]
KINDS = ["another", "eagle", *SELDOM]
Asked = dict[str, dict[str, Any]]  # by policy


def run(model: Path, drafts: dict[str, Any] | None) -> Asked:
    """What an engine with these drafts does."""
    asked = {"read": [DOCUMENT], "prompt": PROMPT, "options": list(POLICIES.values())}
    job = {
        "model": str(model),
        "speculative_config": drafts and drafts | {"num_speculative_tokens": NUM_DRAFTED},
    }
    return dict(zip(POLICIES, warm.run(ENGINE, asked | job, **ENVIRONMENT), strict=True))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that drafts are for."""
    found = make_target(tmp_path_factory.mktemp("target"))
    make_head_map(found).save(found / HEAD_MAP_FILE)
    return found


@pytest.fixture(scope="module")
def undrafted(target: Path) -> Asked:
    """What the model says by itself."""
    return run(target, None)


@cache
def asked_with(kind: str, target: Path) -> Asked:
    """What it says with a draft model: itself, one of another shape, heads."""
    directory = target.with_name(kind)
    if kind == "itself":
        return run(target, {"method": "draft_model", "model": str(target)})
    if kind == "another":
        make_model(
            directory,
            "qwen3",
            max_position_embeddings=4096,
            num_hidden_layers=2,
            num_key_value_heads=1,
        )
        return run(target, {"method": "draft_model", "model": str(directory)})
    make = {"eagle": make_eagle, "eagle3": make_eagle3}[kind]
    return run(target, {"method": kind, "model": str(make(directory, target))})


@pytest.fixture(params=KINDS)
def drafted(request: pytest.FixtureRequest, target: Path) -> Asked:
    """What it says with each kind of drafts."""
    return asked_with(request.param, target)


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_change_no_answer(drafted: Asked, undrafted: Asked, policy: str):
    assert drafted[policy]["tokens"] == undrafted[policy]["tokens"]
    assert drafted[policy]["drafted"] > 0
    assert (drafted[policy]["grafted"] > 250) == (policy != "off")


@pytest.mark.parametrize("drafted", ["eagle", SELDOM[0]], indirect=True)
@pytest.mark.parametrize("policy", ["everything", "every head", "naive", "spread", "by head"])
def test_as_many_drafts_are_accepted_as_without_grafts(drafted: Asked, policy: str):
    """Of a request that was loaded vLLM counts drafts in its first step, in which there are
    none."""
    plain, grafted = drafted["off"], drafted[policy]
    rate = plain["accepted"] / plain["drafted"]
    assert rate > 0.85
    assert grafted["accepted"] / (grafted["drafted"] - NUM_DRAFTED) > rate - 0.05


@pytest.mark.parametrize("policy", ["everything", "every head"])
def test_a_prompt_that_is_recomputed_is_drafted_from_as_vllm_would(drafted: Asked, policy: str):
    """To rounding: all keys and values of the draft model, whatever it takes from the model."""
    np.testing.assert_allclose(drafted[policy]["draft"], drafted["off"]["draft"], atol=1e-4)


@pytest.mark.parametrize("drafted", KINDS[:3], indirect=True)
def test_grafts_are_aligned_for_the_draft_model(drafted: Asked):
    """Keys and values of its first layer, which know nothing of what stands before, are what it
    would compute."""
    plain, grafted = (np.array(drafted[policy]["draft"])[:2] for policy in ("off", "naive"))
    np.testing.assert_allclose(grafted, plain, atol=1e-4)


def test_a_prompt_of_which_a_part_is_kept_is_drafted_from_nothing(drafted: Asked):
    """Not from what others have left in its blocks."""
    [*_, kept] = drafted.values()
    assert not np.array(kept["draft"])[:, :BLOCK].any()


def test_what_enters_a_layer_in_parts_is_kept_whole():
    """As layer 0 under `spread`; of a token that is computed twice the later state counts."""
    ctx = object.__new__(VllmPrefill)
    ctx._host, ctx._entered = SimpleNamespace(drafter=SimpleNamespace(entering=(0,))), {}  # type: ignore[assignment]
    for tokens, value in (((0, 2, 3), 1.0), ((1, 3), 2.0)):
        where = torch.zeros(5, dtype=torch.bool)
        where[list(tokens)] = True
        ctx._enter(0, Hidden(torch.full((len(tokens), 2), value), where))
        ctx._enter(1, Hidden(torch.zeros(len(tokens), 2), where))
    [(index, entered)] = ctx._entered.items()
    assert index == 0
    assert entered.where.tolist() == [True, True, True, True, False]
    assert entered.states[:, 0].tolist() == [1.0, 2.0, 1.0, 2.0]
