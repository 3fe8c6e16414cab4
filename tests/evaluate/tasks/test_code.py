"""Code completion over packages: what counts as a use, and what a prompt holds."""

from pathlib import Path
from random import Random

import pytest

from kvgraft_lab.evaluate.metrics import edit_similarity, line_match
from kvgraft_lab.evaluate.tasks import code, find_suites
from kvgraft_lab.evaluate.tasks.code import Package, make_code
from kvgraft_lab.evaluate.tasks.items import Shape

pytestmark = pytest.mark.usefixtures("few_packages")
SHAPES = '''
class Circle:
    """A circle with a centre, a radius and a colour."""

    def __init__(self, centre, radius, colour):
        self.centre, self.radius, self.colour = centre, radius, colour


def area_of(circle, scale):
    """Return the area of a circle, in units of `scale`: pi times the square of its radius."""
    return 3.14159 * (circle.radius / scale) ** 2


def short():
    pass
'''
DRAWING = """
from pkg.shapes import Circle, area_of
from .shapes import short
from elsewhere import other


def draw(canvas, radius):
    before = canvas.state()
    circle = Circle(canvas.centre, radius, "red")
    size = area_of(
        circle, 2
    )
    if size > 3:
        canvas.clear()
        return area_of(circle, canvas.scale)
    other(circle, size, before)
    short()

    def nested():
        canvas.save()
        canvas.area = area_of(circle, 7)

    return nested
"""


@pytest.fixture
def package(tmp_path: Path) -> Package:
    for file, text in (("shapes", SHAPES), ("drawing", DRAWING), ("__init__", ""), ("bad", "def")):
        (tmp_path / "pkg").mkdir(exist_ok=True)
        (tmp_path / "pkg" / f"{file}.py").write_text(text)
    return code.read_package(tmp_path, "pkg")


def test_uses_are_whole_lines_that_call_another_files_definition(package: Package):
    assert set(package.definitions) == {
        ("pkg/shapes.py", "Circle"), ("pkg/shapes.py", "area_of"), ("pkg/drawing.py", "draw")
    }  # fmt: skip
    assert [(use.name, use.line.strip()) for use in package.uses] == [
        ("Circle", 'circle = Circle(canvas.centre, radius, "red")'),
        ("area_of", "return area_of(circle, canvas.scale)"),
        ("area_of", "canvas.area = area_of(circle, 7)"),
    ]


def test_a_use_begins_where_its_function_does_and_keeps_its_indentation(package: Package):
    circle, area, nested = package.uses
    assert circle.leading == "def draw(canvas, radius):\n    before = canvas.state()"
    assert circle.line[: circle.called] == "    circle = Circle("
    assert area.line == "        return area_of(circle, canvas.scale)"
    assert nested.leading == "def nested():\n    canvas.save()"


@pytest.mark.parametrize("task", ["line", "call"])
def test_a_prompt_holds_the_definition_and_never_the_answer(task: str):
    suite = make_code()
    for number in range(4):
        rng = Random(number)
        item = suite.make(rng, Shape(1400, 6), task, "alone")
        assert item.phase_2
        for ask in item.phase_2:
            *_, question = ask.segments
            segments = ask.segments[1:-1]
            assert all(segment.startswith("# ") for segment in segments)
            given = ask.begun.rstrip().splitlines()[-1]
            name = (given if task == "call" else ask.answers[0]).split("(")[0].split()[-1]
            assert any(f" {name}" in segment for segment in segments), name
            if task == "line":
                assert not any(ask.answers[0].strip() in segment for segment in segments)
            assert question.startswith("Question: How does this function of ")
            assert ask.stop == ("\n",)


def test_packages_are_in_one_split():
    dev, test = ({package.name for package in code.packages_of(split)} for split in ("dev", "test"))
    assert dev
    assert test
    assert not dev & test
    [suite] = find_suites("code", "test")
    assert suite.description.endswith("(test split)")


def test_equal_seeds_give_equal_items():
    suite, shape = make_code("dev"), Shape(1400, 6)
    assert suite.items(3, 2, shape) == suite.items(3, 2, shape)
    assert suite.items(3, 2, shape) != suite.items(4, 2, shape)


def test_too_short_prompts_are_refused():
    with pytest.raises(ValueError, match="length must be at least 451 tokens for 6 segments"):
        make_code("dev").items(3, 1, Shape(300, 6))


def test_the_first_line_of_an_answer_counts():
    expected = ["  size = area_of(circle, 2)"]
    assert line_match("\n size = area_of( circle, 2 )\nmore", expected) == 1
    assert line_match("size = area_of(circle, 3)", expected) == 0
    assert edit_similarity("size = area_of(circle, 2)\nreturn", expected) == 1
    assert 0.9 < edit_similarity("size = area_of(circle, 3)", expected) < 1
    assert edit_similarity("", expected) == 0
