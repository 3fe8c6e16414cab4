"""Watching a policy changes nothing, and what is seen is what happened."""

import numpy as np
import pytest
import torch

from kvgraft import Engine, Request, Result, SamplingParams
from kvgraft.core.prompt import Segment
from kvgraft.policies import Full, Naive, RedKnot, SparseX, Spread, Transitive
from kvgraft_lab.evaluate.layers import ATTENTION, DEVIATION, Survey, draw, find_needle, survey
from kvgraft_lab.evaluate.needles import english_needle, fact_needle
from kvgraft_lab.evaluate.recording import Recorded
from kvgraft_lab.testbed import MODEL_DIR
from research import redknot

DOCUMENT = (
    "the code of lamp is 42 . the old river slept . the paint of bell is grey . the wide road "
    "waited . " * 4
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32")


def ask(engine: Engine, policy: object) -> Result:
    prompt = ["note grey means 51 . ", Segment(DOCUMENT), "question : note of bell ? answer :"]
    sampling = SamplingParams(max_tokens=1)
    request = Request(prompt, policy, sampling, remember=False, return_logits=True)  # type: ignore[arg-type]
    return engine.generate([request])[0]


@pytest.fixture(scope="module", autouse=True)
def _read(engine: Engine) -> None:
    engine.generate([Request([Segment(DOCUMENT)], "full", SamplingParams(max_tokens=1))])


@pytest.mark.parametrize(
    "policy",
    [Full(), Naive(), SparseX(boundary_layers=2), Transitive(), Spread()],
    ids=lambda policy: policy.name,
)
def test_recording_changes_nothing(engine: Engine, policy):
    recorded = Recorded(policy)
    plain, watched = ask(engine, policy), ask(engine, recorded)
    assert torch.equal(plain.first_logits, watched.first_logits)  # type: ignore[arg-type]
    assert watched.report.recomputed_tokens == plain.report.recomputed_tokens
    assert watched.report.computed_share == plain.report.computed_share


def test_recording_changes_nothing_where_local_heads_hold_windows():
    """RedKnot promotes no local head there."""
    engine = Engine(redknot.MODEL_DIR, dtype="float32", kv_gib=0.5, head_paging=True)
    engine.generate([Request([Segment(DOCUMENT)], "full", SamplingParams(max_tokens=1))])
    policy = RedKnot(edge_mass_share=0.0)
    plain, watched = ask(engine, policy), ask(engine, Recorded(policy))
    assert plain.report.grafted_tokens > 0
    assert plain.report.counts["promoted_heads"] == watched.report.counts["promoted_heads"] == 0
    assert torch.equal(plain.first_logits, watched.first_logits)  # type: ignore[arg-type]


def test_what_is_recorded_is_what_was_computed(engine: Engine):
    recorded = Recorded(SparseX(boundary_layers=2), keep_cache=True, score_layers=True)
    report = ask(engine, recorded).report
    record = recorded.record
    assert record.plan is not None
    assert record.computed[0].all()
    assert (
        int((record.computed[1:] & record.plan.grafted).sum(1).unique()) == report.recomputed_tokens
    )
    assert sorted(record.scores) == list(range(8))
    assert record.keys is not None
    assert record.keys.shape == (8, report.prompt_tokens, 4, 32)
    assert record.keys.isfinite().all()


def test_layers_find_the_needle_by_attention_in_both_layouts(engine: Engine, tmp_path):
    findings = find_needle(engine, fact_needle(3))
    assert [(finding.signal, finding.layout) for finding in findings] == [
        ("KV deviation", "cue before the needle"),
        ("last-query attention", "cue before the needle"),
        ("KV deviation", "cue after the needle"),
        ("last-query attention", "cue after the needle"),
    ]
    before, after = findings[1], findings[3]
    for finding in (before, after):
        assert finding.found.any()
        assert finding.chosen.sum(1).max() < 0.05 * finding.chosen.shape[1]
    assert not findings[2].found[:1].any()  # nothing deviates by what comes later
    draw(engine, fact_needle(3), tmp_path)
    for name in ("figure5_kv_deviation.png", "figure6_attention.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_needle_is_where_it_is_said_to_be(engine: Engine):
    for finding in find_needle(engine, fact_needle(4)):
        # words, which are tokens here: the paint of THING is COLOUR
        assert len(finding.needle) == 6
        assert 0 <= finding.needle.start < finding.needle.stop <= finding.chosen.shape[1]


def test_a_needle_in_english_stands_in_documentation():
    made = [english_needle(seed) for seed in range(6)]
    for one in made:
        assert one.needle in one.text
        assert 1800 < len(one.text) < 2700
        assert one.needle.split()[-3] in one.question
        assert one.needle.split()[-1] not in one.cue + one.question
    assert made == [english_needle(seed) for seed in range(6)]
    assert len({one.before for one in made}) == 6


def test_a_survey_counts_texts_and_names_the_probe(engine: Engine):
    found = survey(engine, fact_needle, range(5, 8))
    assert found.texts == 3
    assert {signal for signal, _ in found.found} == {ATTENTION, DEVIATION}
    assert all(shares.shape == (8,) and shares.max() <= 1 for shares in found.found.values())
    assert 0 < found.probe <= 2


def test_the_probe_is_the_first_layer_that_finds_enough_in_both_layouts():
    attention = {
        (ATTENTION, "before"): np.array([0.2, 0.7, 1.0, 1.0]),
        (ATTENTION, "after"): np.array([1.0, 0.9, 0.9, 1.0]),
    }
    assert Survey({**attention, (DEVIATION, "before"): np.array([1.0, 0, 0, 0])}, 10).probe == 2
