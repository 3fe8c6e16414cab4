"""A server that compiles its model: recoveries go through what was compiled, and are those of an
eager server."""

from collections.abc import Iterator
from pathlib import Path

import multimodal
import pytest
from engines import ENVIRONMENT, EVERYTHING, OFF, Ask, words
from processes import HostProcess

pytestmark = pytest.mark.slow
DOCUMENTS = words(200, 1), words(150, 2)
PROMPT = words(20, 3) + DOCUMENTS[1] + words(10, 4) + DOCUMENTS[0] + words(12, 5)
POLICIES = ("naive", "epic", "transitive", "spread")
ROUNDING = 1e-3  # of log-probabilities: Inductor's kernels add up in another order


@pytest.fixture(scope="module")
def compiled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    log = tmp_path_factory.mktemp("compiled") / "log"
    process = HostProcess(model, log, with_kvgraft=True, enforce_eager=False)
    process.counted("count_forwards")
    process.ask(*[Ask(document, OFF) for document in DOCUMENTS])
    yield process
    process.close()


@pytest.fixture(scope="module")
def eager(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    log = tmp_path_factory.mktemp("eager") / "log"
    process = HostProcess(model, log, with_kvgraft=True)
    process.counted("count_forwards")
    process.ask(*[Ask(document, OFF) for document in DOCUMENTS])
    yield process
    process.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_it_recovers_in_one_compiled_forward_what_an_eager_one_recovers(
    compiled: HostProcess, eager: HostProcess, policy: str
):
    ask = Ask(PROMPT, {"policy": policy}, logprobs=True)
    before = compiled.counted("num_forwards")
    [found], [expected] = compiled.ask(ask), eager.ask(ask)
    assert compiled.counted("num_forwards") == before + 1
    assert found.grafted == expected.grafted > 300
    assert found.report["computed_share"] == expected.report["computed_share"]
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING)


def test_what_is_computed_again_is_exact(compiled: HostProcess, plain: HostProcess):
    [found] = compiled.ask(Ask(PROMPT, EVERYTHING))
    assert found.grafted > 300
    assert [found.tokens] == plain.tokens(PROMPT)


def test_layers_are_called_in_the_eager_one_alone(compiled: HostProcess, eager: HostProcess):
    """Else what stands above shows less than it says."""
    for process in (compiled, eager):
        process.ask(Ask(PROMPT, {"policy": "naive"}))
    assert eager.counted("num_layers") > 0
    assert compiled.counted("num_forwards") > 0
    assert compiled.counted("num_layers") == 0


@pytest.mark.soak  # compiles a model twice
def test_a_multimodal_model_recovers_as_one_from_embeddings(tmp_path: Path):
    """Its compiled forward takes embeddings, and with M-RoPE three positions of each token."""
    multimodal.make_apart("Qwen2.5-VL", tmp_path)
    job = {"model": str(tmp_path), "policies": POLICIES}
    facts = multimodal.run(Path(__file__).with_name("multimodal_engine.py"), job, ENVIRONMENT)
    compiled, eager = facts["compiled"], facts["eager"]
    assert compiled["num_forwards"] == eager["num_forwards"] == len(POLICIES)
    assert compiled["num_layers"] == 0 < eager["num_layers"]
    for found, expected in zip(compiled["answers"], eager["answers"], strict=True):
        assert found["report"]["grafted_tokens"] == expected["report"]["grafted_tokens"] > 300
        assert found["tokens"] == expected["tokens"]
        assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=ROUNDING)
