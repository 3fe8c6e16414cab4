from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.testbed.scenarios import Scenario, make_scenarios
from kvgraft_lab.testbed.tasks import read

SCENARIOS = make_scenarios(seed=3, num_items=6)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=BY_NAME)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@each_scenario
def test_answers_follow_from_the_prompt(scenario: Scenario):
    for prompt in chain.from_iterable(item.phase_2 for item in scenario.items):
        *segments, question = prompt.segments
        assert question == prompt.question.text
        assert prompt.question in read(segments)


@each_scenario
def test_phase_2_moves_what_phase_1_read(scenario: Scenario):
    for item in scenario.items:
        known = {
            segment: " ".join(text[: text.index(segment)])
            for text in item.phase_1
            for segment in text
        }
        for prompt in item.phase_2:
            instruction, *reused, question = prompt.segments
            assert instruction not in known
            assert question not in known
            assert set(reused) <= known.keys()
            before = [" ".join(prompt.segments[:place]) for place in range(1, len(reused) + 1)]
            moved = [
                len(text.split()) != len(known[s].split())
                for text, s in zip(before, reused, strict=True)
            ]
            # a reordered document may find its old place by chance
            assert sum(moved) >= len(reused) - 1


@each_scenario
def test_the_questions_of_an_item_differ(scenario: Scenario):
    for item in scenario.items:
        assert len({prompt.question.text for prompt in item.phase_2}) == len(item.phase_2) == 4
        assert len({prompt.segments[:-1] for prompt in item.phase_2}) == 2


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("rag", {"needle", "variable", "coreference", "hop", "glossary"}),
        ("chat", {"needle", "variable", "glossary"}),
        ("agents", {"needle", "variable", "coreference", "hop"}),
    ],
)
def test_mix_has_controls_and_questions_across_segments(name: str, tasks: set[str]):
    questions = [prompt.question for item in BY_NAME[name].items for prompt in item.phase_2]
    assert {question.task for question in questions} == tasks
    assert 0.2 <= sum(question.crosses for question in questions) / len(questions) <= 0.8


@each_scenario
def test_the_model_answers_with_full_attention(scenario: Scenario, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    prompts = list(chain.from_iterable(item.phase_2 for item in scenario.items[:3]))
    right = 0
    for prompt in prompts:
        token_ids = tokenizer(" ".join(("<bos>", *prompt.segments)), return_tensors="pt").input_ids
        assert 1500 <= token_ids.shape[1] <= 2000
        with torch.inference_mode():
            logits = model(token_ids, logits_to_keep=1).logits
        right += tokenizer.decode(logits[0, -1].argmax()) == prompt.question.answer
    assert right / len(prompts) >= 0.9


def test_same_seed_same_scenarios():
    assert make_scenarios(3, 2) == make_scenarios(3, 2)
    assert make_scenarios(3, 2) != make_scenarios(4, 2)
    assert make_scenarios(3, 2)[0].items == BY_NAME["rag"].items[:2]


def test_no_items_are_refused():
    with pytest.raises(ValueError, match="num_items must be at least 1, got 0"):
        make_scenarios(3, 0)
