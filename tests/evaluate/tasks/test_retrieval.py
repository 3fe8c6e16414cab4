"""Code completion whose context a retriever chose."""

import re
from random import Random

import pytest

from kvgraft_lab.evaluate.tasks import code, find_suites
from kvgraft_lab.evaluate.tasks.code import Definition, Package, Use
from kvgraft_lab.evaluate.tasks.items import QUESTIONS, Shape
from kvgraft_lab.evaluate.tasks.retrieval import make_retrieval, retrieve

TEXTS = {
    "pkg/money.py": "def convert(amount, currency):\n    return amount * rates[currency]",
    "pkg/clock.py": "def minutes(hours):\n    return 60 * hours",
    "pkg/bells.py": "def minutes(hours):\n    return 60 * hours",
    "pkg/rates.py": "def rates_of(currency, day):\n    return table[day][currency]",
    "pkg/shop.py": "def price(amount, currency):\n    return convert(amount, currency)",
}
SHAPE = Shape(1400, 6)


@pytest.fixture
def package() -> Package:
    definitions = {}
    for file, text in TEXTS.items():
        name = text.split("(")[0].removeprefix("def ")
        definitions[file, name] = Definition(file, name, text)
    return Package("pkg", definitions, ())


def retrieved(package: Package, leading: str, count: int) -> list[str]:
    use = Use("pkg/shop.py", "convert", "pkg/money.py", leading, "    convert(amount)", 12)
    return [one.file for one in retrieve(package, use, count)]


def test_definitions_that_share_more_words_with_the_code_come_first(package: Package):
    leading = "def price(amount, currency):\n    # the currency of the amount, and its rates"
    assert retrieved(package, leading, 2) == ["pkg/money.py", "pkg/rates.py"]
    assert retrieved(package, "def late(hours): # minutes", 2) == ["pkg/clock.py", "pkg/bells.py"]


@pytest.mark.parametrize("leading", ["", "    # 1", "unknown words"])
def test_code_that_shares_no_word_leaves_the_order_of_the_package(package: Package, leading: str):
    assert retrieved(package, leading, 4) == list(TEXTS)[:4]


@pytest.mark.usefixtures("few_packages")
def test_each_question_has_definitions_of_its_own_with_the_called_one():
    suite = make_retrieval()
    assert suite.single == suite.tasks == ("line", "call")
    items = [suite.make(Random(number), SHAPE, "call", "alone") for number in range(4)]
    asked = [ask for item in items for ask in item.phase_2]
    assert len(asked) == len(items)
    assert len({ask.segments[1:-1] for ask in asked}) == len({ask.begun for ask in asked}) > 1
    for item, ask in zip(items, asked, strict=True):
        definitions = ask.segments[1:-1]
        assert len(definitions) == len(item.phase_1) == SHAPE.num_segments
        called = re.search(r"(\w+)\($", ask.begun)[1]
        assert any(f" {called}" in text for text in definitions)


@pytest.mark.usefixtures("few_packages")
def test_the_suite_is_found_by_name_and_has_splits():
    [suite] = find_suites("retrieval", "dev")
    assert suite.description.endswith("(dev split)")
    items = suite.items(3, 1, SHAPE)
    assert len(items) == QUESTIONS * len(suite.tasks)
    assert items == suite.items(3, 1, SHAPE)
    assert items != suite.items(4, 1, SHAPE)
    packages = {package.name for package in code.packages_of("dev")}
    segments = [text for item in items for text in item.phase_2[0].segments]
    files = {text.split("/")[0] for text in segments if text.startswith("# ")}
    assert files == {f"# {package}" for package in packages}
