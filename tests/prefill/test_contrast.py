"""Which tokens tell alike text apart."""

from collections.abc import Iterable
from itertools import repeat

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Engine, Request, Result, SamplingParams, Segment
from kvgraft.core.matches import Match
from kvgraft.core.plan import Plan
from kvgraft.policies import Spread, parse_policy
from kvgraft.prefill.contrast import (
    CONTEXT_TOKENS,
    HEAD_TOKENS,
    MOST_SHARE,
    NEAR_TOKENS,
    PHRASE_TOKENS,
    SAME_WORDS_SHARE,
    SLOT_TOKENS,
    START_TOKENS,
    SUBJECT_SEGMENTS,
    SUBJECT_SHARE,
    TEXT_TOKENS,
    VALUE_TOKENS,
    WORDING_SHARE,
    WORDING_TOKENS,
    distinguishing_tokens,
)
from kvgraft_lab.evaluate.recording import PrefillRecord, Recorded
from kvgraft_lab.testbed import MODEL_DIR
from properties import examples

FORM = [*range(1000, 1020), 0, *range(1020, 1040), 0, *range(1040, 1062)]  # 0: a value
SIZE = len(FORM)
ZEROS = repeat(0)
# the beginning, values, and what stands next to them
DIFFERING = [
    *range(START_TOKENS),
    *(at + near for at in (20, 41) for near in range(-NEAR_TOKENS, NEAR_TOKENS + 1)),
]


def filled(*values: int) -> list[int]:
    rest = iter(values)
    return [next(rest) if token == 0 else token for token in FORM]


def plan_of(
    lengths: list[int],
    readings: list[int | None],
    places: Iterable[int] = ZEROS,
    block_size: int = 4,
    cached: Iterable[bool] = repeat(False),
) -> Plan:
    """Texts of these lengths, one behind the other; None: not grafted. A token follows that is
    computed.

    Args:
        places: where each was read in its source.
        cached: texts that are cached where they are, in place of a graft.
    """
    matches, hits, start = [], [], 0
    for length, reading, place, is_hit in zip(lengths, readings, places, cached, strict=False):
        if reading is not None:
            pages = np.arange(-(-(place % block_size + length) // block_size))
            where = hits if is_hit else matches
            where.append(Match(start, length, place, pages, 0, reading))
        start += length
    return Plan.for_prompt(start + 1, block_size, matches=matches, hits=hits)


def chosen(
    texts: list[list[int]], readings: list[int | None], alike_share: float = 0.3
) -> list[int]:
    plan = plan_of([len(text) for text in texts], readings)
    tokens = torch.tensor([token for text in texts for token in text] + [999])
    found = distinguishing_tokens(plan, tokens, alike_share)
    assert not (found & ~plan.grafted).any()
    return found.nonzero()[:, 0].tolist()


def behind(texts: int, found: list[int] = DIFFERING) -> list[int]:
    """These places in the text behind so many of the size of FORM."""
    return [texts * SIZE + at for at in found]


def test_values_of_a_form_are_found_with_their_neighbours_behind_the_first_text():
    texts = [filled(50, 51), filled(60, 61), filled(70, 71)]
    assert chosen(texts, [1, 2, 3]) == [*behind(1), *behind(2)]


def test_texts_before_the_first_of_another_reading_stay_as_they_are():
    texts = [filled(value, value + 1) for value in (50, 60, 70, 80)]
    assert chosen(texts, [1, 1, 2, 1]) == [*behind(2), *behind(3)]
    unlike = list(range(100, 130))
    assert chosen([unlike, *texts[:2]], [1, 2, 3]) == [30 + at for at in behind(1)]


def test_the_first_text_stays_wherever_it_has_stood():
    texts = [filled(50, 51), filled(60, 61)]
    for place in (0, SIZE // 2, 3 * SIZE):
        plan = plan_of([SIZE, SIZE], [1, 2], [place, 0])
        found = distinguishing_tokens(plan, torch.tensor([*texts[0], *texts[1], 999]), 0.3)
        assert found.nonzero()[:, 0].tolist() == behind(1)


def test_text_that_was_read_together_is_told_apart_already():
    assert chosen([filled(50, 51), filled(60, 61)], [1, 1]) == []


def test_turns_that_move_together_were_read_together():
    texts = [filled(50, 51), filled(60, 61)]
    matches = [Match(at, SIZE, 100 + at, np.arange(16), 0, 7 + at) for at in (0, SIZE)]
    tokens, total = torch.tensor([*texts[0], *texts[1], 999]), 2 * SIZE + 1
    together = Plan.for_prompt(total, 4, matches=matches)
    assert not distinguishing_tokens(together, tokens, 0.3).any()
    apart = [matches[0], Match(SIZE, SIZE, 300, np.arange(16), 0, 99)]
    plan = Plan.for_prompt(total, 4, matches=apart)
    assert distinguishing_tokens(plan, tokens, 0.3).any()
    both = Plan.batch([plan, together])
    found = distinguishing_tokens(both, torch.cat([tokens, tokens]), 0.3)
    assert found[:total].any()
    assert not found[total:].any()


def test_cached_text_counts_with_the_prompt_that_it_was_read_in():
    texts = [filled(50, 51), filled(60, 61)]
    # the last tokens of the first text fill no block, and are computed
    lengths, tokens = [SIZE - 6, 6, SIZE], torch.tensor([*texts[0], *texts[1], 999])
    for reading, is_apart in ((2, False), (1, True), (None, True)):
        plan = plan_of(lengths, [reading, None, 2], cached=[True, False, False])
        found = distinguishing_tokens(plan, tokens, 0.3).nonzero()[:, 0].tolist()
        assert {*found} >= {*behind(1)} if is_apart else found == []


def test_new_text_of_the_same_form_is_computed_behind_what_is_known_and_tells_it_apart():
    assert chosen([filled(50, 51), filled(60, 61)], [1, None]) == []
    assert chosen([filled(50, 51), filled(60, 61)], [None, 1]) == behind(1)
    # less than two blocks: what a match of whole blocks leaves of a segment
    edge = filled(60, 61)[:6]
    assert chosen([edge, filled(50, 51)], [None, 1]) == []


def test_equal_texts_and_unlike_texts_have_nothing_that_differs():
    assert chosen([filled(50, 51), filled(50, 51)], [1, 2]) == []
    assert chosen([list(range(100, 130)), list(range(200, 230))], [1, 2]) == []


def test_only_segments_that_share_enough_look_alike():
    texts = [
        filled(50, 51),
        [*filled(60, 61), *range(100, 400)],
        [*filled(70, 71), *range(500, 510)],
    ]
    found = chosen(texts, [1, 2, 3])  # the form is 62 of 364 tokens, of 74
    first = SIZE + len(texts[1])
    assert found == [first + at for at in (*DIFFERING, *range(SIZE - NEAR_TOKENS, SIZE + 10))]


def test_wording_that_recurs_by_chance_is_short():
    """As in the bundled model's language of few words."""
    texts = [[*FORM[:4], value, *FORM[14:18], value + 1] for value in (50, 60)]
    assert chosen(texts, [1, 2]) == []
    long = [
        [
            *FORM[:5],
            value,
            *(token for at in (14, 22, 30, 44) for token in (*FORM[at : at + 4], value + at)),
        ]
        for value in (200, 300)
    ]
    assert chosen(long, [1, 2], 5 / 21) != []
    assert chosen(long, [1, 2], 5.1 / 21) == []


def test_of_long_stretches_the_beginning_is_recomputed():
    for length, expected in ((SLOT_TOKENS, SLOT_TOKENS), (SLOT_TOKENS + 1, HEAD_TOKENS)):
        texts = [
            [*FORM[:6], *range(at, at + length), *FORM[11:17], *range(300, 340)]
            for at in (100, 200)
        ]
        second = [at - len(texts[0]) for at in chosen(texts, [1, 2])]
        assert second == [*range(6 + expected + NEAR_TOKENS)]


def test_texts_that_hardly_share_more_than_their_form_are_recomputed_behind_the_first():
    short = [
        [*FORM[:5], value, *FORM[6:11], value + 1, *FORM[12:17], value + 2, *FORM[22:27], value + 3]
        for value in (50, 60)
    ]
    assert chosen(short, [1, 2]) == [*range(24, 48)]
    other = list(range(200, 260))
    assert chosen([*short, other], [1, 2, 3]) == [*range(24, 48)]
    assert chosen(short, [1, None]) == []


def test_a_value_that_some_of_the_others_share_is_found_too():
    values = [(50, 70), (51, 70), (52, 71), (53, 71)]
    names, places = ({size * SIZE + at for size in range(1, 4)} for at in (20, 41))
    assert names | places < {*chosen([filled(*pair) for pair in values], [1, 2, 3, 4])}
    together = [(50, 70), (50, 70), (50, 71), (50, 71)]
    assert places < {*chosen([filled(*pair) for pair in together], [1, 2, 3, 4])}
    assert chosen([filled(*pair) for pair in together], [1, 2, 3, 4], 1.0) == []


def test_a_value_is_found_that_only_the_first_text_has_otherwise():
    assert 41 + SIZE in chosen([filled(50, 70), filled(51, 71), filled(52, 71)], [1, 2, 3])


def test_what_an_earlier_prompt_has_left_in_place_stays():
    texts = [filled(50, 51), filled(60, 61)]
    match = Match(SIZE, SIZE, 300, np.arange(16), 0, 2)
    plan = Plan.for_prompt(
        2 * SIZE + 1, 4, prefix_blocks=range(16), matches=[match], in_place=range(16)
    )
    found = distinguishing_tokens(plan, torch.tensor([*texts[0], *texts[1], 999]), 0.3)
    assert plan.grafted[:SIZE].all()
    assert found.nonzero()[:, 0].tolist() == behind(1)


def test_equally_long_texts_of_two_readings_do_not_hide_a_third():
    """As A and B of one prompt and C and D of another are asked as A, D, C: A and D stand where
    they stood."""
    texts = [filled(50, 51), filled(60, 61), filled(70, 71)]
    # place, place where it was read, reading
    sources = [(0, 0, 1), (SIZE, SIZE, 2), (2 * SIZE, 0, 2)]
    matches = [Match(at, SIZE, origin, np.arange(32), 0, source) for at, origin, source in sources]
    tokens = torch.tensor([token for text in texts for token in text] + [999])
    found = distinguishing_tokens(Plan.for_prompt(3 * SIZE + 1, 2, matches=matches), tokens, 0.3)
    starts, values = range(START_TOKENS), DIFFERING[START_TOKENS:]  # A and D move as one segment
    assert found.nonzero()[:, 0].tolist() == [*starts, *behind(1, values), *behind(2)]


def test_texts_that_say_the_same_in_other_words_are_recomputed_behind_the_first():
    """Four texts of 60 tokens, of which each shares 24 words with the others, in orders of its
    own."""
    rng = np.random.default_rng(0)
    words = np.arange(100, 124)
    texts = [
        rng.permutation([*words, *range(1000 * n, 1000 * n + 36)]).tolist() for n in range(1, 5)
    ]
    assert chosen(texts, [1, 2, 3, 4], 0.65) == list(range(60, 240))
    assert chosen(texts[:2], [1, 2], 0.65) == []  # too few to tell
    for text in texts:
        text[:18] = range(90, 108)  # some of the words, in the same order
    assert chosen(texts, [1, 2, 3, 4], 0.65) == list(range(60, 240))
    assert chosen(texts, [1, 1, 1, 1], 0.65) == []  # were read together
    other = list(range(9000, 9100))
    assert chosen([*texts, other], [1, 2, 3, 4, 5], 0.65) == list(range(60, 240))  # another subject
    for number, text in enumerate(texts[1:]):
        text[::2] = range(5000 + 30 * number, 5030 + 30 * number)
    assert chosen(texts, [1, 2, 3, 4], 0.65) == []


def slow(plan: Plan, tokens: list[int], alike_share: float) -> list[bool]:
    """The definition, token by token."""
    if alike_share == 1.0:
        return [False] * plan.num_tokens
    total, prompts = (
        plan.num_tokens,
        [n for n, length in enumerate(plan.lengths) for _ in range(length)],
    )
    readings, moves = plan.readings.tolist(), [0] * total
    columns = plan.graft_targets.tolist(), plan.graft_shifts.tolist()
    for target, move in zip(*columns, strict=True):
        moves[target] = move
    copied = plan.grafted.tolist()
    segments, of, number = list[int](), list[tuple[int, int, bool | int]](), -1
    for at in range(total):
        of.append((prompts[at], int(plan.segments[at]), not copied[at] and readings[at]))
        number += not at or of[at - 1] != of[at]
        segments.append(number)
    in_place = plan.in_place.tolist()

    def apart(places: list[int]) -> bool:
        return len({readings[at] for at in places}) > 1 and len({moves[at] for at in places}) > 1

    def of_another_reading(mine: list[int]) -> list[int]:
        mine = [at for at in mine if len(members[segments[at]]) >= TEXT_TOKENS]
        return [at for at in mine if readings[at] != readings[mine[0]]]

    def in_shared(length: int) -> list[bool]:
        found: dict[tuple[int, ...], list[int]] = {}
        for at in range(total - length + 1):
            is_edge = not copied[at] and segments.count(segments[at]) < 2 * plan.block_size
            if segments[at] == segments[at + length - 1] and not is_edge:
                found.setdefault((prompts[at], *tokens[at : at + length]), []).append(at)
        shared = [False] * total
        for places in found.values():
            for at in places if apart(places) else ():
                shared[at : at + length] = [True] * length
        return shared

    shared, phrases = in_shared(WORDING_TOKENS), in_shared(PHRASE_TOKENS)
    members = {
        segment: [at for at in range(total) if segments[at] == segment] for segment in segments
    }
    candidates = {
        segment
        for segment, mine in members.items()
        if sum(shared[at] for at in mine) >= max(WORDING_SHARE * len(mine), 1)
    }
    alike, similar = set(), []
    for prompt in range(len(plan.lengths)):
        mine = [at for at in range(total) if segments[at] in candidates and prompts[at] == prompt]
        known = [at for at in mine if copied[at] and not in_place[at]]
        if sum(phrases[at] for at in known) >= max(
            alike_share * sum(shared[at] for at in known), 1
        ):
            others = of_another_reading(mine)
            alike |= {at for at in known if others and at >= others[0]}
            similar.append(known)
    slots: set[int] = set()
    for segment in {segments[at] for at in alike}:
        run: list[int] = []
        for at in [*members[segment], None]:
            if at is not None and not shared[at]:
                run.append(at)
            else:
                slots |= set(run if len(run) <= SLOT_TOKENS else run[:HEAD_TOKENS])
                run = []

    before, behind = CONTEXT_TOKENS
    values: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for length in range(1, VALUE_TOKENS + 1):
        for at in range(before, total - length - behind + 1):
            if segments[at - before] == segments[at + length + behind - 1] and (
                segments[at] in candidates or not copied[at]
            ):
                context = tokens[at - before : at] + tokens[at + length : at + length + behind]
                values.setdefault((prompts[at], *context), []).append((at, at + length))
    for spans in values.values():
        differ = [{tokens[first] for first, _ in spans}, {tokens[stop - 1] for _, stop in spans}]
        if apart([first for first, _ in spans]) and min(map(len, differ)) > 1:
            slots |= {at for first, stop in spans for at in range(first, stop)}
    slots &= alike

    wide = [False] * total
    for mine in members.values():
        if not slots & set(mine):
            continue
        for at in mine:
            wide[at] = (
                any(near in slots for near in mine if abs(near - at) <= NEAR_TOKENS)
                or at in mine[:START_TOKENS]
            )
    for known in similar:
        if sum(wide[at] for at in known) > MOST_SHARE * len(known):
            for at in known:
                wide[at] = at in alike
    same_words = {at for known in similar for at in known if shared[at]}
    for prompt in range(len(plan.lengths)):
        copied_here = {
            at for at in range(total) if prompts[at] == prompt and copied[at] and not in_place[at]
        }
        texts = [
            mine
            for mine in members.values()
            if copied_here >= {*mine} and len(mine) >= 2 * plan.block_size
        ]
        mine = [at for text in on_one_subject(texts, tokens) for at in text]
        if min(
            len({column[at] for at in mine}) for column in (readings, moves)
        ) >= SUBJECT_SEGMENTS and (len(same_words & {*mine}) < SAME_WORDS_SHARE * len(mine)):
            others = of_another_reading(mine)
            for at in mine:
                wide[at] |= bool(others) and at >= others[0]
    return wide


def on_one_subject(texts: list[list[int]], tokens: list[int]) -> list[list[int]]:
    """Those texts (places) of whose distinct tokens a share stand once in each of half of all."""
    words, found = [[tokens[at] for at in text] for text in texts], []
    for text, mine in zip(texts, words, strict=True):
        having = [[other.count(token) for other in words if token in other] for token in set(mine)]
        common = [len(times) >= max(2, len(texts) / 2) and set(times) == {1} for times in having]
        if sum(common) >= SUBJECT_SHARE * len(common):
            found.append(text)
    return found


@examples(150)
@given(st.data())
def test_it_is_what_its_definition_says(data: st.DataObject):
    plans, tokens, vocabulary = [], [], data.draw(st.sampled_from((2, 60)))
    for _ in range(data.draw(st.integers(1, 2))):
        lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
        readings = data.draw(
            st.lists(st.none() | st.integers(0, 4), min_size=len(lengths), max_size=len(lengths))
        )
        places = data.draw(
            st.lists(st.integers(0, 40), min_size=len(lengths), max_size=len(lengths))
        )
        cached = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
        plans.append(plan_of(lengths, readings, places, cached=cached))
        size = plans[-1].num_tokens
        tokens += data.draw(st.lists(st.integers(0, vocabulary), min_size=size, max_size=size))
    plan, share = Plan.batch(plans), data.draw(st.sampled_from((0.0, 0.3, 0.7, 1.0)))
    found = distinguishing_tokens(plan, torch.tensor(tokens), share)
    assert found.tolist() == slow(plan, tokens, share)


REST = (
    " the small garden rested near the old bridge . the meadow was bright . the house near the "
    "market ended ."
)
SHEETS = [
    " ".join(
        f"the code of {thing} is {number} . the old market rested near the meadow . the bright "
        "house ended ." + REST
        for thing, number in zip(things, numbers, strict=True)
    )
    for things, numbers in (
        (("lamp", "bell"), (42, 17)),
        (("jade", "cup"), (90, 23)),
        (("fork", "lock"), (84, 36)),
    )
]


ONE = SamplingParams(max_tokens=1)


def ask(engine: Engine, policy: str) -> tuple[Result, PrefillRecord]:
    recorded = Recorded(parse_policy(policy))
    parts = [part for sheet in SHEETS for part in ("then : ", Segment(sheet))]
    request = Request(
        [*parts, " question : code of jade ? answer :"], recorded, SamplingParams(1), remember=False
    )
    [result] = engine.generate([request])
    assert result.error is None
    return result, recorded.record


@pytest.mark.parametrize("together", [False, True])
def test_spread_recomputes_them_in_every_layer_and_counts_them(together: bool):
    engine = Engine(MODEL_DIR, dtype="float32", kv_gib=0.5)
    readings = [SHEETS] if together else [[sheet] for sheet in SHEETS]
    for number, sheets in enumerate(readings):
        parts = [Segment(sheet) for sheet in sheets]
        engine.generate(
            [Request([f"note {number} : ", *parts], "full", SamplingParams(max_tokens=1))]
        )
    (plain, _), (ours, record) = (
        ask(engine, policy) for policy in ("spread:alike_share=1.0", "spread")
    )
    differing = ours.report.counts["distinguishing_tokens"]
    assert plain.report.counts["distinguishing_tokens"] == 0
    if together:
        assert differing == 0
        assert ours.report.recomputed_tokens == plain.report.recomputed_tokens
    else:
        assert 2 * 4 * 2 / 2 < differing < 0.5 * ours.report.grafted_tokens
        assert ours.report.recomputed_tokens > plain.report.recomputed_tokens
    assert (
        int(record.computed[-1].sum()) == ours.report.recomputed_tokens + ours.report.fresh_tokens
    )


def test_all_but_the_first_of_short_sheets_is_recomputed():
    short = [sheet.replace(REST, "") for sheet in SHEETS]
    engine = Engine(MODEL_DIR, dtype="float32", kv_gib=0.5)
    for number, sheet in enumerate(short):
        engine.generate(
            [Request([f"note {number} : ", Segment(sheet)], "full", SamplingParams(max_tokens=1))]
        )
    parts = [part for sheet in short for part in ("then : ", Segment(sheet))]
    [result] = engine.generate(
        [Request([*parts, " question : code of jade ? answer :"], "spread", ONE)]
    )
    behind = result.report.counts["distinguishing_tokens"]
    assert behind == pytest.approx(result.report.grafted_tokens * 2 / 3, rel=0.1)


def test_the_share_is_checked():
    with pytest.raises(ValueError, match="alike_share"):
        Spread(alike_share=1.5)
