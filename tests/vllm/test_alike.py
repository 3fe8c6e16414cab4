"""Documents that look alike inside vLLM: the same tokens are recomputed as in the native engine."""

from pathlib import Path

import pytest
import warm
from engines import ENVIRONMENT

from kvgraft import Engine, Request, SamplingParams
from kvgraft.evaluate.tasks import Shape, find_suites
from kvgraft.testbed import MODEL_DIR

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
