import json
from pathlib import Path

import pytest

from kvgraft_lab.evaluate.metrics import SCORES
from kvgraft_lab.evaluate.tasks import Shape, find_suites, load_suite

HAYSTACK = "\n".join(
    ["A special number is hidden here.", *(f"Line {n} says {n * 7}." for n in range(20))]
)
RULER = {
    "index": 0,
    "input": f"{HAYSTACK}\nWhat does line 3 say? Answer:",
    "outputs": ["21"],
    "length": 99,
}
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
        {
            "question": "Where does Bert live?",
            "answer": "Turin",
            "evidence": ["D2:1"],
            "category": 1,
        },
        {"question": "In which year?", "answer": 2024, "category": 2},
        {"question": "Where does Carl live?", "adversarial_answer": "Rome", "category": 5},
    ],
}
HOTPOT = {
    "_id": "x",
    "question": "Where is it?",
    "answer": "Turin",
    "context": [
        ["One", ["It is near.", " It is here."]],
        ["Two", ["It is in Turin."]],
        ["Three", ["No."]],
    ],
    "supporting_facts": [["Two", 0]],
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Where was it made?",
    "answer": "Turin",
    "answer_aliases": ["Torino"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "One", "paragraph_text": "It was made by Two.", "is_supporting": True},
        {"idx": 1, "title": "Two", "paragraph_text": "Two works in Turin.", "is_supporting": True},
    ],
}
MTRAG = {
    "conversation_id": "c1",
    "task_id": "c1<::>2",
    "turn": "2",
    "contexts": [{"document_id": "d1", "text": "\nLamps are red.", "title": "Lamps", "score": 2.5}],
    "input": [
        {"speaker": "user", "text": "Hello.", "metadata": {"author_type": "human"}},
        {"speaker": "agent", "text": " Hello, ask me. ", "metadata": {"author_type": "model"}},
        {"speaker": "user", "text": "What about lamps?", "metadata": {"author_type": "human"}},
    ],
    "targets": [{"speaker": "agent", "text": "They are red.", "metadata": {}}],
    "answerability": ["ANSWERABLE"],
}
BFCL = {
    "id": "multiple_0",
    "question": [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Light the lamp."}]
    ],
    "function": [
        {
            "name": "lamp.light",
            "description": "Light.",
            "parameters": {"type": "dict", "properties": {}, "required": []},
        },
        {
            "name": "lamp.dim",
            "description": "Atténuer.",
            "parameters": {"type": "dict", "properties": {}, "required": []},
        },
    ],
}
TRUTH = {"id": "multiple_0", "ground_truth": [{"lamp.light": {"colour": ["red", ""]}}]}


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
    prefixed = {**RULER, "input": f"{HAYSTACK}\nWhat does line 3 say?", "answer_prefix": " It says"}
    [item] = load_suite(write(tmp_path / "new.jsonl", prefixed)).items(0, 1, Shape())
    assert (item.phase_2[0].segments[-1], item.phase_2[0].begun) == (
        "What does line 3 say?",
        " It says",
    )


def test_longbench(tmp_path: Path):
    [record] = load_suite(write(tmp_path / "file.jsonl", LONGBENCH)).records
    assert len(record.segments) == 6
    assert record.segments[1] == "Passage 2:\nName 2 came on day 2.\n"
    assert (record.metric, record.task) == ("f1", "hotpotqa")
    assert record.questions == (("Question: Who came?\nAnswer:", ("Name 1", "1")),)


def test_locomo(tmp_path: Path):
    [record] = load_suite(write(tmp_path / "locomo10.json", LOCOMO)).records
    assert record.segments == (
        "1 May\nAda: Hello.",
        "2 May\nBert: I moved to Turin.",
        "\nAda: Bye.",
    )
    asked = [(question.splitlines()[0], answers) for question, answers in record.questions]
    assert asked == [
        ("Question: Where does Bert live?", ("Turin",)),
        ("Question: In which year?", ("2024",)),
    ]


def test_hotpotqa(tmp_path: Path):
    [record] = load_suite(write(tmp_path / "dev.json", HOTPOT)).records
    assert record.segments == ("One\nIt is near. It is here.", "Two\nIt is in Turin.", "Three\nNo.")
    assert record.questions == (("Question: Where is it?\nAnswer:", ("Turin",)),)
    titles, sentences = zip(*HOTPOT["context"], strict=True)
    stored = {**HOTPOT, "context": {"title": titles, "sentences": sentences}}  # by Hugging Face
    assert (
        load_suite(write(tmp_path / "stored.jsonl", stored)).records[0].segments == record.segments
    )


def test_2wikimultihopqa_has_the_form_of_hotpotqa(tmp_path: Path):
    record = {**HOTPOT, "type": "compositional", "evidences": [["One", "made in", "Turin"]]}
    assert load_suite(write(tmp_path / "2wiki.json", record)).description == "HotpotQA: 2wiki.json"


def test_musique(tmp_path: Path):
    unanswerable = {**MUSIQUE, "id": "2", "answerable": False}
    [record] = load_suite(
        write(tmp_path / "musique_full_v1.0_dev.jsonl", MUSIQUE, unanswerable)
    ).records
    assert record.segments == ("One\nIt was made by Two.", "Two\nTwo works in Turin.")
    assert record.questions == (("Question: Where was it made?\nAnswer:", ("Turin", "Torino")),)
    assert record.metric == "f1"


def test_mtrag(tmp_path: Path):
    left_out = [{**MTRAG, "contexts": []}, {**MTRAG, "answerability": ["UNANSWERABLE"]}]
    suite = load_suite(write(tmp_path / "reference.jsonl", MTRAG, *left_out))
    [record] = suite.records
    assert record.segments == ("Lamps are red.", "User: Hello.\nAssistant: Hello, ask me.")
    assert record.questions == (("User: What about lamps?\nAssistant:", ("They are red.",)),)
    [item] = suite.items(0, 1, Shape(patterns=("instruction",)))
    [ask] = item.phase_2
    assert ask.segments[0].startswith("Continue the conversation")
    assert (ask.max_tokens, ask.metric) == (128, "f1")


def test_bfcl(tmp_path: Path):
    (tmp_path / "possible_answer").mkdir()
    for folder, record in ((tmp_path, BFCL), (tmp_path / "possible_answer", TRUTH)):
        second = {**record, "id": "multiple_1"}
        # lines in .json
        (folder / "BFCL_v4_multiple.json").write_text(
            f"{json.dumps(record)}\n{json.dumps(second)}\n"
        )
    suite = load_suite(tmp_path / "BFCL_v4_multiple.json")
    assert len(suite.records) == 2
    defined = [json.loads(segment)["function"] for segment in suite.records[0].segments]
    assert defined == BFCL["function"]
    assert "Atténuer." in suite.records[0].segments[1]
    [ask] = suite.items(0, 1, Shape(patterns=("instruction",)))[0].phase_2
    assert ask.segments[0].startswith("You answer requests by calling functions.")
    assert ask.segments[-1].endswith("</tool_call>\n\nBe brief.\nLight the lamp.")
    answers = (
        '<tool_call>\n{"name": "lamp.light", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "lamp.dim", "arguments": {}}\n</tool_call>',
    )
    assert [SCORES[ask.metric](answer, ask.answers) for answer in answers] == [1.0, 0.0]


def test_bfcl_needs_its_answers(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match=r"answers of BFCL are looked for in .*possible_answer.tools\.json"
    ):
        load_suite(write(tmp_path / "tools.json", BFCL))
    (tmp_path / "possible_answer").mkdir()
    beside = tmp_path / "possible_answer" / "tools.json"
    beside.write_text("[1]")
    with pytest.raises(
        ValueError, match=r"tools\.json: must have a record with an id a line: TypeError"
    ):
        load_suite(tmp_path / "tools.json")
    beside.write_text(json.dumps({**TRUTH, "id": "other"}))
    with pytest.raises(ValueError, match="record 1 cannot be read: KeyError 'ground_truth'"):
        load_suite(tmp_path / "tools.json")


def test_splits_of_a_file(tmp_path: Path):
    contexts = [[["One", [f"It is number {number}."]], ["Two", ["No."]]] for number in range(40)]
    records = [
        {**HOTPOT, "context": one, "question": asked}
        for one in contexts
        for asked in ("Where?", "When?")
    ]
    path = write(tmp_path / "dev.json", *records)
    everything, dev, test = (load_suite(path, split) for split in ("all", "dev", "test"))
    assert sorted(map(str, (*dev.records, *test.records))) == sorted(map(str, everything.records))
    assert min(len(dev.records), len(test.records)) > 20
    assert {one.segments for one in dev.records}.isdisjoint(one.segments for one in test.records)
    assert (dev.description, everything.description) == (
        "HotpotQA: dev.json (dev split)",
        "HotpotQA: dev.json",
    )


def test_tasks_of_one_conversation_are_of_one_split(tmp_path: Path):
    tasks = [
        {
            **MTRAG,
            "conversation_id": f"c{number % 9}",
            "contexts": [{"text": f"Lamp {number} is red."}],
        }
        for number in range(36)
    ]
    path = write(tmp_path / "reference.jsonl", *tasks)
    dev, test = (
        {one.group for one in load_suite(path, split).records} for split in ("dev", "test")
    )
    assert (len(dev | test), dev & test) == (9, set())


def test_a_split_without_records_is_an_error(tmp_path: Path):
    path = write(tmp_path / "one.json", HOTPOT)
    found = []
    for split in ("dev", "test"):
        try:
            found.append(len(load_suite(path, split).records))
        except ValueError as error:
            found.append(str(error))
    assert 1 in found
    assert any("of 1 records none can be asked about (" in str(one) for one in found)


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
    first, again, other = (
        [item.phase_2[0].answers for item in suite.items(seed, 5, Shape())] for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(set(first)) == 5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", "{}", "must be a list of records"),
        ("a.json", "[]", "must be a list of records"),
        ("a.jsonl", "3", "must be a list of records"),
        (
            "a.jsonl",
            '{"text": 1}',
            "fields text is of no known format: RULER has input, outputs; LongBench",
        ),
        ("a.jsonl", '{"input": 5, "outputs": []}', "record 1 cannot be read"),
        ("a.json", json.dumps([HOTPOT, {"question": "?"}]), "record 2 cannot be read: KeyError"),
        (
            "a.jsonl",
            json.dumps({**MUSIQUE, "paragraphs": [{"title": "One"}]}),
            "record 1 cannot be read: KeyError 'paragraph",
        ),
        ("a.jsonl", json.dumps({**MTRAG, "input": []}), "record 1 cannot be read: ValueError"),
        (
            "a.jsonl",
            json.dumps({**MTRAG, "input": [{"speaker": "system", "text": "?"}]}),
            "KeyError 'system'",
        ),
        ("a.json", '{"a": 1}\n{"a"', "not JSON"),
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
