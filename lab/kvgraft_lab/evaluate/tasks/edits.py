"""Sessions of a coding agent over installed packages: files are read, edited and read again.

replaced     the prompt holds the edited files in place of the ones that were read, as editors that
             send the current files with each request do
read_again   the prompt holds the files as they were read, then each edited file once more, as
             agents that append the output of tools do

Between two prompts the called definitions get another name, in every definition that names them.
The answer is the new name, in a line of another file. KV of the first reading leads to the old
name, with which the new one begins.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from random import Random

from kvgraft_lab.evaluate.tasks.code import (
    Package,
    Use,
    ask_line,
    described,
    draw_keys,
    draw_package,
    draw_uses,
    segment,
    segment_size,
)
from kvgraft_lab.evaluate.tasks.items import QUESTIONS, Ask, Item, Pattern, Shape, Suite
from kvgraft_lab.evaluate.tasks.texts import write_item

REPLACED, READ_AGAIN = "replaced", "read_again"
INSTRUCTION = (
    "You edit a Python package. Complete the code with the definitions of the other files as they "
    "are now. A file that was edited is shown as it is after the edit."
)
# what the edit adds to a name, capitalised if the name has capitals
ADDED = ("checked", "cached", "strict", "locked", "traced", "once")


def make_edits(split: str = "all") -> Suite:
    """Return the suite, from installed packages. All of a package is in one split.

    Raises:
        ValueError: an unknown split, or none of the packages is installed.
    """
    make = partial(_write, split)
    return Suite("edits", described(split), (REPLACED, READ_AGAIN), make, real_text=True)


def _write(split: str, rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    """Write questions of one task about renamed definitions of one package."""
    count = min(QUESTIONS, shape.num_segments - 1)
    size = segment_size(shape, shape.num_segments + (count if task == READ_AGAIN else 0))
    package = draw_package(rng, split, shape.num_segments, _suited_uses)
    uses = draw_uses(rng, _suited_uses(package), count)
    keys = draw_keys(rng, package, uses, shape.num_segments)
    names = {use.name: _new_name(rng, use.name) for use in uses}

    before = [segment(package.definitions[key], size) for key in keys]
    after = [rename(text, names) for text in before]
    edited = [new for old, new in zip(before, after, strict=True) if new != old]
    now = after if task == REPLACED else [*before, *(f"# Edited:\n{text}" for text in edited)]
    asks = [_ask(task, use, names[use.name]) for use in uses]
    return write_item(rng, INSTRUCTION, now, pattern, asks, read=before)


def rename(text: str, names: Mapping[str, str]) -> str:
    """Return a segment in which these words of its code are others. Its first line names a file."""
    file, _, code = text.partition("\n")
    words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    return "\n".join((file, words.sub(lambda found: names[found[0]], code)))


def _new_name(rng: Random, name: str) -> str:
    added = rng.choice(ADDED)
    return f"{name}_{added}" if name.islower() else f"{name}{added.capitalize()}"


@lru_cache(maxsize=32)
def _suited_uses(package: Package) -> tuple[Use, ...]:
    """Return the lines that call a definition by its own name, which nothing before them says."""

    def is_suited(use: Use) -> bool:
        name = re.escape(use.name)
        named = re.search(rf"(?<![\w.]){name}\($", use.line[: use.called])
        return named is not None and not re.search(rf"\b{name}\b", use.leading)

    return tuple(filter(is_suited, package.uses))


def _ask(task: str, use: Use, new_name: str) -> Ask:
    """Ask for the name, up to the parenthesis. White space before it is part of the answer, as a
    tokenizer expects."""
    hint = f" It calls a definition of {use.source}."
    asked = ask_line(task, use, use.called - 1 - len(use.name), "line_match", hint)
    begun = asked.begun.rstrip(" ")
    return replace(asked, answers=(new_name,), begun=begun, stop=("(", "\n"))
