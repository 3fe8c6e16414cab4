"""Near-duplicates and partial-layer reuse inside vLLM: what exact matching misses is grafted, and
answers are those of the native engine."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import warm
from engines import ENVIRONMENT

from kvgraft import Engine, Request, SamplingParams
from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.testbed.documents import Facts, make_documents
from kvgraft_lab.testbed.tasks import read

ENGINE = Path(__file__).with_name("grafting_engine.py")
EVERYTHING = {"policy": "sparsex", "recompute_share": 1.0}
SETTINGS: dict[str, Any] = {"match": "similar:tau=0.4", "residual_layers": [2, 3], "max_depth": 0}
pytestmark = pytest.mark.slow
POLICIES = [
    {"policy": "similar:reused_layers=3"},
    {"policy": "similar:reused_layers=3,probe_tokens=0"},
    {"policy": "similar:reused_layers=3,halo_tokens=2,max_kl=0.0"},
    {"policy": "sparsex:boundary_layers=2,shallow=fresh"},
    {"policy": "similar:reused_layers=5"},
]
OFF = {"reuse": "off"}


def run(
    read_first: list[list[int]], prompts: list[list[int]], options: list[dict[str, Any]]
) -> list[list[Any]]:
    job = {"read": read_first, "prompts": prompts, "options": options, "settings": SETTINGS}
    found: list[list[Any]] = warm.run(ENGINE, job, **ENVIRONMENT)
    return found


def test_partial_layer_reuse_of_near_duplicates_is_that_of_the_native_engine():
    engine = Engine(MODEL_DIR, dtype="float32", block_size=32, **SETTINGS)
    facts = Facts(needle=8, variable=12)
    first, second = make_documents(Random(1), facts, orders=[(0, 1), (1, 0)], num_tokens=700)
    known = engine.encode(f"{first} {second}")
    words = np.array(known)
    words[29::30] = engine.encode("river")[0]
    prompt = (
        engine.encode("note red means 51 .")
        + words.tolist()
        + engine.encode(read([first, second])[0].text)
    )

    [[*ours, exact, off]] = run(
        [known], [prompt], [*POLICIES, EVERYTHING | {"match": "exact"}, OFF]
    )
    assert exact["report"]["grafted_tokens"] == 0  # no block of 32 tokens is left as it was
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    engine.generate([Request(known, "full", sampling)])
    for options, answer in zip(POLICIES[:4], ours, strict=False):
        [native] = engine.generate([Request(prompt, options["policy"], sampling, remember=False)])
        assert answer["report"]["grafted_tokens"] == native.report.grafted_tokens > 500
        assert answer["report"]["computed_share"] == pytest.approx(
            native.report.computed_share, abs=1e-6
        )
        assert answer["tokens"] == native.token_ids
    assert ours[1]["report"]["computed_share"] < 0.9 < 1 < ours[2]["report"]["computed_share"]
    assert ours[2]["tokens"] == off["tokens"]
    assert (ours[4]["report"]["grafted_tokens"], ours[4]["report"]["reason"]) == (
        0,
        "residual_stream",
    )
