from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import pytest
import rich
from rich.console import Console

from gguf_files import make_gguf
from kvgraft import Engine
from kvgraft.models.convert import convert
from kvgraft_lab.evaluate.completions import completions
from kvgraft_lab.evaluate.passages import WORLD, Passage, Reading, TextQuestion
from kvgraft_lab.evaluate.reading import (
    AnsweredQuestion,
    PolicyAnswer,
    ReadingReport,
    _summary,
    render,
    run_reading_demo,
)

FIRST = Passage("First", "the hen is here. " * 8)
SECOND = Passage("Second", "then the other one came there. " * 6)
QUESTIONS = (
    TextQuestion("where is the hen?", (SECOND, FIRST), "where is it?"),
    TextQuestion("who came?", (FIRST, SECOND), "who came?", begun="it was", expected="the other"),
)
TEXTS = Reading(
    read=(("Be quick.", (FIRST,)), ("Be slow.", (SECOND,))),
    instruction="Answer.",
    opening="Read.",
    questions=QUESTIONS,
    subject="questions about hens",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("reading")
    make_gguf(folder / "model.gguf")
    convert(folder / "model.gguf", folder / "made")
    return Engine(folder / "made")


@pytest.fixture(scope="module")
def progress() -> list[tuple[int, ...]]:
    return []


@pytest.fixture(scope="module")
def report(engine: Engine, progress: list[tuple[int, ...]]) -> ReadingReport:
    policies = ("full", "transitive", "sparsex:boundary_layers=0,recompute_share=1.0")
    return run_reading_demo(
        engine, TEXTS, policies=policies, on_progress=lambda *counts: progress.append(counts)
    )


def test_known_texts_are_reused_in_every_question(
    report: ReadingReport, progress: list[tuple[int, ...]]
):
    assert [question.question for question in report.questions] == [
        question.text for question in QUESTIONS
    ]
    assert report.questions[0].titles == ("Second", "First")
    for question in report.questions:
        full, transitive, everything = question.answers
        assert (full.policy, full.reused, full.recomputed) == ("full", 0, 0)
        assert transitive.reused == everything.reused > len(FIRST.text + SECOND.text) / 2
        assert 0 < transitive.recomputed < transitive.reused
        assert everything.recomputed == everything.reused
        assert everything.text == full.text != ""
        assert all(answer.ttft_s > 0 and answer.fallback is None for answer in question.answers)
    assert progress == [(1, 2), (2, 2)]
    assert report.summary.startswith(
        "You saw 2 questions about hens that the model had read before"
    )
    assert ", word for word, to all 2. With the texts in reverse order, full" in report.summary


def test_full_answers_once_more_with_the_texts_in_reverse_order(
    engine: Engine, report: ReadingReport
):
    turned = replace(QUESTIONS[1], passages=QUESTIONS[1].passages[::-1])
    other = run_reading_demo(
        engine, replace(TEXTS, questions=(turned,)), policies=("full", "naive")
    )
    assert report.questions[1].reordered == other.questions[0].answers[0].text
    assert report.questions[1].answers[0].text == other.questions[0].reordered
    assert report.questions[1].reordered != other.questions[0].reordered


def test_a_single_text_has_no_other_order(engine: Engine):
    question = replace(QUESTIONS[0], passages=(FIRST,))
    report = run_reading_demo(
        engine, replace(TEXTS, questions=(question,)), policies=("full", "naive")
    )
    assert report.questions[0].reordered is None
    assert "reverse" not in report.summary


def test_the_report_becomes_json(report: ReadingReport):
    decoded = msgspec.json.decode(msgspec.json.encode(report))
    assert decoded["questions"][1]["answers"][1]["policy"] == "transitive"


def answered(text: str, ttft_s: float, fallback: str | None = None) -> AnsweredQuestion:
    full = PolicyAnswer("full", "Under the bridge.", 2.0, 0, 0, None)
    ours = PolicyAnswer("transitive", text, ttft_s, 0 if fallback else 900, 45, fallback)
    return AnsweredQuestion("Where?", ("Bridges", "Rivers"), 1000, (full, ours), "By the bridge.")


def test_the_summary_says_where_answers_differ_and_when_reuse_is_slower():
    same, other = answered("Under the bridge.", 0.5), answered("On the bridge.", 0.5)
    assert _summary([same, other], "questions about texts") == (
        "You saw 2 questions about texts that the model had read before, in other prompts and in "
        "another order: "
        "transitive took over 90% of the tokens, computed 5% of those again, began to answer 4.0 "
        "times as fast as full "
        "recomputation, and gave the same answer, word for word, to 1 and another one to 1. With "
        "the texts in reverse order, full recomputation itself gave an answer in other words to "
        "all 2."
    )
    assert "and gave an answer in other words to all 2. With" in _summary(
        [other, other], "questions"
    )
    assert "0.5 times as fast" in _summary([answered("Under the bridge.", 4.0)], "questions")


def test_a_terminal_of_80_columns_shows_every_word():
    answer = (
        "It stands where the road from the old town reaches the river, and it has stood there for "
        "long. " * 2
    )
    questions = (answered(answer, 0.5), answered("Under the bridge.", 1.0, "pool_pressure"))
    console = Console(width=80, record=True, file=StringIO())
    console.print(render(ReadingReport("a setup", questions, "What you saw.")))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert (
        "1. Where? 1000 tokens: Bridges, Rivers full 2.00 s Under the bridge. transitive 0.50 s It "
        "stands where" in text
    )
    assert "900 tokens reused, 45 of them recomputed" in text
    assert "nothing reused: pool_pressure" in text
    assert text.count("full, texts reversed By the bridge.") == 2
    assert lines[-1] == "What you saw."


@pytest.mark.parametrize("policies", [(), ("full",), ("naive", "full")])
def test_policies_begin_with_full(engine: Engine, policies: tuple[str, ...]):
    with pytest.raises(ValueError, match="policies must be full and at least one more"):
        run_reading_demo(engine, policies=policies)


def test_a_model_with_too_few_positions(engine: Engine, tmp_path: Path):
    make_gguf(tmp_path / "model.gguf", max_position_embeddings=256)
    convert(tmp_path / "model.gguf", tmp_path / "made")
    with pytest.raises(ValueError, match="exceed the limit of 256"):
        run_reading_demo(Engine(tmp_path / "made"))


def assert_all_is_read(reading: Reading) -> set[Passage]:
    read = {passage for _, group in reading.read for passage in group}
    for question in reading.questions:
        assert read.issuperset(question.passages)
        assert len(set(question.passages)) == len(question.passages) >= 2
    return read


def test_the_texts_are_read_before_they_are_asked_about():
    for passage in assert_all_is_read(WORLD):
        assert all("\n" not in paragraph for paragraph in passage.text.split("\n\n"))


def test_calls_in_a_package_are_asked_with_the_definitions_that_they_use():
    reading = completions(Path(rich.__file__).parent)
    assert_all_is_read(reading)
    for question in reading.questions:
        name = question.begun.rsplit("\n", 1)[-1].removesuffix("(").rsplit(None, 1)[-1]
        [called] = (passage for passage in question.passages if passage.title == name)
        assert f"def {name}" in called.text or f"class {name}" in called.text
        assert question.expected
        assert question.expected.endswith(")")
    assert completions(Path(rich.__file__).parent) == reading


def test_right_answers_are_counted_where_they_are_known():
    answers = (
        PolicyAnswer("full", "x = f(1)", 2.0, 0, 0, None),
        PolicyAnswer("spread", "x = f(2)", 1.0, 5, 1, None),
    )
    line = AnsweredQuestion("?", ("a",), 9, answers, reordered="x = f(1)", expected="x = f( 1 )")
    assert _summary([line, line], "lines").endswith(
        "Equal to the file, of 2: full 2, spread 0, full with the texts in reverse order 2."
    )


@pytest.mark.parametrize("where", ["missing", "empty"])
def test_a_directory_without_such_lines_is_refused(tmp_path: Path, where: str):
    (tmp_path / "empty").mkdir()
    expected = "is no directory" if where == "missing" else "0 calls of"
    with pytest.raises(ValueError, match=f"--code: .*{where}.*{expected}"):
        completions(tmp_path / where)
