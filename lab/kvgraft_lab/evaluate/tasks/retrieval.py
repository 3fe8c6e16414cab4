"""Code completion whose context a retriever chose, over installed packages.

line, call   as in `code`

Each question has its own prompt: the definitions of other files that BM25 ranks first for the
lines before the asked one, best first (as in CrossCodeEval, Ding et al. 2023; one of two orders of
RepoBench-P, Liu et al. 2024). Unlike there, questions whose called definition is not among them are
left out.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from random import Random

from kvgraft_lab.evaluate.tasks.code import (
    INSTRUCTION,
    Definition,
    Package,
    Use,
    ask,
    described,
    draw_package,
    draw_uses,
    segment,
    segment_size,
)
from kvgraft_lab.evaluate.tasks.items import Item, Pattern, Shape, Suite
from kvgraft_lab.evaluate.tasks.texts import write_item

TASKS = ("line", "call")
# words of names in snake_case count one by one
WORDS = r"[a-z][a-z0-9]+"


def make_retrieval(split: str = "all") -> Suite:
    """Return the suite, from installed packages. All of a package is in one split.

    Raises:
        ValueError: an unknown split, or none of the packages is installed.
    """
    make = partial(_write, split)
    return Suite("retrieval", described(split), TASKS, make, single=TASKS, real_text=True)


def _write(split: str, rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    """Write one question of a task about a package."""
    count = shape.num_segments
    size = segment_size(shape, count)
    found_uses = partial(_found_uses, count)
    package = draw_package(rng, split, count, found_uses)
    [use] = draw_uses(rng, found_uses(package), 1)
    segments = [segment(definition, size) for definition in retrieve(package, use, count)]
    return write_item(rng, INSTRUCTION, segments, pattern, [ask(task, use)])


def retrieve(package: Package, use: Use, count: int) -> list[Definition]:
    """Return the first `count` definitions of files other than the use's, best first.

    Equal scores keep the order of the package.
    """
    scores = _scorer(package)(use.leading)
    ranked = sorted(
        zip(scores, package.definitions.values(), strict=True), key=lambda pair: -pair[0]
    )
    return [one for _, one in ranked if one.file != use.file][:count]


@lru_cache(maxsize=32)
def _found_uses(count: int, package: Package) -> tuple[Use, ...]:
    """Return the uses whose called definition is among the first `count`."""
    return tuple(
        use
        for use in package.uses
        if package.definitions[use.source, use.name] in retrieve(package, use, count)
    )


@lru_cache(maxsize=32)
def _scorer(package: Package) -> Callable[[str], Sequence[float]]:
    """Return a function that scores all definitions of a package for a text."""
    import bm25s  # takes a quarter of a second to load

    def words(*texts: str) -> list[list[str]]:
        return bm25s.tokenize(
            list(texts), token_pattern=WORDS, stopwords=None, return_ids=False, show_progress=False
        )

    index = bm25s.BM25()
    definitions = package.definitions.values()
    index.index(words(*(f"{one.file}\n{one.text}" for one in definitions)), show_progress=False)

    def score(text: str) -> Sequence[float]:
        [query] = words(text)
        return index.get_scores(query) if query else [0.0] * len(definitions)

    return score
