"""Sessions without an end: their prompts, and what is called level."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.testbed.tasks import read
from research import endless
from research.endless import (
    EARLY,
    GROUPS,
    LATE,
    MOST_MEAN,
    MOST_TURN,
    NOISE,
    NUM_TOOLS,
    SHAPES,
    TURNS,
    WINDOW,
    Row,
    Shape,
    by_turn,
    make_sessions,
    run,
    table,
    trend,
)


@pytest.fixture(scope="module")
def sessions() -> dict[Shape, list[tuple[str, ...]]]:
    """By shape the prompts of one session."""
    made = make_sessions(SHAPES, 1, 7, testbed=True)
    return {shape: [turn.segments for turn in turns] for shape, _, turns in made}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_turn_brings_one_document_and_asks_what_the_prompt_says(shape: Shape):
    [(_, _, turns)] = make_sessions([shape], 1, 7, testbed=True)
    assert len(turns) == TURNS
    for turn in turns:
        *texts, question = turn.segments
        assert turn.answer in {found.answer for found in read(texts) if found.text == question}
    assert len({turn.segments[-2] for turn in turns}) == TURNS


def test_shapes_differ_in_what_becomes_of_the_history(sessions: dict[Shape, list[tuple[str, ...]]]):
    last = {shape: prompts[-1] for shape, prompts in sessions.items()}
    assert len(last["dropping"]) == 2 * WINDOW + 1
    assert sessions["dropping"][-2][3:-1] == last["dropping"][1:-3]  # the oldest group is gone
    assert len(last["window"]) == WINDOW + 2
    assert len(last["summary"]) < 2 * GROUPS + 3
    assert last["summary"][1].startswith("so far :")
    assert len({prompt[0] for prompt in sessions["clock"]}) == TURNS
    assert {*sessions["tools"][5][1 : NUM_TOOLS + 1]} == {*last["tools"][1 : NUM_TOOLS + 1]}
    assert sessions["tools"][5][1 : NUM_TOOLS + 1] != last["tools"][1 : NUM_TOOLS + 1]
    for prompt in sessions["thinking"][1:]:
        assert [text.startswith("let me see :") for text in prompt].count(True) == 1


def test_another_order_keeps_the_beginning_and_the_question():
    [(_, _, turns)] = make_sessions(["window"], 1, 7, testbed=True)
    other = endless.in_another_order(turns[-1], Random(1))
    assert other.segments != turns[-1].segments
    assert sorted(other.segments) == sorted(turns[-1].segments)
    assert other.segments[0] == turns[-1].segments[0]
    assert other.segments[-1] == turns[-1].segments[-1]


def rows(computed: float, kl: float) -> list[Row]:
    """Two sessions of which late turns compute so much, and whose KL grows by so much a turn."""
    return [
        Row("window", number, turn, "default", 1.0, kl * turn, 1, 100, share)
        for number in range(2)
        for turn in range(1, TURNS + 1)
        for share in [0.2 if turn in EARLY else computed]
    ]


@pytest.mark.parametrize(("computed", "level"), [(0.2, "yes"), (0.24, "NO")])
def test_late_turns_that_compute_more_are_not_level(computed: float, level: str):
    made = table(rows(computed, 0), "window")
    cells = {str(column.header): next(iter(column.cells)) for column in made.columns}
    assert cells["level"] == level
    assert cells["late / early"] == f"{computed / 0.2:.2f}"


def test_the_trend_is_of_ten_turns_and_no_single_turn_makes_one():
    value, low, high = trend(rows(0.2, 0.01))
    assert low <= value <= high
    assert value == pytest.approx(0.1)
    level = rows(0.2, 0)
    value, low, high = trend([replace(row, kl=5.0) if row.turn == TURNS else row for row in level])
    assert (low <= 0 <= high, value) == (True, 0)


def test_kl_is_in_units_of_order_noise():
    noise = [replace(row, condition=NOISE, kl=0.5) for row in rows(0.2, 0)]
    made = table([*[replace(row, kl=0.1) for row in rows(0.2, 0)], *noise], "window")
    cells = {str(column.header): list(column.cells) for column in made.columns}
    assert cells["KL, early"] == ["0.200", "1.000"]


def test_sessions_that_are_known_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """What was interrupted goes on with the next session; tables are of all."""
    measured = []

    def run(model: Path, sessions: list, conditions: list[str], dtype: str) -> Iterator[list[Row]]:
        for shape, number, _ in sessions:
            measured.append(number)
            yield [
                replace(row, session=number, shape=shape) for row in rows(0.2, 0) if not row.session
            ]

    monkeypatch.setattr(endless, "run", run)
    for count in ("1", "3", "3"):
        options = ["--shapes", "window", "--sessions", count, "--out", str(tmp_path)]
        monkeypatch.setattr("sys.argv", ["endless", *options])
        endless.main()
    assert measured == [0, 1, 2]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3 * TURNS


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["dropping", "clock", "thinking"])
def test_a_session_costs_as_much_in_late_turns_as_in_early_ones(shape: Shape):
    """The depth of its text grows by one with each turn."""
    sessions = list(make_sessions([shape], 1, 5, testbed=True))
    [rows] = run(MODEL_DIR, sessions, ["default"], "float32")
    mine = [row for row in rows if row.condition == "default"]
    early, late = (np.array(by_turn(mine, "computed", turns)) for turns in (EARLY, LATE))
    assert mine[-1].depth > 15
    assert late.mean() <= MOST_MEAN * early.mean()
    assert late.max() <= MOST_TURN * early.mean()
