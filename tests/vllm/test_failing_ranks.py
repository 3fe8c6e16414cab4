"""What fails on one of two tensor-parallel ranks ends in a fallback or in the engine's end, never
in a hang."""

import os
from pathlib import Path
from typing import Any

import pytest
import warm
from engines import TWO_RANKS, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, one for each rank"),
]
ENGINE = Path(__file__).with_name("failing_engine.py")
# ten for the ranks to agree, nine for vLLM's executor to end those that wait, and what starts
# before
SECONDS = 25
DOCUMENT = words(300, 1)


def run(model: Path, *where: str) -> list[dict[str, Any]]:
    """What becomes of requests that fail there, in this order, and of one after them that grafts
    nothing."""
    prompts = [
        words(20 + number, 10 + number) + DOCUMENT + words(9, 30) for number in range(len(where))
    ]
    job = {"model": str(model), "read": DOCUMENT, "engine": {"tensor_parallel_size": 2}}
    asked = job | {"prompts": [*prompts, prompts[0]], "where": [*where, ""]}
    return list(warm.run(ENGINE, asked, **TWO_RANKS))


@pytest.mark.parametrize(
    "where",
    [
        *(pytest.param(place, marks=pytest.mark.soak) for place in ("first", "between", "dies")),
        "inside",
    ],
)
def test_a_rank_that_fails_alone_ends_the_engine(model: Path, where: str):
    [answer] = run(model, where)
    assert answer["died"] == "EngineDeadError"
    assert answer["seconds"] < SECONDS


@pytest.mark.soak
def test_ranks_that_end_alike_fall_back(model: Path):
    """Both fail, or one does when no other waits for it any more; the engine goes on."""
    everywhere, last, again = run(model, "everywhere", "last")
    assert [everywhere["reason"], last["reason"], again["reason"]] == ["error", "error", "off"]
    assert again["tokens"] == everywhere["tokens"]
