"""How far grafts are from the truth: every step once as a condition has it and once computed in
full (H2, H3, H4).

Nothing here is timed: the logits of boundary tokens are computed beside what an answer needs.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvgraft.cli.progress import OnProgress
from kvgraft.core.prompt import Part
from kvgraft.engine.request import Request, Result
from kvgraft.engine.text import anchor_ids
from kvgraft.guard.distances import kl_divergence
from kvgraft.policies import Similar, parse_policy
from kvgraft_lab.evaluate.jsonl import read_lines
from research.cross_query.asking import Agent
from research.cross_query.boundary import Seen, Truth, Watched
from research.cross_query.conditions import ANCHORS
from research.cross_query.episodes import Episode
from research.cross_query.loop import GREEDY, run_episode
from research.cross_query.proposals import Proposal, Proposer
from research.cross_query.runner import ExperimentSettings, Series, check_settings, episodes_of

ROWS = "divergences.jsonl"
_TRUTH = "truth"  # namespace of full recomputation, where nothing is ever kept


class MovedSegment(msgspec.Struct, frozen=True):
    """A stretch of a prompt that moved as one. KL in nats, of its boundary tokens.

    Attributes:
        reused: tokens inside its halos, whose lower layers are not computed; 0: there was nothing
            to accept.
        probed: what the policy's probe has measured, if it has looked.
        trusting: mean KL from full recomputation if nothing had been rejected.
        final, worst: mean and greatest KL as it is.
    """

    start: int
    length: int
    reused: int
    accepted: bool
    probed: float | None
    trusting: float | None
    final: float | None
    worst: float | None


class DivergenceRow(msgspec.Struct, frozen=True):
    """One step. `kl` is of the prompt's last token from full recomputation, `trusting` the same
    before anything was rejected; `agrees` and `trusting_agrees` say whether the best next token is
    that of full recomputation.

    Attributes:
        right, truth_right: whether the answer is right, and that of full recomputation to the same
            prompt.
        known, covered: see `Proposer`.
    """

    suite: str
    variation: str
    seed: int
    episode: int
    step: int
    condition: str
    right: bool
    truth_right: bool
    kl: float
    trusting: float
    agrees: bool
    trusting_agrees: bool
    segments: tuple[MovedSegment, ...]
    proposals: tuple[Proposal, ...]
    known: int
    covered: int

    @property
    def series(self) -> Series:
        return self.suite, self.variation, self.seed

    @property
    def accepted(self) -> tuple[MovedSegment, ...]:
        """Segments of which something is reused, and whose boundary tokens have been seen."""
        return tuple(
            one for one in self.segments if one.accepted and one.reused and one.final is not None
        )


def measure(
    settings: ExperimentSettings,
    model: Path,
    directory: Path,
    on_progress: OnProgress | None = None,
    **engine: Any,
) -> list[DivergenceRow]:
    """Measure what the directory does not hold yet, and return all rows of it.

    Raises:
        ValueError: the directory holds an experiment with other settings, or a prompt cannot be
            answered.
    """
    check_settings(settings, model, directory, engine)
    rows = read_rows(directory)
    units = [(series, condition) for series in settings.series for condition in settings.conditions]
    with (directory / ROWS).open("ab") as file:
        for number, (series, condition) in enumerate(units):
            episodes = episodes_of(series, settings.episodes)
            held = {
                (row.episode, row.step)
                for row in rows
                if (row.series, row.condition) == (series, condition.name)
            }
            if any(
                (number, len(one.plan.steps) - 1) not in held for number, one in enumerate(episodes)
            ):
                opened = condition.open(model, num_pages=settings.num_pages, **engine)
                for row in _Meter(Agent(condition, opened)).measure(series, episodes):
                    if (row.episode, row.step) not in held:
                        rows.append(row)
                        file.write(msgspec.json.encode(row) + b"\n")
                        file.flush()
                opened.close()
            if on_progress is not None:
                on_progress(number + 1, len(units))
    return rows


def read_rows(directory: Path) -> list[DivergenceRow]:
    """What has been measured."""
    return read_lines(directory / ROWS, DivergenceRow)


class _Meter:
    """Runs the episodes of one series under one condition, each step twice."""

    def __init__(self, agent: Agent) -> None:
        similarity, engine = agent.condition.similarity, agent.engine
        self._agent = agent
        self._policy = parse_policy(agent.condition.policy)
        self._proposer = (
            Proposer(similarity, anchor_ids(engine.tokenizer, ANCHORS)) if similarity else None
        )
        self._found: list[tuple[Seen, Tensor, str, list[Proposal], int, int]] = []

    def measure(self, series: Series, episodes: Sequence[Episode]) -> Iterator[DivergenceRow]:
        """A row for each step, in order."""
        policy, name = self._policy, self._agent.condition.name
        halo = policy.halo_tokens if isinstance(policy, Similar) else 0
        for number, episode in enumerate(episodes):
            self._found.clear()
            result = run_episode(self._answer, episode)
            for step, (one, found) in enumerate(zip(result.steps, self._found, strict=True)):
                seen, truth, answer, proposals, known, covered = found
                segments = moved_segments(seen, truth, halo)
                judged = tuple(_judged(proposal, segments) for proposal in proposals)
                (kl, agrees), (trusting, so_trusting) = _last(seen, truth[-1])
                yield DivergenceRow(
                    *series, number, step, name, one.right, answer == one.expected, kl, trusting,
                    agrees, so_trusting,
                    segments, judged, known, covered,
                )  # fmt: skip

    def _answer(self, parts: Sequence[Part], number: int) -> Result:
        seen, engine = Seen(), self._agent.engine
        proposals = (
            self._proposer.propose(engine.token_ids(Request(parts))) if self._proposer else []
        )
        counts = (self._proposer.known, self._proposer.covered) if self._proposer else (0, 0)
        result = self._agent.ask(parts, policy=Watched(self._policy, seen))
        if not result.error:
            where = seen.edges.clone()
            where[-1] = True
            truth = Truth(where)
            [full] = engine.generate(
                [Request(parts, truth, GREEDY, namespace=_TRUTH, remember=False)]
            )
            self._found.append(
                (seen, truth.logits[0], (full.text.split() or [""])[0], proposals, *counts)
            )
        return result


def _last(seen: Seen, truth: Tensor) -> Iterator[tuple[float, bool]]:
    """KL of the prompt's last token, and whether the best next token is that of `truth` [V]: as it
    is, and before anything was rejected."""
    if seen.last is None or seen.trusting_last is None:
        raise ValueError("nothing was seen of this prompt")
    ours = torch.stack((seen.last, seen.trusting_last))  # [2, V]
    agree = ours.argmax(-1) == truth.argmax()
    return zip(kl_divergence(truth.expand_as(ours), ours).tolist(), agree.tolist(), strict=True)


def moved_segments(seen: Seen, truth: Tensor, halo: int) -> tuple[MovedSegment, ...]:
    """All segments of a prompt; `truth` [n + 1, V] is of their boundary tokens and the last
    token."""
    if seen.plan is None or not seen.edges.any():
        return ()
    plan, numbers = seen.plan, seen.plan.segments[seen.edges]
    trusting, final = (
        None if ours is None else kl_divergence(truth[:-1], ours)
        for ours in (seen.trusting, seen.final)
    )
    reused = plan.grafted & ~plan.edges(halo)
    found = []
    for number in numbers.unique().tolist():
        mine, here = plan.segments == number, numbers == number
        found.append(
            MovedSegment(
                int(mine.nonzero()[0]), int(mine.sum()), int((mine & reused).sum()),
                not bool((mine & seen.rejected).any()), seen.probed.get(number),
                None if trusting is None else float(trusting[here].mean()),
                None if final is None else float(final[here].mean()),
                None if final is None else float(final[here].max()),
            )
        )  # fmt: skip
    return tuple(found)


def _judged(proposal: Proposal, segments: Sequence[MovedSegment]) -> Proposal:
    """With the KL of the grafts in it: the mean over them, each by its tokens in the proposal."""
    tokens, weighed = 0, 0.0
    for one in segments:
        common = min(one.start + one.length, proposal.stop) - max(one.start, proposal.start)
        if common > 0 and one.reused and one.trusting is not None:
            tokens, weighed = tokens + common, weighed + common * one.trusting
    return Proposal(
        proposal.start, proposal.stop, proposal.same, weighed / tokens if tokens else None
    )
