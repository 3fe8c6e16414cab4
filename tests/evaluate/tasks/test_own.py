"""Prompts over texts of the user that have been edited since they were read."""

from kvgraft_lab.evaluate.tasks.items import Shape
from kvgraft_lab.evaluate.tasks.own import edit_known, make_own

TEXTS = {"one": " ".join(f"word{number}" for number in range(20_000))}
SHAPE = Shape(1024, 3)


def test_what_is_read_is_edited_and_what_is_asked_is_not():
    suite = make_own(TEXTS)
    plain, edited = (one.items(3, 6, SHAPE) for one in (suite, edit_known(suite, 0.05)))
    assert [item.phase_2 for item in plain] == [item.phase_2 for item in edited]
    changed, words = 0, 0
    for before, after in zip(plain, edited, strict=True):
        for old, new in zip(before.phase_1, after.phase_1, strict=True):
            assert len(old) == len(new)
            pairs = [
                pair
                for one, other in zip(old, new, strict=True)
                for pair in zip(one.split(" "), other.split(" "), strict=True)
            ]
            changed += sum(one != other for one, other in pairs)
            words += len(pairs)
    assert 0.03 < changed / words < 0.06


def test_equal_seeds_edit_equal_words():
    suite = edit_known(make_own(TEXTS), 0.05)
    assert suite.items(3, 2, SHAPE) == suite.items(3, 2, SHAPE)
    assert suite.items(3, 2, SHAPE) != suite.items(4, 2, SHAPE)
