"""ReAct agents in the language of the testbed: two suites of episodes, and the loop that runs them
on any engine.

    qa  questions over several pages, found by search among alike ones, with a calculator (HotpotQA,
        distractors)
    tools  look-ups, a calculator, a calendar and others, of which each prompt describes a choice
           (ToolBench)

The bundled model answers questions about what it reads; it cannot plan. So the *scaffold* is given:
a plan says which tool comes next and what is asked after its observation, and the harness writes
thoughts and actions into the prompt. What the model reads decides all the rest: its answers are the
arguments of the actions that follow, and the last one is the agent's. A wrong answer sends the
agent to the wrong page, or to a tool that refuses the call, and nobody tells it.

`Variation` says how prompts nearly repeat. Notes in the preamble of an episode decide what some
pages mean, so that KV of a page that was read in another episode can be wrong although not a word
of it has changed."""

from research.cross_query.episodes import SUITES, Episode, Observation, Prompt, make_episodes
from research.cross_query.loop import (
    GREEDY,
    EpisodeResult,
    StepOutcome,
    ask_engine,
    paper_sampling,
    run_episode,
)
from research.cross_query.variation import Variation

__all__ = [
    "GREEDY", "SUITES", "Episode", "EpisodeResult", "Observation", "Prompt", "StepOutcome",
    "Variation", "ask_engine",
    "make_episodes", "paper_sampling", "run_episode",
]  # fmt: skip
