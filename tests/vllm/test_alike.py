"""Similar documents inside vLLM: the same tokens are recomputed as in the native engine."""

from pathlib import Path

import pytest
import warm
from engines import ENVIRONMENT

from kvgraft import Engine, Request, SamplingParams
from kvgraft_lab.evaluate.tasks import Shape, find_suites
from kvgraft_lab.testbed import MODEL_DIR, vocabulary

ENGINE = Path(__file__).with_name("grafting_engine.py")
OPTIONS = [{"policy": "spread"}, {"policy": "spread", "alike_share": 1.0}, {"reuse": "off"}]
pytestmark = pytest.mark.slow


def test_what_tells_documents_apart_is_recomputed_as_in_the_native_engine():
    engine = Engine(MODEL_DIR, dtype="float32", block_size=32, max_depth=0)
    [sheets] = find_suites("sheets")
    [item] = sheets.items(5, 1, Shape(700, 3, ("alone",)))

    def encode(segments: tuple[str, ...]) -> list[int]:
        return [token for text in segments for token in engine.encode(text)]

    read, prompt = [encode(segments) for segments in item.phase_1], encode(item.phase_2[0].segments)
    job = {"read": read, "prompts": [prompt], "options": OPTIONS, "settings": {"max_depth": 0}}
    [[ours, without, exact]] = warm.run(ENGINE, job, **ENVIRONMENT)

    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    for tokens in read:
        engine.generate([Request(tokens, "full", sampling)])
    [native] = engine.generate([Request(prompt, "spread", sampling, remember=False)])
    assert ours["report"]["grafted_tokens"] == native.report.grafted_tokens > 300
    assert ours["report"]["recomputed_tokens"] == native.report.recomputed_tokens
    assert ours["report"]["counts"] == dict(native.report.counts)
    assert ours["report"]["counts"]["distinguishing_tokens"] > 50
    assert ours["tokens"] == native.token_ids
    assert without["report"]["counts"] == {"distinguishing_tokens": 0}
    assert without["report"]["recomputed_tokens"] < ours["report"]["recomputed_tokens"]
    assert exact["report"]["grafted_tokens"] == 0


@pytest.mark.parametrize(
    ("orders", "reused"),
    [
        ([(0,), (0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 4)], "grafted_tokens"),
        ([(0,), (0, 1), (0, 1, 2), (2, 3), (2, 3, 4)], "continued_tokens"),
        ([(0,), (0, 1), (0, 1, 2), (1, 0, 2), (1, 2, 0)], "continued_tokens"),
    ],
)
def test_texts_that_a_conversation_has_read_one_behind_the_other_are_told_apart(
    orders: list[tuple[int, ...]], reused: str
):
    """Also if a prompt begins with a part of an earlier one."""
    engine = Engine(MODEL_DIR, dtype="float32", block_size=32)
    facts = list(zip(vocabulary.THINGS, vocabulary.NUMBERS, strict=False))
    wording = " the code of {} is {} . the old market rested near the meadow ."
    sheets = [
        "".join(wording.format(*fact) for fact in facts[at : at + 10]) for at in range(0, 50, 10)
    ]
    texts = [[sheets[number] for number in order] for order in orders]
    prompts = [
        engine.encode(" ".join(["read this :", *said, "question : code of lamp ?"]))
        for said in texts
    ]
    job = {"read": [], "prompts": prompts, "options": OPTIONS[:1]}
    ours = [report["report"] for [report] in warm.run(ENGINE, job, **ENVIRONMENT)]
    assert [report["counts"].get("distinguishing_tokens", 0) for report in ours] == [0] * len(
        orders
    )
    assert ours[3]["grafted_tokens"] > 100
    assert ours[4][reused] > 100

    apart = [[sheet] for sheet in texts[2]]
    job = {
        "read": [engine.encode(f"note {sheet}") for [sheet] in apart],
        "prompts": prompts[2:3],
        "options": OPTIONS[:1],
    }
    [[alone]] = warm.run(ENGINE, job, **ENVIRONMENT)
    assert alone["report"]["counts"]["distinguishing_tokens"] > 0, "they are not similar"
