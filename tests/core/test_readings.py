"""Which matches have been read in one prompt, so that their KV tells them apart."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Engine, Request, SamplingParams, Segment
from kvgraft.core import readings as module
from kvgraft.core.matches import Match
from kvgraft.core.plan import Plan
from kvgraft.core.readings import Readings, spans_of
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
    readings.add(2, [(1, 0, LENGTH, 0)])
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


def noted(readings: Readings, source: int, pages: list[int], *matches: Match) -> None:
    """A source in these pages, with copies of these matches."""
    held = np.array(pages)
    readings.note(source, spans_of(matches), held, np.ones(len(pages), np.int64), 0, 16)


def hits(readings: Readings, *pages: int) -> list[tuple[int, int, int, int]]:
    """(start, length, source, place there) of the text in pages that a prompt begins with."""
    blocks, versions = np.arange(len(pages)), np.ones(len(pages), np.int64)
    found = readings.hits(blocks, np.array(pages, np.int64), versions, 16)
    return [(one.start, one.length, one.source, one.source_start) for one in found]


def test_cached_blocks_are_text_of_the_source_that_they_were_copied_from():
    readings = Readings()
    noted(readings, 1, [10, 11, 12, 13])
    # in a prompt: 4 new tokens, 32 tokens from position 23 of source 1, new tokens
    noted(readings, 2, [20, 21, 22, 23], match(1, 23, 32, start=4))
    assert hits(readings, 20, 21, 22, 23) == [(0, 32, 1, 19), (32, 32, 2, 32)]
    assert hits(readings, 10, 11, 99, 23) == [(0, 32, 1, 0), (48, 16, 2, 48)], "99 is not known"
    assert hits(readings) == []
    # these pages are the prefix of another prompt, in which new text follows
    noted(readings, 3, [20, 21, 30])
    assert hits(readings, 20, 21, 30) == [(0, 32, 1, 19), (32, 16, 3, 32)]
    assert labels(readings, match(1, 23), match(3)) == [1, 1]
    assert labels(readings, match(2, 32), match(3)) == [2, 3], "is not in that prefix"


def test_lost_pages_are_no_text():
    readings = Readings()
    noted(readings, 1, [10])
    assert not readings.hits(np.zeros(1, int), np.array([10]), np.full(1, 2), 16)


def test_sources_without_kv_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_SOURCES", 4)
    readings = Readings()
    for source in (2, 3):
        readings.add(source, spans_of([match(1)]))
    noted(readings, 4, [10, 11, 12], match(1))
    for source in (5, 6):
        readings.add(source, spans_of([match(1)]))
    readings.keep(np.array([3]))
    assert labels(readings, match(1), match(2)) == [1, 2]
    assert labels(readings, match(1), match(3)) == [1, 1], "was named"
    assert labels(readings, match(1), match(4)) == [1, 1], "has a page"
    assert labels(readings, match(1), match(5)) == [1, 1], "may still get pages"


def test_a_source_that_was_computed_again_was_read_behind_nothing():
    readings = Readings()
    readings.add(2, spans_of([match(1)]))
    readings.add(2, [])
    assert labels(readings, match(1), match(2)) == [1, 2]


@examples(100)
@given(st.data())
def test_it_is_what_its_definition_says(data: st.DataObject):
    spans = st.tuples(st.integers(0, 4), st.integers(0, 60), st.integers(0, 60)).map(
        lambda s: (s[0], *sorted(s[1:]))
    )
    behind: dict[int, list[tuple[int, int, int]]] = data.draw(
        st.dictionaries(st.integers(0, 4), st.lists(spans, max_size=4))
    )
    drawn = st.builds(match, st.integers(0, 4), st.integers(0, 40), st.integers(1, 30))
    matches, readings = data.draw(st.lists(drawn, max_size=6)), Readings()
    for source, rows in behind.items():
        readings.add(source, [(*row, 0) for row in rows])

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
    assert plan.readings.tolist() == [1] * LENGTH + [2] * LENGTH + [-1]
    readings = Readings()
    readings.add(2, spans_of([one]))
    plan = Plan.for_prompt(2 * LENGTH + 1, 16, matches=readings.label([one, other]))
    assert plan.readings.tolist() == [1] * (2 * LENGTH) + [-1]
    both = Plan.for_prompt(2 * LENGTH + 1, 16, range(2), [other], hits=[one])
    assert both.readings.tolist() == [1] * LENGTH + [2] * LENGTH + [-1]
    assert both.without_grafts().readings.tolist() == [1] * LENGTH + [-1] * (LENGTH + 1)
    assert Plan.batch([both, both]).readings.tolist() == 2 * both.readings.tolist()
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


def distinguished(engine: Engine, orders: Iterable[Iterable[int]]) -> list[int]:
    """Tokens that are recomputed since similar texts differ, by turn of a conversation with these
    texts in each of its prompts."""
    engine.clear_cache()
    found = []
    for order in orders:
        texts = [Segment(SHEETS[number]) for number in order]
        parts = ["read this : ", *texts, " question : code of lamp ? answer :"]
        [result] = engine.generate([Request(parts, "spread", SamplingParams(max_tokens=1))])
        report = result.report
        known = report.grafted_tokens, report.prefix_tokens, report.continued_tokens
        assert any(known) or not found
        found.append(report.counts.get("distinguishing_tokens", 0))
    return found


@pytest.mark.parametrize("kept", [(1, 2, 3, 3, 3, 3), (1, 2, 3, 2, 3, 3), (1, 2, 2, 2, 3, 3)])
def test_texts_that_a_conversation_has_read_one_behind_the_other_are_told_apart(
    engine: Engine, kept: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """Also where it goes on with a prompt that has dropped some."""
    orders = [range(turn + 1 - count, turn + 1) for turn, count in enumerate(kept)]
    assert distinguished(engine, orders) == [0] * len(kept)
    monkeypatch.setattr(Readings, "label", lambda readings, matches: list(matches))
    assert any(distinguished(engine, orders)), "they are not similar"


@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 2), (0, 2, 1), (0, 2, 1, 3)],  # begins with an exact prefix
        [(0, 1, 2), (1, 0, 2), (1, 2, 0)],  # with copies
        [(0, 1, 2), (1, 0, 2), (0, 1, 2, 3), (1, 3, 2, 0)],  # with copies of earlier turns
    ],
)
def test_a_prompt_may_begin_with_some_of_them(
    engine: Engine, orders: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
):
    assert distinguished(engine, orders) == [0] * len(orders)
    monkeypatch.setattr(Readings, "hits", lambda *_: [])
    assert any(distinguished(engine, orders)), "where they were read does not count"


def test_texts_that_were_read_alone_are_not(engine: Engine):
    engine.clear_cache()
    for number, text in enumerate(SHEETS[:3]):
        engine.generate(
            [Request([f"note {number} : ", Segment(text)], "full", SamplingParams(max_tokens=1))]
        )
    parts = ["read this : ", *map(Segment, SHEETS[:3]), " question : code of lamp ? answer :"]
    [result] = engine.generate([Request(parts, "spread", SamplingParams(max_tokens=1))])
    assert result.report.counts["distinguishing_tokens"] > 0
