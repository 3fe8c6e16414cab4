"""Suites from files in public formats. The fields of the first record determine the format.

Every record becomes one item: its context, cut into segments, is read first and then asked about,
see `items`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from kvgraft_lab.evaluate.tasks.files.conversations import locomo, mtrag
from kvgraft_lab.evaluate.tasks.files.functions import bfcl, with_answers
from kvgraft_lab.evaluate.tasks.files.questions import hotpotqa, longbench, musique, ruler
from kvgraft_lab.evaluate.tasks.files.records import FileRecord, Format
from kvgraft_lab.evaluate.tasks.items import QUESTIONS, Ask, Item, Shape
from kvgraft_lab.evaluate.tasks.texts import check_split, in_split, of_split, write_item

FORMATS = (
    Format(frozenset({"input", "outputs"}), "RULER", ruler),
    Format(frozenset({"input", "context", "answers"}), "LongBench", longbench),
    Format(frozenset({"conversation", "qa"}), "LoCoMo", locomo),
    Format(frozenset({"question", "answer", "context"}), "HotpotQA", hotpotqa),
    Format(frozenset({"question", "answer", "paragraphs"}), "MuSiQue", musique),
    Format(frozenset({"input", "contexts", "targets"}), "MT-RAG", mtrag),
    Format(frozenset({"id", "question", "function"}), "BFCL", bfcl, with_answers),
)


@dataclass(frozen=True)
class FileSuite:
    """Items from one file. `records` are cut into their natural segments."""

    name: str
    description: str
    records: tuple[FileRecord, ...]
    real_text: ClassVar[bool] = True

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the records, each once."""
        return tuple(dict.fromkeys(record.task for record in self.records))

    def items(self, seed: int, count: int, shape: Shape) -> tuple[Item, ...]:
        """Return at most `count` of the records, drawn by `seed`; their segments are merged by
        `shape`.
        """
        rng = Random(f"{self.name} {seed}")  # noqa: S311
        drawn = rng.sample(self.records, min(count, len(self.records)))
        patterns = shape.patterns
        return tuple(
            _item(rng, record, shape, patterns[i % len(patterns)]) for i, record in enumerate(drawn)
        )


def load_suite(path: Path, split: str = "all") -> FileSuite:
    """Read a file.

    Raises:
        FileNotFoundError, ValueError: no such file, no records (of this split), or an unknown
            format; the message lists the known ones.
    """
    check_split(split)
    records = _read(path)

    for known in FORMATS:
        if known.fields <= records[0].keys():
            parsed = tuple(_parse(path, known, known.complete(path, records)))
            chosen = tuple(
                one for one in parsed if in_split(one.group or "\n".join(one.segments), split)
            )
            if not chosen:
                raise ValueError(
                    f"{path}: of {len(records)} records none can be asked about{of_split(split)}"
                )
            return FileSuite(path.stem, f"{known.name}: {path.name}{of_split(split)}", chosen)

    names = "; ".join(f"{known.name} has {', '.join(sorted(known.fields))}" for known in FORMATS)
    raise ValueError(
        f"{path}: a record with the fields {', '.join(sorted(records[0]))} is of no known format: "
        f"{names}"
    )


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file: a JSON list, or one record per line. Some .json files have
    records by line, too.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")

    text = path.read_text(encoding="utf-8")
    try:
        records = _lines(text) if path.suffix == ".jsonl" else _whole(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error

    if (
        not isinstance(records, list)
        or not records
        or not all(isinstance(record, dict) for record in records)
    ):
        raise ValueError(f"{path}: must be a list of records (JSON), or a record a line (JSONL)")

    return records


def _whole(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return _lines(text)


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _parse(path: Path, known: Format, records: Sequence[dict[str, Any]]) -> Iterator[FileRecord]:
    for number, record in enumerate(records, 1):
        try:
            parsed = known.parse(record, path.stem)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path}: record {number} cannot be read: {type(error).__name__} {error}"
            ) from error
        if parsed.questions and parsed.segments:
            yield parsed


def _item(rng: Random, record: FileRecord, shape: Shape, pattern: str) -> Item:
    segments = _merge(record.segments, shape.num_segments)
    questions = rng.sample(record.questions, min(QUESTIONS, len(record.questions)))
    asks = [
        Ask(record.task, (text,), answers, record.max_tokens, record.metric, begun=record.begun)
        for text, answers in questions
    ]
    return write_item(rng, record.instruction, segments, pattern, asks)


def _merge(pieces: Sequence[str], count: int) -> tuple[str, ...]:
    """Join neighbouring pieces into at most `count` texts of about equal length."""
    total, merged, taken = sum(map(len, pieces)), [[pieces[0]]], len(pieces[0])
    for piece in pieces[1:]:
        if taken >= total * len(merged) / count and len(merged) < count:
            merged.append([])
        merged[-1].append(piece)
        taken += len(piece)
    return tuple("\n".join(group) for group in merged)
