"""The agent loop: every step is a prompt, its answer fills in the next action, and the last answer
is the agent's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvgraft.core.prompt import Part
from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.prefill.context import Policy
from kvgraft_lab.evaluate.metrics import exact_match, f1
from research.cross_query.episodes import Episode

MAX_TOKENS = 3  # one word is the answer, and `<eos>` ends it
_SEEDS = 64  # one for each step of an episode
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
NOTHING = "?"  # stands in actions for an answer without words

Answer = Callable[[Sequence[Part], int], Result | str]
"""Answers the prompt of a step, which is given with its number from 0."""


@dataclass(frozen=True)
class StepOutcome:
    """What became of one step.

    Attributes:
        action, error: what was done before the question, and whether the tool refused it.
        expected: the right answer by what the prompt says, wrong turns before it included; empty if
            it says nothing.
        right: whether the answer is that.
        seconds: until the answer was there.
        result: of the engine, if an engine answered.
    """

    action: str
    error: bool
    expected: str
    answer: str
    right: bool
    seconds: float = field(compare=False)
    result: Result | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class EpisodeResult:
    """What became of one episode; `success` and `f1` compare the final answer with the
    episode's."""

    name: str
    task: str
    expected: str
    answer: str
    success: bool
    f1: float
    steps: tuple[StepOutcome, ...]

    @property
    def tool_calls(self) -> int:
        return len(self.steps)

    @property
    def tool_errors(self) -> int:
        return sum(step.error for step in self.steps)

    @property
    def seconds(self) -> float:
        """That its answers took, one after the other."""
        return sum(step.seconds for step in self.steps)


def run_episode(answer: Answer, episode: Episode) -> EpisodeResult:
    """Run an agent to the end of its plan: wrong answers and refused calls do not stop it.

    Raises:
        ValueError: the engine cannot answer a prompt; the message says why.
    """
    words: list[str] = []
    rows: list[StepOutcome] = []
    for number in range(len(episode.plan.steps)):
        prompt = episode.prompt(words)
        start = time.perf_counter()
        found = answer(prompt.parts, number)
        seconds = time.perf_counter() - start
        result = found if isinstance(found, Result) else None
        if result is not None and result.error:
            raise ValueError(f"step {number} of {episode.name} cannot be answered: {result.error}")
        word, *_ = (*(found.text if isinstance(found, Result) else found).split(), NOTHING)
        right, error = word == prompt.expected, prompt.observation.error
        rows.append(
            StepOutcome(prompt.action, error, prompt.expected, word, right, seconds, result)
        )
        words.append(word)
    expected = [episode.plan.answer]
    return EpisodeResult(
        episode.name, episode.plan.task, episode.plan.answer, words[-1],
        bool(exact_match(words[-1], expected)), f1(words[-1], expected), tuple(rows),
    )  # fmt: skip


def paper_sampling(seed: int) -> SamplingParams:
    """As the paper decodes: temperature 0.2, top-p 0.95, few tokens."""
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.2, top_p=0.95, seed=seed)


def ask_engine(
    engine: Engine,
    policy: str | Policy,
    sampling: SamplingParams = GREEDY,
    *,
    namespace: str = "default",
) -> Answer:
    """Answers under a policy; the engine remembers every prompt for those that follow in the
    namespace. With a seed, steps draw from seeds of their own that follow from it."""

    def answer(parts: Sequence[Part], number: int) -> Result:
        seed = None if sampling.seed is None else sampling.seed * _SEEDS + number
        [result] = engine.generate(
            [Request(parts, policy, replace(sampling, seed=seed), namespace)]
        )
        return result

    return answer
