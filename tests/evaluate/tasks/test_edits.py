"""Sessions in which files are edited between two prompts: what is asked, and what has been read."""

import re
from random import Random

import pytest

from kvgraft_lab.evaluate.tasks import find_suites
from kvgraft_lab.evaluate.tasks.edits import ADDED, READ_AGAIN, REPLACED, make_edits, rename
from kvgraft_lab.evaluate.tasks.items import PATTERNS, Pattern, Shape

pytestmark = pytest.mark.usefixtures("few_packages")
SHAPE = Shape(1800, 6)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("task", [REPLACED, READ_AGAIN])
def test_only_edited_files_say_the_new_name(task: str, pattern: Pattern):
    suite = make_edits()
    for number in range(3):
        item = suite.make(Random(number), SHAPE, task, pattern)
        read = " ".join(text for texts in item.phase_1 for text in texts)
        assert item.phase_2
        for ask in item.phase_2:
            [name] = ask.answers
            first = re.sub(f"_?({'|'.join(ADDED)})$", "", name, flags=re.IGNORECASE)
            old = rf"\b{first}\b"
            *shown, question = ask.segments
            assert name not in read
            assert name not in question + ask.begun
            assert not re.search(old, ask.begun)
            edited = [text for text in shown if name in text]
            again = [text.startswith("# Edited:\n# ") for text in edited]
            assert again == [task == READ_AGAIN] * len(edited)
            assert any(re.search(rf"(def|class) {name}\b", text) for text in edited)
            stale = [text for text in shown if re.search(old, text.partition("\n")[2])]
            assert bool(stale) is (task == READ_AGAIN)
            assert not any(text in edited for text in stale)
            assert ask.begun == ask.begun.rstrip(" ")
            assert ask.stop == ("(", "\n")


def test_what_was_not_edited_is_read_as_it_is_shown():
    item = make_edits().make(Random(1), SHAPE, REPLACED, "reordered")
    [read] = item.phase_1
    kept = {*item.phase_2[0].segments} & {*read}
    assert 1 <= len(kept) == SHAPE.num_segments - len(item.phase_2)


def test_renaming_changes_whole_words_of_code_only():
    text = "# pkg/area.py\ndef area(x):\n    return area_of(x) + area(x - 1)\n"
    assert rename(text, {"area": "area_once"}) == (
        "# pkg/area.py\ndef area_once(x):\n    return area_of(x) + area_once(x - 1)\n"
    )


def test_the_suite_is_found_by_name():
    [suite] = find_suites("edits", "dev")
    assert (suite.name, suite.tasks) == ("edits", (REPLACED, READ_AGAIN))
