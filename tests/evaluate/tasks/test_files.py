import json
from pathlib import Path

import pytest

from kvgraft.evaluate.tasks import Shape, find_suites, load_suite

HAYSTACK = "\n".join(["A special number is hidden here.", *(f"Line {n} says {n * 7}." for n in range(20))])
RULER = {"index": 0, "input": f"{HAYSTACK}\nWhat does line 3 say? Answer:", "outputs": ["21"], "length": 99}
LONGBENCH = {
    "input": "Who came?",
    "context": "".join(f"Passage {n}:\nName {n} came on day {n}.\n" for n in range(1, 7)),
    "answers": ["Name 1", "1"],
    "dataset": "hotpotqa",
    "length": 50,
}
LOCOMO = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ada",
        "speaker_b": "Bert",
        "session_2": [{"speaker": "Bert", "dia_id": "D2:1", "text": "I moved to Turin."}],
        "session_2_date_time": "2 May",
        "session_1": [{"speaker": "Ada", "dia_id": "D1:1", "text": "Hello."}],
        "session_1_date_time": "1 May",
        "session_10": [{"speaker": "Ada", "dia_id": "D10:1", "text": "Bye."}],
    },
    "qa": [
        {"question": "Where does Bert live?", "answer": "Turin", "evidence": ["D2:1"], "category": 1},
        {"question": "In which year?", "answer": 2024, "category": 2},
        {"question": "Where does Carl live?", "adversarial_answer": "Rome", "category": 5},
    ],
}
HOTPOT = {
    "_id": "x",
    "question": "Where is it?",
    "answer": "Turin",
    "context": [["One", ["It is near.", " It is here."]], ["Two", ["It is in Turin."]], ["Three", ["No."]]],
    "supporting_facts": [["Two", 0]],
}


def write(path: Path, *records: object) -> Path:
    lines = path.suffix == ".jsonl"
    path.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records))
    return path


def test_ruler(tmp_path: Path):
    suite = load_suite(write(tmp_path / "vt.jsonl", RULER, RULER))
    [record, _] = suite.records
    assert record.segments[0] == "A special number is hidden here."
    assert (len(record.segments), record.metric, record.task) == (21, "contains_all", "vt")
    assert record.questions == (("What does line 3 say? Answer:", ("21",)),)
    assert load_suite(write(tmp_path / "qa_1.jsonl", RULER)).records[0].metric == "contains_any"


def test_longbench(tmp_path: Path):
    [record] = load_suite(write(tmp_path / "file.jsonl", LONGBENCH)).records
    assert len(record.segments) == 6
    assert record.segments[1] == "Passage 2:\nName 2 came on day 2.\n"
    assert (record.metric, record.task) == ("f1", "hotpotqa")
    assert record.questions == (("Question: Who came?\nAnswer:", ("Name 1", "1")),)


def test_locomo(tmp_path: Path):
    [record] = load_suite(write(tmp_path / "locomo10.json", LOCOMO)).records
    assert record.segments == ("1 May\nAda: Hello.", "2 May\nBert: I moved to Turin.", "\nAda: Bye.")
    asked = [(question.splitlines()[0], answers) for question, answers in record.questions]
    assert asked == [("Question: Where does Bert live?", ("Turin",)), ("Question: In which year?", ("2024",))]


def test_hotpotqa(tmp_path: Path):
    [record] = load_suite(write(tmp_path / "dev.json", HOTPOT)).records
    assert record.segments == ("One\nIt is near. It is here.", "Two\nIt is in Turin.", "Three\nNo.")
    assert record.questions == (("Question: Where is it?\nAnswer:", ("Turin",)),)


@pytest.mark.parametrize("count", [2, 3, 8, 50])
def test_segments_are_merged_and_nothing_is_lost(tmp_path: Path, count: int):
    suite = load_suite(write(tmp_path / "vt.jsonl", RULER))
    [item] = suite.items(0, 9, Shape(num_segments=count, patterns=("instruction",)))
    [ask] = item.phase_2
    instruction, *segments, question = ask.segments
    assert "\n".join(segments) == HAYSTACK
    assert len(segments) == min(count, 21)
    assert question == "What does line 3 say? Answer:"
    [[other, *known]] = item.phase_1
    assert known == segments
    assert other != instruction


def test_records_are_drawn_by_seed(tmp_path: Path):
    records = [{**RULER, "outputs": [str(number)]} for number in range(20)]
    suite = load_suite(write(tmp_path / "vt.jsonl", *records))
    first, again, other = ([item.phase_2[0].answers for item in suite.items(seed, 5, Shape())] for seed in (0, 0, 1))
    assert first == again != other
    assert len(set(first)) == 5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", "{}", "must be a list of records"),
        ("a.json", "[]", "must be a list of records"),
        ("a.jsonl", "3", "must be a list of records"),
        ("a.jsonl", '{"text": 1}', "fields text is of no known format: RULER has input, outputs; LongBench"),
        ("a.jsonl", '{"input": 5, "outputs": []}', "record 1 cannot be read"),
        ("a.json", json.dumps([HOTPOT, {"question": "?"}]), "record 2 cannot be read: KeyError"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        find_suites(str(path))


def test_no_such_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*missing\.json"):
        find_suites(str(tmp_path / "missing.json"))
