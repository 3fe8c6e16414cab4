"""Agents end to end: with answers of the test's own, and with the bundled model."""

from collections.abc import Callable, Sequence

import pytest

from kvgraft import Engine
from kvgraft.core.prompt import Part
from kvgraft.engine.request import Report, Result
from kvgraft_lab.testbed import MODEL_DIR
from research import cross_query
from research.cross_query import SUITES, Episode, Variation, ask_engine, make_episodes, run_episode

SHORT = Variation(num_passages=2, passage_words=(40, 60))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32")


def read(episode: Episode) -> Callable[[Sequence[Part], int], str]:
    """Answers as the reader of the testbed does, which the prompts of the episode have asked."""
    answers: list[str] = []

    def answer(parts: Sequence[Part], number: int) -> str:
        prompt = episode.prompt(answers)
        assert (tuple(parts), number) == (prompt.parts, len(answers))
        answers.append(prompt.expected)
        return f"{prompt.expected} and more"

    return answer


@pytest.mark.parametrize("suite", SUITES)
def test_a_perfect_reader_succeeds(suite: str):
    for episode in make_episodes(suite, 7, 5):
        result = run_episode(read(episode), episode)
        assert (result.success, result.f1, result.answer) == (True, 1.0, episode.plan.answer)
        assert result.tool_errors == 0
        assert result.tool_calls == len(episode.plan.steps)
        assert all(step.right for step in result.steps)


def test_a_wrong_reader_fails_to_the_end():
    episode = make_episodes("tools", 7, 3)[2]
    result = run_episode(lambda parts, number: "", episode)
    assert (result.success, result.f1, result.answer) == (False, 0.0, "?")
    assert [step.action.split()[1] for step in result.steps[2:]] == ["?", "?"]
    assert (result.tool_calls, result.tool_errors) == (4, 2)
    assert [step.expected for step in result.steps[2:]] == ["", ""]
    assert not any(step.right for step in result.steps)


def test_what_the_engine_cannot_answer_is_an_error():
    [episode] = make_episodes("qa", 7, 1)
    with pytest.raises(ValueError, match="step 0 of qa/7/0 cannot be answered: too long"):
        run_episode(
            lambda parts, number: Result("", [], "error", Report(), error="too long"), episode
        )


@pytest.mark.parametrize("suite", SUITES)
def test_the_bundled_model_solves_episodes(engine: Engine, suite: str):
    engine.clear_cache()
    for episode in make_episodes(suite, 8, 1, SHORT):
        result = run_episode(ask_engine(engine, "full"), episode)
        assert result.success, result
        assert all(
            step.result is not None and step.result.report.prompt_tokens > 200
            for step in result.steps
        )


def test_later_steps_reuse_what_earlier_ones_read(engine: Engine):
    engine.clear_cache()
    episode = make_episodes("qa", 8, 1, SHORT)[0]
    result = run_episode(ask_engine(engine, "naive", namespace="reuse"), episode)
    reports = [step.result.report for step in result.steps if step.result is not None]
    assert reports[0].grafted_tokens == 0
    assert reports[1].grafted_tokens > 0.5 * reports[0].prompt_tokens
    assert all(step.seconds > 0 for step in result.steps)


def test_sampling_is_the_paper_s_and_repeats(engine: Engine):
    sampling = cross_query.paper_sampling(5)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.2, 0.95, 5)
    [episode] = make_episodes("qa", 8, 1, SHORT)
    one, other = (
        run_episode(ask_engine(engine, "full", cross_query.paper_sampling(5)), episode)
        for _ in range(2)
    )
    assert one == other
    assert cross_query.GREEDY.temperature == 0
