"""Pages, tools and prompts of agents, without a model."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from kvgraft.core.prompt import Part, Segment
from kvgraft_lab.testbed import tasks
from kvgraft_lab.testbed.vocabulary import VOCABULARY
from research.cross_query import SUITES, Episode, Variation, make_episodes
from research.cross_query.episodes import NUM_TOOLS
from research.cross_query.pages import edit, make_page
from research.cross_query.plans import PLANS
from research.cross_query.tools import TOOLS, ToolError, calculate, convert, locate, next_week
from research.cross_query.variation import CONTEXT, MAX_SEARCHES, ROOM_AROUND, ROOM_BESIDE

EPISODES = tuple(episode for suite in SUITES for episode in make_episodes(suite, 3, 12))
VARIATIONS = (
    Variation(),
    Variation(order="newest", edit_rate=0.05, changed_notes=1.0),
    Variation(
        edit_rate=0,
        changed_notes=0,
        counter=False,
        relabel=False,
        retrieve_tools=False,
        num_passages=1,
    ),
    Variation(num_passages=8, passage_words=(40, 100)),
)


def right_answers(episode: Episode) -> list[str]:
    """What an agent without errors answers, read by the testbed's own reader."""
    answers: list[str] = []
    for _ in episode.plan.steps:
        answers.append(episode.prompt(answers).expected)
    return answers


def words(parts: Sequence[Part]) -> list[str]:
    return " ".join(part.text if isinstance(part, Segment) else part for part in parts).split()


def named(suite: str, task: str) -> Episode:
    return next(
        episode for episode in EPISODES if episode.suite == suite and episode.plan.task == task
    )


@pytest.mark.parametrize("variation", VARIATIONS, ids=str)
@pytest.mark.parametrize("suite", SUITES)
def test_reading_every_prompt_right_gives_the_answer(suite: str, variation: Variation):
    episodes = make_episodes(suite, 4, 12, variation)
    assert {episode.plan.task for episode in episodes} == set(PLANS[suite])
    for episode in episodes:
        answers = right_answers(episode)
        assert answers[-1] == episode.plan.answer
        assert "" not in answers


@pytest.mark.parametrize("variation", VARIATIONS, ids=str)
def test_prompts_are_of_known_words_and_fit_the_model(variation: Variation):
    for suite in SUITES:
        for episode in make_episodes(suite, 5, 6, variation):
            prompt = words(episode.prompt(right_answers(episode)[:-1]).parts)
            assert set(prompt) <= set(VOCABULARY)
            assert len(prompt) < CONTEXT - 8


def test_what_prompts_hold_beside_passages_is_what_the_limit_of_their_length_assumes():
    for episode in (*EPISODES, *make_episodes("tools", 6, 30), *make_episodes("qa", 6, 30)):
        computed = len(episode.plan.variables)
        assert len(episode.plan.steps) - computed <= MAX_SEARCHES
        parts = episode.prompt(right_answers(episode)[:-1]).parts
        passages = [
            part.text
            for part, before in zip(parts[1:], parts, strict=False)
            if str(before).startswith("doc ")
        ]
        found = sorted(len(passage.split()) for passage in passages)[computed:]
        assert max(found) + 3 <= episode.variation.passage_words[1] + ROOM_AROUND
        assert len(words(parts)) - sum(found) <= ROOM_BESIDE


def test_equal_arguments_give_equal_episodes():
    again = tuple(episode for suite in SUITES for episode in make_episodes(suite, 3, 12))
    assert [episode.plan for episode in again] == [episode.plan for episode in EPISODES]
    assert [e.prompt(right_answers(e)[:1]) for e in again] == [
        e.prompt(right_answers(e)[:1]) for e in EPISODES
    ]
    assert make_episodes("qa", 2, 12)[0].plan != EPISODES[0].plan


def test_more_episodes_do_not_change_the_first():
    assert make_episodes("tools", 3, 2) == make_episodes("tools", 3, 5)[:2]


def test_variation_leaves_the_tasks_as_they_are():
    others = make_episodes(
        "qa", 3, 12, Variation(edit_rate=0.1, order="newest", counter=False, num_passages=2)
    )
    for episode, other in zip(EPISODES, others, strict=False):
        assert episode.plan == other.plan


def test_edits_change_filler_only():
    facts = ("the code of lamp is 42 .", "the lamp is theirs .", "note red means 11 .")
    page = make_page(Random(1), "lamp", facts, 150)
    edited = edit(Random(2), page, 0.3)
    assert page.text != edited.text
    assert [s for s in edited.sentences if s.fact] == [s for s in page.sentences if s.fact]
    assert tasks.read([page.text]) == tasks.read([edited.text])
    assert edit(Random(2), page, 0) == page
    assert set(edited.text.split()) <= set(VOCABULARY)


@pytest.mark.parametrize("rate", [0.005, 0.05])
def test_edits_are_as_many_as_the_rate_says(rate: float):
    page = make_page(Random(1), "lamp", ("the code of lamp is 42 .",), 2000)
    before, after = page.sentences, edit(Random(2), page, rate).sentences
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    assert 0.5 * rate * 2000 < changed <= 1.5 * rate * 2000


def test_a_page_of_facts_alone_is_not_edited():
    page = make_page(Random(1), "lamp", ("the code of lamp is 42 .",), 7)
    assert edit(Random(1), page, 1.0) == page


def test_pages_are_found_again_with_small_differences():
    one, other = (make_episodes("qa", 3, 2, Variation(edit_rate=0.02))[number] for number in (0, 1))
    [key] = one.plan.steps[0].action.split()[1:]
    found = [
        {frozenset(tasks.read([text])): text for text in e.call(f"search {key}")}
        for e in (one, other)
    ]
    shared = found[0].keys() & found[1].keys()
    assert shared
    assert any(found[0][fact] != found[1][fact] for fact in shared)
    assert one.call(f"search {key}") == one.call(f"search {key}")


def test_the_scratchpad_is_sent_again_in_another_order_with_other_labels():
    episode = named("tools", "convert")
    answers = right_answers(episode)
    first, second = (episode.prompt(answers[:number]).parts for number in (1, 2))
    assert first[0] != second[0]  # the counter
    segments = [
        [part.text for part in parts if isinstance(part, Segment)] for parts in (first, second)
    ]
    assert segments[0][: NUM_TOOLS + 1] != segments[1][: NUM_TOOLS + 1]
    assert segments[0][NUM_TOOLS:] == segments[1][NUM_TOOLS : len(segments[0])]
    labels = [
        [part for part in parts if isinstance(part, str) and part.startswith("doc ")]
        for parts in (first, second)
    ]
    assert labels[0] != labels[1][: len(labels[0])]


def test_nothing_changes_where_nothing_shall():
    still = VARIATIONS[2]
    [*_, episode] = make_episodes("tools", 3, 3, still)
    answers = right_answers(episode)
    first, second = (words(episode.prompt(answers[:number]).parts) for number in (0, 1))
    question = len(tasks.ask("mentor of hope").split())
    assert second[: len(first) - question] == first[:-question]
    newest = replace(episode, variation=replace(still, order="newest"))
    assert words(newest.prompt(answers[:1]).parts) != second


def test_a_wrong_answer_leads_to_another_page():
    episode = named("qa", "bridge")
    [pupil] = episode.plan.steps[0].action.split()[1:]
    wrong = next(key for key in episode.world.keys("number") if key != pupil)
    prompt = episode.prompt([wrong])
    assert prompt.action == f"search {wrong}"
    assert not prompt.observation.error
    assert prompt.expected != episode.plan.answer


REFUSED = (
    "search 42", "search", "search abel bell", "mirror turin", "tent 42", "stamp ?", "box oslo",
    "brush abel",
    "flag 10", "wheel 42", "wheel 42 with abel", "wheel 42 by 12", "wheel 90 with 90",
    "wheel 90 from 12", "clock abel",
    "coin", "compass 42",
)  # fmt: skip


@pytest.mark.parametrize("action", REFUSED)
def test_wrong_arguments_give_error_observations(action: str):
    episode = named("tools", "walk")
    with pytest.raises(ToolError, match="need a") as error:
        episode.call(action)
    assert set(str(error.value).split()) <= set(VOCABULARY)
    assert not tasks.read([str(error.value)])


def test_errors_are_observed_and_the_episode_goes_on():
    episode = named("tools", "convert")
    prompt = episode.prompt(["?", "amber"])
    assert prompt.observation.error
    assert prompt.observation.passages[0].endswith(
        (" , given ? with amber .", " , given amber from ? .")
    )
    assert prompt.expected == ""
    assert episode.prompt(["?", "amber", "?"]).observation.error


def test_unknown_tools_are_refused():
    for action in ("hammer 42", "", "compass oslo"):
        with pytest.raises(ToolError, match="need a tool"):
            named("qa", "sum").call(action)  # which has no compass


def test_numbers():
    assert calculate(["12", "with", "30"]) == 42
    assert calculate(["12", "from", "30"]) == 18
    assert calculate(["12", "and", "30"]) == 30
    assert next_week(["92"]) == 99
    assert next_week(["93"]) == 10
    assert convert(["10"]) == 99
    assert locate(["oslo"]) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["50", "with", "50"], "10 to 99, got 100"),
        (["30", "from", "30"], "10 to 99, got 0"),
        (["30", "by", "30"], "unknown operation 'by': choose from with, from, and"),
        (["5", "with", "30"], "numbers must be 10 to 99, got '5'"),
        (["__import__", "with", "30"], "got '__import__'"),
        (["30", "with"], "needs 3 arguments, got 2: 30 with"),
    ],
)
def test_the_calculator_says_what_it_cannot_do(arguments: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        calculate(arguments)


def test_every_look_up_has_a_book_and_there_are_many_tools():
    assert len(TOOLS) >= 8
    world = named("tools", "walk").world
    assert world.books.keys() == {name for name, tool in TOOLS.items() if tool.compute is None}
    assert world.descriptions.keys() == TOOLS.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edit_rate": -0.1}, "edit_rate must be in"),
        ({"changed_notes": 2}, "changed_notes must be in"),
        ({"order": "any"}, "unknown order 'any': choose from oldest, newest"),
        ({"num_passages": 0}, "num_passages must be 1 to 8, got 0"),
        ({"passage_words": (30, 50)}, "from 40"),
        ({"passage_words": (90, 50)}, "in order"),
        ({"num_passages": 8}, "at most 4608 are allowed"),
    ],
)
def test_impossible_variations_are_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Variation(**options)


def test_impossible_episodes_are_refused():
    with pytest.raises(ValueError, match="unknown suite 'chess': choose from qa, tools"):
        make_episodes("chess", 0, 1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make_episodes("qa", 0, 0)
    episode = EPISODES[0]
    with pytest.raises(ValueError, match="the plan has 2 steps, got 2 answers"):
        episode.prompt(right_answers(episode))
