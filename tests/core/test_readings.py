"""Which matches have been read in one prompt, so that their KV tells them apart."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Engine, Request, SamplingParams, Segment
from kvgraft.core import readings as module
from kvgraft.core.matches import Match
from kvgraft.core.plan import Plan
from kvgraft.core.readings import WHOLE, Readings, Span, spans_of
from kvgraft_lab.testbed import MODEL_DIR, vocabulary
from properties import examples

LENGTH = 32


def match(source: int, source_start: int = 0, length: int = LENGTH, start: int = 0) -> Match:
    return Match(start, length, source_start, np.arange(-(-length // 16) + 1), 0, source)


def labels(readings: Readings, *matches: Match) -> list[int | None]:
    return [labelled.reading for labelled in readings.label(matches)]


def test_text_is_read_together_with_all_that_its_source_was_read_behind():
    readings = Readings()
    readings.add(2, spans_of([match(1)]))
    assert labels(readings, match(1), match(2)) == [1, 1]
    assert labels(readings, match(2), match(1)) == [2, 2]
    assert labels(readings, match(1), match(3)) == [1, 3]
    assert labels(readings, match(1), match(2), match(3)) == [1, 1, 3]
    assert labels(Readings(), match(1), match(2)) == [1, 2]


def test_other_text_of_the_same_source_was_not():
    readings = Readings()
    readings.add(2, [(1, 0, LENGTH)])
    assert labels(readings, match(1, LENGTH), match(2)) == [1, 2]
    assert labels(readings, match(1, LENGTH // 2), match(2)) == [1, 1]  # half of it
    assert labels(readings, match(1, LENGTH // 2 + 1), match(2)) == [1, 2]


def test_a_group_has_only_texts_that_were_read_with_all_others():
    """2 was read behind 1 and 3 behind 2, but 3 never together with 1."""
    readings = Readings()
    readings.add(2, spans_of([match(1)]))
    readings.add(3, spans_of([match(2)]))
    assert labels(readings, match(1), match(2), match(3)) == [1, 1, 3]
    assert labels(readings, match(2), match(3), match(1)) == [2, 2, 1]


def test_who_goes_on_with_a_prompt_is_behind_all_that_this_was_behind():
    readings = Readings()
    readings.add(2, spans_of([match(1)]))
    readings.add(3, [(2, 0, WHOLE)])
    assert labels(readings, match(1), match(2), match(3)) == [1, 1, 1]


def test_the_oldest_sources_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CAPACITY", 2)
    readings = Readings()
    for source in (2, 3, 4):
        readings.add(source, spans_of([match(1)]))
    assert labels(readings, match(1), match(2)) == [1, 2]
    assert labels(readings, match(1), match(4)) == [1, 1]


@examples(100)
@given(st.data())
def test_it_is_what_its_definition_says(data: st.DataObject):
    spans = st.tuples(st.integers(0, 4), st.integers(0, 60), st.integers(0, 60)).map(
        lambda s: (s[0], *sorted(s[1:]))
    )
    behind: dict[int, list[Span]] = data.draw(
        st.dictionaries(st.integers(0, 4), st.lists(spans, max_size=4))
    )
    drawn = st.builds(match, st.integers(0, 4), st.integers(0, 40), st.integers(1, 30))
    matches, readings = data.draw(st.lists(drawn, max_size=6)), Readings()
    for source, rows in behind.items():
        readings.add(source, rows)

    def was_behind(other: Match, source: int) -> bool:
        first, stop = other.source_start, other.source_start + other.length
        return any(
            of == other.source and min(end, stop) - max(begin, first) >= other.length / 2
            for of, begin, end in behind.get(source, ())
        )

    groups: list[list[Match]] = []
    for number, (one, labelled) in enumerate(zip(matches, readings.label(matches), strict=True)):
        assert (labelled.start, labelled.source) == (one.start, one.source)
        for group in groups:
            if all(
                one.source == o.source or was_behind(o, one.source) or was_behind(one, o.source)
                for o in group
            ):
                group.append(one)
                break
        else:
            groups.append([one])
        mine = next(group for group in groups if any(one is other for other in group))
        if len({other.source for other in matches}) > 1:
            assert labelled.reading == mine[0].source, number


def test_a_plan_has_the_readings():
    [one, other] = Readings().label([match(1), match(2, start=LENGTH)])
    plan = Plan.for_prompt(2 * LENGTH + 1, 16, matches=[one, other])
    assert plan.graft_readings.tolist() == [1] * LENGTH + [2] * LENGTH
    readings = Readings()
    readings.add(2, spans_of([one]))
    plan = Plan.for_prompt(2 * LENGTH + 1, 16, matches=readings.label([one, other]))
    assert plan.graft_readings.tolist() == [1] * (2 * LENGTH)
    assert torch.equal(
        plan.graft_sources, Plan.for_prompt(2 * LENGTH + 1, 16, matches=[one, other]).graft_sources
    )


SHEETS = [
    " ".join(
        f"the code of {vocabulary.THINGS[8 * sheet + fact]} is "
        f"{vocabulary.NUMBERS[8 * sheet + fact]} ."
        " the old market rested near the meadow ."
        for fact in range(8)
    )
    for sheet in range(6)
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32", kv_gib=0.5)


def distinguished(engine: Engine, kept: tuple[int, ...]) -> list[int]:
    """Tokens that are recomputed since alike texts differ, by turn of a conversation that brings a
    text in each and keeps so many of them."""
    engine.clear_cache()
    found = []
    for turn, count in enumerate(kept):
        texts = [Segment(text) for text in SHEETS[turn + 1 - count : turn + 1]]
        parts = ["read this : ", *texts, " question : code of lamp ? answer :"]
        [result] = engine.generate([Request(parts, "spread", SamplingParams(max_tokens=1))])
        assert (
            result.report.grafted_tokens
            or result.report.prefix_tokens
            or result.report.continued_tokens
            or not turn
        )
        found.append(result.report.counts.get("distinguishing_tokens", 0))
    return found


@pytest.mark.parametrize("kept", [(1, 2, 3, 3, 3, 3), (1, 2, 3, 2, 3, 3), (1, 2, 2, 2, 3, 3)])
def test_texts_that_a_conversation_has_read_one_behind_the_other_are_told_apart(
    engine: Engine, kept: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """Also where it goes on with a prompt that has dropped some."""
    assert distinguished(engine, kept) == [0] * len(kept)
    monkeypatch.setattr(Readings, "label", lambda readings, matches: list(matches))
    assert any(distinguished(engine, kept)), "they do not look alike"


def test_texts_that_were_read_alone_are_not(engine: Engine):
    engine.clear_cache()
    for number, text in enumerate(SHEETS[:3]):
        engine.generate(
            [Request([f"note {number} : ", Segment(text)], "full", SamplingParams(max_tokens=1))]
        )
    parts = ["read this : ", *map(Segment, SHEETS[:3]), " question : code of lamp ? answer :"]
    [result] = engine.generate([Request(parts, "spread", SamplingParams(max_tokens=1))])
    assert result.report.counts["distinguishing_tokens"] > 0
