"""Evaluations: every item of some suites under every policy. They write one line of JSON per answer
and can resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvgraft.cli.progress import OnProgress
from kvgraft_lab.evaluate.conditions import check_condition
from kvgraft_lab.evaluate.hosts import Answer, Host
from kvgraft_lab.evaluate.jsonl import check_config, read_lines
from kvgraft_lab.evaluate.metrics import SCORES
from kvgraft_lab.evaluate.scoring import ORDER_NOISE, other_orders
from kvgraft_lab.evaluate.tasks import Ask, Item, Shape, TaskSuite

CONFIG, ROWS = "config.json", "rows.jsonl"


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation. With the host they determine all results except times.

    Attributes:
        suites: task suites.
        policies: policies, beginning with `full`. Each may name a flow, see `conditions`.
        lengths: approximate prompt lengths in tokens.
        num_segments: reused segments in a prompt.
        patterns: patterns of reuse, see `Shape`.
        items: items of each task.
        seed: seed of the items.
        order_noise: also ask full about every prompt with its reused segments in other orders.
        chat: write prompts of real text in the model's chat template; None does so if it has one.

    Raises:
        ValueError: policies that do not begin with `full`, are unknown or appear twice; no lengths;
            or a choice of chat templates without a suite of real text.
    """

    suites: tuple[TaskSuite, ...]
    policies: tuple[str, ...]
    lengths: tuple[int, ...] = (1024,)
    num_segments: int = 8
    patterns: tuple[str, ...] = Shape.patterns
    items: int = 12
    seed: int = 1000
    order_noise: bool = False
    chat: bool | None = None

    def __post_init__(self) -> None:
        for policy in self.policies:
            check_condition(policy)

        if not self.policies or self.policies[0] != "full":
            raise ValueError(
                "policies must begin with full, with which the others are compared, got "
                f"{self.policies}"
            )
        if len(set(self.policies)) < len(self.policies):
            raise ValueError(f"policies must differ, got {', '.join(self.policies)}")
        if not self.lengths:
            raise ValueError("lengths must name at least one number of tokens")
        if self.chat is not None and not self.real_texts:
            names = ", ".join(suite.name for suite in self.suites)
            raise ValueError(
                "chat templates are for suites of real text (docs, files), and these are "
                f"generated: {names}"
            )

    @property
    def real_texts(self) -> tuple[TaskSuite, ...]:
        """Suites of real text."""
        return tuple(suite for suite in self.suites if suite.real_text)

    @property
    def asked(self) -> tuple[str, ...]:
        """Policies under which each prompt has an answer, order noise included."""
        return (*self.policies, ORDER_NOISE) if self.order_noise else self.policies

    def describe(self) -> dict[str, Any]:
        """Return the settings for the configuration file."""
        described: dict[str, Any] = {
            "suites": [suite.name for suite in self.suites],
            "policies": list(self.policies),
            "lengths": list(self.lengths),
            "num_segments": self.num_segments,
            "patterns": list(self.patterns),
            "items": self.items,
            "seed": self.seed,
        }
        return described | ({ORDER_NOISE: True} if self.order_noise else {})


class EvalRow(msgspec.Struct, frozen=True):
    """One answer, as one line of the result file.

    Attributes:
        cluster: name of the item; its questions are about one text.
        score: score by the task's own metric.
    """

    cluster: str
    number: int
    suite: str
    task: str
    pattern: str
    length: int
    crosses: bool
    policy: str
    expected: tuple[str, ...]
    score: float
    exact_match: float
    f1: float
    answer: Answer


def run(
    settings: EvalSettings, host: Host, directory: Path, on_progress: OnProgress | None = None
) -> list[EvalRow]:
    """Compute the answers that the directory does not hold yet, and return all rows.

    Raises:
        ValueError: the directory holds an evaluation with other settings; the message names the
            differences.
    """
    directory.mkdir(parents=True, exist_ok=True)
    real = _real_texts(settings, host)
    check_config(directory / CONFIG, {**settings.describe(), **real, **host.describe()})
    rows = {(row.cluster, row.number, row.policy): row for row in read_rows(directory)}
    work = list(_items(settings, chat=bool(real.get("chat"))))
    total = sum(len(item.phase_2) for *_, item in work) * len(settings.asked)

    with (directory / ROWS).open("ab") as file:
        for cluster, suite, length, item in work:
            keys = {
                (cluster, n, policy) for n in range(len(item.phase_2)) for policy in settings.asked
            }
            if not keys <= rows.keys():  # an interrupted item is asked again as a whole
                for number, policy, answer in host.answers(
                    item, settings.policies, _orders(settings, cluster, item)
                ):
                    key = (cluster, number, policy)
                    if key not in rows:
                        rows[key] = _row(key, suite, item, length, answer)
                        file.write(msgspec.json.encode(rows[key]) + b"\n")
                file.flush()
            if on_progress is not None:
                on_progress(min(len(rows), total), total)

    return list(rows.values())


def read_rows(directory: Path) -> list[EvalRow]:
    """Return the rows of an evaluation."""
    return read_lines(directory / ROWS, EvalRow)


def _real_texts(settings: EvalSettings, host: Host) -> dict[str, Any]:
    """Return the configuration of suites of real text: the texts, and whether they use the model's
    chat template.
    """
    if not settings.real_texts:
        return {}
    chat = settings.chat is not False and host.chat is not None
    if settings.chat and not chat:
        raise ValueError("the model has no chat template to write prompts in")
    return {"texts": {suite.name: suite.description for suite in settings.real_texts}, "chat": chat}


def _items(settings: EvalSettings, *, chat: bool) -> Iterator[tuple[str, str, int, Item]]:
    """Yield every item with its cluster, suite and length.

    Patterns of reuse alternate over all items, so that even a few items use all patterns equally
    often.
    """
    patterns, turn = settings.patterns, 0
    for suite in settings.suites:
        for length in settings.lengths:
            turns = patterns[turn:] + patterns[:turn]
            shape = Shape(length, settings.num_segments, turns)  # type: ignore[arg-type]
            items = suite.items(settings.seed, settings.items, shape)
            turn = (turn + len(items)) % len(patterns)
            for number, item in enumerate(items):
                written = replace(item, chat=True) if chat and suite.real_text else item
                yield f"{suite.name}/{length}/{number}", suite.name, length, written


def _orders(settings: EvalSettings, cluster: str, item: Item) -> list[list[Ask]]:
    """Return for each prompt of an item its known segments in other orders. Instruction and
    question stay in place.
    """
    if not settings.order_noise:
        return []
    known = {segment for segments in item.phase_1 for segment in segments}
    found = []
    for number, ask in enumerate(item.phase_2):
        movable = [place for place, segment in enumerate(ask.segments[:-1]) if segment in known]
        orders = other_orders(ask.segments, movable, f"{settings.seed} {cluster} {number}")
        found.append([replace(ask, segments=order) for order in orders])
    return found


def _row(key: tuple[str, int, str], suite: str, item: Item, length: int, answer: Answer) -> EvalRow:
    cluster, number, policy = key
    ask: Ask = item.phase_2[number]
    scores = {
        name: SCORES[name](answer.text, ask.answers) for name in {ask.metric, "exact_match", "f1"}
    }
    return EvalRow(
        cluster=cluster,
        number=number,
        suite=suite,
        task=ask.task,
        pattern=item.pattern,
        length=length,
        crosses=ask.crosses,
        policy=policy,
        expected=ask.answers,
        score=scores[ask.metric],
        exact_match=scores["exact_match"],
        f1=scores["f1"],
        answer=answer,
    )
