"""Calls in a user's own package to complete, for the demonstration on a model for code."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvgraft_lab.evaluate.passages import Passage, Reading, TextQuestion
from kvgraft_lab.evaluate.tasks.code import (
    INSTRUCTION,
    Definition,
    Use,
    draw_uses,
    read_package,
    segment,
)

NUM_QUESTIONS = 6
# definitions before each question, and most characters of each
AROUND, SIZE = 5, 1200
# further definitions that are read
OTHERS = 6
# instructions of the prompts that read the definitions, in turn
READERS = ("You review Python code.", "You write docstrings.", "You look for bugs.")


def completions(directory: Path, seed: int = 0) -> Reading:
    """Return calls in a Python package, each of a function or class of another file, for their
    arguments. The definition is in the prompt, among others of the package.

    Args:
        directory: directory of a package. Its files are parsed, never imported or run.
        seed: seed of the choice of calls.

    Raises:
        ValueError: no such directory, or too few such calls in it.
    """
    if not directory.is_dir():
        raise ValueError(f"--code: {directory} is no directory")
    directory = directory.resolve()
    package = read_package(directory.parent, directory.name)
    rng = Random(seed)  # noqa: S311
    uses = draw_uses(rng, package.uses, NUM_QUESTIONS)
    if len(uses) < NUM_QUESTIONS or len(package.definitions) < 2 * AROUND:
        raise ValueError(
            f"--code: {directory} has {len(uses)} calls of functions or classes of another file "
            f"and {len(package.definitions)} definitions; {NUM_QUESTIONS} and {2 * AROUND} are "
            "needed. Name the directory of a package"
        )

    keys = [(use.source, use.name) for use in uses]
    asked = {use.file for use in uses}
    rest = [key for key in package.definitions if key not in keys and key[0] not in asked]
    others = [
        _passage(package.definitions[key]) for key in rng.sample(rest, min(len(rest), OTHERS))
    ]
    called = [_passage(package.definitions[key]) for key in keys]
    every = rng.sample(called + others, len(called + others))
    questions = tuple(
        _question(rng, use, own, [other for other in called + others if other is not own])
        for use, own in zip(uses, called, strict=True)
    )
    return Reading(
        read=tuple(
            (READERS[start // AROUND % len(READERS)], tuple(every[start : start + AROUND]))
            for start in range(0, len(every), AROUND)
        ),
        instruction=INSTRUCTION,
        opening="Read these definitions.",
        questions=questions,
        subject=f"calls in {directory.name}, with definitions",
    )


def _passage(definition: Definition) -> Passage:
    return Passage(definition.name, segment(definition, SIZE))


def _question(rng: Random, use: Use, own: Passage, others: Sequence[Passage]) -> TextQuestion:
    passages = [own, *rng.sample(others, min(AROUND - 1, len(others)))]
    rng.shuffle(passages)
    asked = f"How does this function of {use.file} go on?"
    begun = f"{use.leading}\n{use.line[: use.called]}"
    shown = "\n".join(begun.splitlines()[-3:])
    return TextQuestion(
        f"{asked}\n{shown}",
        tuple(passages),
        asked,
        begun=f"```python\n{begun}",
        expected=use.line[use.called :],
    )
