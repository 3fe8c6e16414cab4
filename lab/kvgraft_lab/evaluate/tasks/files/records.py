"""Records of files, as loaders return them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvgraft_lab.evaluate.tasks.items import Metric
from kvgraft_lab.evaluate.tasks.texts import INSTRUCTION

MAX_TOKENS = 64


@dataclass(frozen=True)
class FileRecord:
    """One context, cut into segments, and questions about it (as the model sees them) with their
    answers.

    Attributes:
        begun: beginning of each answer, see `Ask`.
        group: records of one group are in one split; if empty, records with equal segments are.
    """

    segments: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    metric: Metric
    task: str
    instruction: str = INSTRUCTION
    max_tokens: int = MAX_TOKENS
    begun: str = ""
    group: str = ""


def as_it_is(path: Path, records: list[Any]) -> list[Any]:
    """Return the records of a file that needs no other file."""
    return records


class Format(NamedTuple):
    """A public format, recognised by the fields of a record.

    Attributes:
        fields: fields of a record.
        name: name of the format.
        parse: `parse(record, stem of the file)`.
        complete: `complete(path, records)` adds data from other files in the same directory.
    """

    fields: frozenset[str]
    name: str
    parse: Callable[[Mapping[str, Any], str], FileRecord]
    complete: Callable[[Path, list[Any]], list[Any]] = as_it_is


def ask(question: str) -> str:
    """Return a question as the model sees it."""
    return f"Question: {question}\nAnswer:"


def texts(values: Iterable[object]) -> tuple[str, ...]:
    """Return answers as texts; some formats have numbers."""
    return tuple(str(value) for value in values)


def paragraphs(text: str) -> tuple[str, ...]:
    """Return the lines of a text, or its sentences if there is only one line."""
    lines = [line for line in text.splitlines() if line.strip()]
    return tuple(lines if len(lines) > 1 else re.split(r"(?<=[.!?])\s+", text.strip()))
