"""What changes in recomputed tokens, and what the others of their segment take over of it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Engine, Request, Result, SamplingParams, Segment
from kvgraft.core.matches import Match
from kvgraft.core.plan import Plan
from kvgraft.kv.rope import rotate
from kvgraft.policies import Naive, Policy, Spread
from kvgraft.prefill.spreading import AVERAGED, Spreading
from kvgraft_lab.evaluate.recording import PrefillRecord, Recorded
from kvgraft_lab.testbed import MODEL_DIR
from properties import examples

TEXT = " ".join(
    f"the note of {word} is {number} ."
    for number, word in enumerate(("grey", "bell", "red", "blue") * 6)
)
OTHER = " ".join(
    f"the code of {word} is {number} ." for number, word in enumerate(("moss", "lamp", "salt") * 5)
)


@examples(100)
@given(st.data())
def test_changes_are_averaged_and_interpolated_within_each_segment_and_never_across(
    data: st.DataObject,
):
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    matches, start = [], 0
    for number, length in enumerate(lengths):
        start += data.draw(st.integers(0, 3))  # fresh tokens before it
        matches.append(Match(start, length, 100 * number, np.arange(length), 0, number))
        start += length
    plan = Plan.for_prompt(start + 1, 4, matches=matches)
    chosen = (
        torch.tensor(data.draw(st.lists(st.booleans(), min_size=start + 1, max_size=start + 1)))
        & plan.grafted
    )
    changes = torch.randn(int(chosen.sum()), 2, 3)
    distance = data.draw(st.sampled_from((0.01, 3.0, 100.0)))
    near = Spreading(plan, chosen, chosen, distance)
    found = torch.zeros(start + 1, 2, 3)
    found[near.where] = near.interpolate(changes)
    for match in matches:
        places = np.arange(match.start, match.start + match.length)
        known = [place for place in places if chosen[place]]
        others = [place for place in places if not chosen[place]]
        assert near.where[others].tolist() == [bool(known)] * len(others)
        if known and others:
            rows = changes[[int(chosen[:place].sum()) for place in known]].flatten(1)
            near_by = np.abs(np.subtract.outer(range(len(known)), range(len(known)))) <= AVERAGED
            weights = torch.tensor(
                np.exp(-np.abs(np.subtract.outer(known, known)) / distance) * near_by
            ).float()
            rows = weights @ rows / weights.sum(1, keepdim=True)
            expected = np.stack(
                [np.interp(others, known, column) for column in rows.T.numpy()], axis=1
            )
            np.testing.assert_allclose(found[others].flatten(1), expected, atol=1e-5)
    assert not (near.where & (chosen | ~plan.grafted)).any()


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(MODEL_DIR, dtype="float32", kv_gib=0.5)
    for text in (TEXT, OTHER):
        engine.generate(
            [Request([f"note {len(text)} : ", Segment(text)], "full", SamplingParams(max_tokens=1))]
        )
    return engine


def ask(engine: Engine, policy: Policy) -> tuple[Result, PrefillRecord]:
    recorded = Recorded(policy, keep_cache=True)
    prompt = [
        "read : ",
        Segment(OTHER),
        "and ",
        Segment(TEXT),
        " question : note of bell ? answer :",
    ]
    sampling = SamplingParams(max_tokens=1)
    [result] = engine.generate([Request(prompt, recorded, sampling, remember=False)])
    assert result.error is None
    return result, recorded.record


def test_a_part_of_what_has_changed_is_added_to_the_neighbours_keys_turned_to_their_places(
    engine: Engine,
):
    """In the second layer: keys and values of the first hang on the token alone, so that nothing
    changes there."""
    (_, copied), (_, apart), (_, spread) = (
        ask(engine, policy)
        for policy in (
            Naive(),
            Spread(start_share=1.0, recompute_share=0.1, spread_share=0.0, alike_share=1.0),
            Spread(start_share=1.0, recompute_share=0.1, spread_share=0.7, alike_share=1.0),
        )
    )
    plan, chosen = apart.plan, apart.computed[-1] & apart.plan.grafted
    assert torch.equal(spread.computed[-1] & spread.plan.grafted, chosen)
    assert 20 < int(chosen.sum()) < int(plan.grafted.sum()) / 2
    torch.testing.assert_close(spread.keys[0], apart.keys[0], atol=1e-5, rtol=0)
    anchors = chosen & ~plan.segment_starts(8)
    assert int(plan.segments[anchors].bincount().min()) >= 3
    near = Spreading(plan, anchors, chosen, 64, 0.7)
    assert torch.equal(near.where, plan.grafted & ~chosen)
    rope = engine.config.rope

    still = rotate(
        apart.keys[1, anchors] - copied.keys[1, anchors], *rope.table(-plan.positions[anchors])
    )
    keys = copied.keys[1, near.where] + rotate(
        near.interpolate(still), *rope.table(plan.positions[near.where])
    )
    values = copied.values[1, near.where] + near.interpolate(
        apart.values[1, anchors] - copied.values[1, anchors]
    )
    torch.testing.assert_close(spread.keys[1, near.where], keys, atol=1e-4, rtol=0)
    torch.testing.assert_close(spread.values[1, near.where], values, atol=1e-4, rtol=0)
    assert (spread.keys[1] - apart.keys[1])[near.where].abs().max() > 0.005
    torch.testing.assert_close(
        spread.keys[1, ~near.where], apart.keys[1, ~near.where], atol=1e-4, rtol=0
    )


def test_the_first_tokens_of_a_segment_tell_nothing_of_the_others(engine: Engine):
    """An edit before them changes them in ways of its own."""
    (_, apart), (_, spread) = (
        ask(
            engine,
            Spread(start_share=1.0, recompute_share=0.0, spread_share=share, alike_share=1.0),
        )
        for share in (0.0, 1.0)
    )
    assert int((apart.computed[-1] & apart.plan.grafted).sum()) == 16
    torch.testing.assert_close(spread.keys, apart.keys, atol=1e-5, rtol=0)


def test_kv_that_is_nearer_to_full_prefill(engine: Engine):
    """Of the tokens that are not recomputed; full prefill in a namespace of its own.

    Layer 0 chooses here: what layer 1 of this small model chooses are numbers, which change in ways
    of their own."""
    sampling = SamplingParams(max_tokens=1)
    prompt = [
        "read : ",
        Segment(OTHER),
        "and ",
        Segment(TEXT),
        " question : note of bell ? answer :",
    ]
    everything = Recorded(Spread(recompute_share=1.0), keep_cache=True)
    engine.generate([Request(prompt, everything, sampling, remember=False)])
    truth = everything.record
    (_, apart), (_, spread) = (
        ask(engine, Spread(start_share=1.0, score_layer=0, recompute_share=0.1, spread_share=share))
        for share in (0.0, 0.5)
    )
    rest = apart.plan.grafted & ~apart.computed[-1]

    def deviation(record: PrefillRecord) -> float:
        return float((record.keys - truth.keys)[:, rest].square().sum())

    assert deviation(spread) < 0.97 * deviation(apart)


def test_kv_that_is_exact_cannot_be_changed(engine: Engine):
    class Careless(Naive):
        def recover(self, ctx):  # type: ignore[no-untyped-def]
            ctx.graft(range(ctx.num_layers))
            fresh = ctx.plan.fresh
            ctx.add(0, fresh, *ctx.kv(0, fresh))

    prompt = ["read : ", Segment(TEXT), " question : note of bell ? answer :"]
    with pytest.raises(ValueError, match="only the KV of grafted tokens may be changed"):
        engine.generate([Request(prompt, Careless(), SamplingParams(max_tokens=1), remember=False)])
