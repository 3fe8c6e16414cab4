"""Suites from files in the public formats: RULER and LongBench (JSONL), LoCoMo and HotpotQA (JSON).

The format is told by the fields of the first record. Every record becomes one item: its context, cut into segments, is
read first and then asked about, as `items` describes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kvgraft.evaluate.tasks.items import QUESTIONS, Ask, Item, Metric, Shape, arrange, read_before

MAX_TOKENS = 64
INSTRUCTIONS = (
    "Answer the question from the following text. Answer with a few words and nothing else.",
    "Here is some text. Read it carefully.",
    "The following passages belong together; a question about them comes later.",
    "You will be asked about this material.",
)


@dataclass(frozen=True)
class Record:
    """One context, cut into segments, and questions about it (as the model sees them) with their answers."""

    segments: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    metric: Metric
    task: str


@dataclass(frozen=True)
class FileSuite:
    """Items from one file; `records` are cut to their own natural segments."""

    name: str
    description: str
    records: tuple[Record, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of the records, each once."""
        return tuple(dict.fromkeys(record.task for record in self.records))

    def items(self, seed: int, count: int, shape: Shape) -> tuple[Item, ...]:
        """At most `count` of the records, drawn by `seed`; `shape` says into how many segments their text is merged."""
        rng = Random(f"{self.name} {seed}")  # noqa: S311
        drawn = rng.sample(self.records, min(count, len(self.records)))
        patterns = shape.patterns
        return tuple(_item(rng, record, shape, patterns[i % len(patterns)]) for i, record in enumerate(drawn))


def load_suite(path: Path) -> FileSuite:
    """Read a file.

    Raises:
        FileNotFoundError, ValueError: no such file, no records, or none of the known formats; the message says which.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        text = path.read_text(encoding="utf-8")
        records = (
            [json.loads(line) for line in text.splitlines() if line.strip()]
            if path.suffix == ".jsonl"
            else (json.loads(text))
        )
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(records, list) or not records or not isinstance(records[0], dict):
        raise ValueError(f"{path}: must be a list of records (JSON), or a record a line (JSONL)")
    for fields, name, parse in _FORMATS:
        if fields <= records[0].keys():
            return FileSuite(path.stem, f"{name}: {path.name}", tuple(_parse(path, parse, records)))
    known = "; ".join(f"{name} has {', '.join(sorted(fields))}" for fields, name, _ in _FORMATS)
    raise ValueError(f"{path}: a record with the fields {', '.join(sorted(records[0]))} is of no known format: {known}")


def _parse(path: Path, parse: Callable[[Mapping[str, Any], str], Record], records: list[Any]) -> Iterator[Record]:
    for number, record in enumerate(records, 1):
        try:
            parsed = parse(record, path.stem)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: record {number} cannot be read: {type(error).__name__} {error}") from error
        if parsed.questions and parsed.segments:
            yield parsed


def _ruler(record: Mapping[str, Any], stem: str) -> Record:
    """`input` is instruction, context and question in one text: the last line asks."""
    context, _, question = record["input"].rstrip().rpartition("\n")
    metric: Metric = "contains_any" if stem.startswith("qa") else "contains_all"
    return Record(_paragraphs(context), ((question, _texts(record["outputs"])),), metric, stem)


def _longbench(record: Mapping[str, Any], stem: str) -> Record:
    passages = re.split(r"(?=^Passage \d+:)", record["context"], flags=re.MULTILINE)
    segments = tuple(filter(str.strip, passages)) if len(passages) > 2 else _paragraphs(record["context"])
    return Record(segments, ((_ask(record["input"]), _texts(record["answers"])),), "f1", record.get("dataset", stem))


def _locomo(record: Mapping[str, Any], stem: str) -> Record:
    """Every session of the conversation is a segment; questions without an answer (adversarial) are left out."""
    talk = record["conversation"]
    sessions = sorted((key for key in talk if re.fullmatch(r"session_\d+", key)), key=lambda key: int(key[8:]))
    segments = tuple(
        "\n".join([talk.get(f"{key}_date_time", ""), *(f"{turn['speaker']}: {turn['text']}" for turn in talk[key])])
        for key in sessions
    )
    answered = [qa for qa in record["qa"] if qa.get("answer") is not None]
    questions = tuple((_ask(qa["question"]), _texts([qa["answer"]])) for qa in answered)
    return Record(segments, questions, "f1", stem)


def _hotpotqa(record: Mapping[str, Any], stem: str) -> Record:
    segments = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in record["context"])
    return Record(segments, ((_ask(record["question"]), _texts([record["answer"]])),), "f1", stem)


_FORMATS: tuple[tuple[frozenset[str], str, Callable[[Mapping[str, Any], str], Record]], ...] = (
    (frozenset({"input", "outputs"}), "RULER", _ruler),
    (frozenset({"input", "context", "answers"}), "LongBench", _longbench),
    (frozenset({"conversation", "qa"}), "LoCoMo", _locomo),
    (frozenset({"question", "answer", "context"}), "HotpotQA", _hotpotqa),
)


def _ask(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


def _paragraphs(text: str) -> tuple[str, ...]:
    """Lines, or sentences where there is but one line."""
    lines = [line for line in text.splitlines() if line.strip()]
    return tuple(lines if len(lines) > 1 else re.split(r"(?<=[.!?])\s+", text.strip()))


def _item(rng: Random, record: Record, shape: Shape, pattern: str) -> Item:
    segments = _merge(record.segments, shape.num_segments)
    questions = rng.sample(record.questions, min(QUESTIONS, len(record.questions)))
    asked = [question for question, _ in questions]
    notes = [f"Part {number}." for number in range(1, len(segments) + 1)]
    prompt = arrange(INSTRUCTIONS[0], segments, pattern, notes)
    others = [INSTRUCTIONS[1 + number % (len(INSTRUCTIONS) - 1)] for number in range(len(segments))]
    return Item(
        pattern,
        read_before(rng, others, segments, pattern, asked),
        tuple(
            Ask(record.task, (*prompt, text), answers, MAX_TOKENS, record.metric)
            for text, (_, answers) in zip(asked, questions, strict=True)
        ),
    )


def _merge(pieces: Sequence[str], count: int) -> tuple[str, ...]:
    """Neighbouring pieces joined to at most `count` texts of about equal length."""
    total, merged, taken = sum(map(len, pieces)), [[pieces[0]]], len(pieces[0])
    for piece in pieces[1:]:
        if taken >= total * len(merged) / count and len(merged) < count:
            merged.append([])
        merged[-1].append(piece)
        taken += len(piece)
    return tuple("\n".join(group) for group in merged)
