"""Texts to learn from: documents, then as many questions about them as fit, each followed by its
answer.

A batch is a function of (seed, step, rank) alone, so that an interrupted run goes on exactly where
it stopped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

from kvgraft_lab.testbed import tasks, vocabulary, wording
from kvgraft_lab.testbed.documents import Facts, make_documents, make_glossary
from kvgraft_lab.testbed.tasks import Question, Task
from research.testbed.curriculum import Stage

IDS = {word: number for number, word in enumerate(vocabulary.VOCABULARY)}
_MOST_OF_TASK = {"needle": 24, "variable": 33, "hop": 16, "glossary": 14, "coreference": 18,
"frequent": 1,
                 "common": 1, "vote": 10, "poll": 3}  # fmt: skip
_WORDS_OF_TASK = {
    "needle": 7,
    "variable": 4,
    "hop": 14,
    "glossary": 7,
    "coreference": 7,
    "vote": 24,
    "poll": 40,
}

_LISTS: tuple[Task, ...] = ("frequent", "common")


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences [B, T] of token ids with positions; labels of some places of the flat [B * T] token
    list.

    Attributes:
        answers, answer_labels: places whose next token belongs to an answer, and that token.
        answer_tasks: the task of each of them; empty where the answer has ended and `<eos>`
            follows.
        allowed: for each of them all tokens that would be right (`common` answers may come in any
            order).
        resolved, resolved_labels: places whose hidden state should tell something by a middle
            layer, and what.
    """

    token_ids: Tensor
    positions: Tensor
    answers: Tensor
    answer_labels: Tensor
    answer_tasks: tuple[str, ...]
    allowed: tuple[frozenset[int], ...]
    resolved: Tensor
    resolved_labels: Tensor


@dataclass
class _Sequence:
    """One growing sequence: words, their positions, labels by place."""

    length: int
    words: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    position: int = 0
    # (place, word, task, allowed)
    answers: list[tuple[int, str, str, list[str]]] = field(default_factory=list)
    resolved: list[tuple[int, str]] = field(default_factory=list)  # (place, word)

    def add(self, words: Sequence[str]) -> None:
        self.words += words
        self.positions += range(self.position, self.position + len(words))
        self.position += len(words)

    def ask(self, question: Question, *, chat: bool) -> bool:
        """Append a question and its answer, if there is room."""
        asked, answer = wording.ask(question.text, chat=chat).split(), question.answer.split()
        if len(self.words) + len(asked) + len(answer) + 1 > self.length:
            return False
        self.add(asked)
        place = len(self.words) - 1
        for number, word in enumerate(answer):
            allowed = answer[number:] if question.task == "common" else [word]
            self.answers.append((place + number, word, question.task, allowed))
        self.answers.append((place + len(answer), vocabulary.END, "", [vocabulary.END]))
        if question.via:
            self.resolved.append((place, question.via))
        self.add([*answer, vocabulary.END])
        return True


def make_batch(stage: Stage, num_tokens: int, seed: tuple[int, int, int]) -> TrainingBatch:
    """About `num_tokens` tokens of `stage` for `seed` = (seed, step, rank)."""
    rng = Random(str(seed))  # noqa: S311
    shorter = stage.length > 128 and rng.random() < 0.25
    length = stage.length // 2 if shorter else stage.length
    sequences = [_write(rng, stage, length) for _ in range(max(1, num_tokens // length))]
    ids, positions = torch.zeros(2, len(sequences), length, dtype=torch.int64)
    answers: list[tuple[int, str, str, list[str]]] = []
    resolved: list[tuple[int, str]] = []
    for row, sequence in enumerate(sequences):
        end = min(len(sequence.words), length)
        ids[row, :end] = torch.tensor([IDS[word] for word in sequence.words[:end]])
        positions[row, :end] = torch.tensor(sequence.positions[:end])
        answers += [
            (row * length + place, word, task, fine) for place, word, task, fine in sequence.answers
        ]
        resolved += [
            (row * length + place, word) for place, word in sequence.resolved if place < end
        ]
    return TrainingBatch(
        token_ids=ids,
        positions=positions,
        answers=torch.tensor([place for place, *_ in answers]),
        answer_labels=torch.tensor([IDS[word] for _, word, *_ in answers]),
        answer_tasks=tuple(task for _, _, task, _ in answers),
        allowed=tuple(frozenset(IDS[word] for word in allowed) for *_, allowed in answers),
        resolved=torch.tensor([place for place, _ in resolved], dtype=torch.int64),
        resolved_labels=torch.tensor([IDS[word] for _, word in resolved], dtype=torch.int64),
    )


def _write(rng: Random, stage: Stage, length: int) -> _Sequence:
    chat = rng.random() < 0.5
    budget = int(length * rng.uniform(0.35, 0.6 if length < 1024 else 0.75))
    facts, colours = _choose(rng, stage, budget)
    num_documents = rng.randint(2, 3 if length <= 256 else 8)
    order = tuple(range(num_documents))
    documents = make_documents(
        rng, facts, orders=[order], num_tokens=budget, colours=colours, max_hops=stage.max_hops
    )
    segments = (
        [make_glossary(rng, colours, len(colours)), *documents] if colours else list(documents)
    )
    framed = wording.frame(rng, segments, rng.choice(wording.FRAMES)) if length > 128 else segments
    sequence = _Sequence(length)
    if rng.random() < 0.5:
        sequence.add(["<bos>"])
    gap = 0.0
    if rng.random() < 0.7:
        gap = (
            1.9
            * max(0, rng.randint(length, max(length, stage.max_position)) - length)
            / (len(framed) + 1)
        )
    starts = []
    for segment in framed:
        starts.append(len(sequence.words))
        sequence.add(segment.split())
        sequence.position += int(rng.random() * gap)
    sequence.resolved = [
        (starts[found.segment] + found.place, found.value) for found in tasks.resolve(framed)
    ]
    for question in _questions(rng, framed):
        if not sequence.ask(question, chat=chat):
            break
    return sequence


def _choose(rng: Random, stage: Stage, budget: int) -> tuple[Facts, list[str]]:
    """How many facts of which tasks fit into `budget` words, and the colours that notes explain."""
    size = rng.randint(1, 1 if budget < 100 else 2 if budget < 300 else 4)
    words = {**_WORDS_OF_TASK, "frequent": 8.0 + 19 * size, "common": 16.0 + 12 * size}
    known = [task for task in words if task in stage.tasks and words[task] <= budget]
    chosen = known if rng.random() < 0.15 else rng.sample(known, min(len(known), rng.randint(1, 3)))
    listed = [task for task in _LISTS if task in known and rng.random() < 0.4]
    chosen = [*(task for task in chosen if task not in listed), *listed]
    weights = {task: rng.uniform(0.3, 1) * (1 + words[task] / 20) for task in chosen}
    room = budget * (1 - rng.choice((0, 0, 0, 0.2, 0.5))) / sum(weights.values())
    colours: list[str] = []
    if "glossary" in chosen:
        colours = rng.sample(vocabulary.COLOURS, rng.randint(2, 8))
    counts = {
        task: min(_MOST_OF_TASK[task], max(1, int(room * weight / words[task])))
        for task, weight in weights.items()
    }
    while sum(words[task] * count for task, count in counts.items()) > 0.9 * budget:
        largest = max(counts, key=lambda task: words[task] * counts[task])
        if counts[largest] == 1:
            del counts[largest]
        else:
            counts[largest] -= 1
    return Facts(**counts, size=size), colours


def _questions(rng: Random, segments: Sequence[str]) -> Iterator[Question]:
    """The questions of a text in random order; some of the codes are asked for together."""
    found = list(tasks.read(segments))
    rng.shuffle(found)
    codes = [question for question in found if tasks.is_code(question)]
    listed = codes[: tasks.NEEDLES * int(rng.random() * len(codes) / tasks.NEEDLES + 0.5)]
    groups = [listed[i : i + tasks.NEEDLES] for i in range(0, len(listed), tasks.NEEDLES)]
    left = [question for question in found if question not in listed]
    left += [tasks.together(group) if len(group) == tasks.NEEDLES else group[0] for group in groups]
    rng.shuffle(left)
    for question in left:
        if question.task == "common":  # in any order, so that no order is learned
            words = question.answer.split()
            question = replace(question, answer=" ".join(rng.sample(words, len(words))))
        yield question
