"""Drafted tokens beside recoveries: in an engine of its own, since vLLM drafts in all of its
requests or in none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from draft_models import make_eagle, make_target
from engines import BLOCK, EVERYTHING, NAIVE, OFF, Ask, words
from processes import HostProcess

pytestmark = pytest.mark.slow
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(
    scope="module",
    params=[
        "ngram",
        *(pytest.param(method, marks=pytest.mark.soak) for method in ("draft_model", "eagle")),
    ],
)
def method(request: pytest.FixtureRequest) -> str:
    """How drafts are made: from the prompt, by the model itself, by a head of another model."""
    return str(request.param)


@pytest.fixture(scope="module")
def drafting(
    model: Path, method: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostProcess]:
    directory = tmp_path_factory.mktemp("drafting")
    drafts = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle":
        drafts["model"] = str(make_eagle(directory / "eagle", make_target(directory / "target")))
    by_method = {"ngram": NGRAM, "draft_model": drafts | {"model": str(model)}, "eagle": drafts}
    process = HostProcess(
        model, directory / "log", with_kvgraft=True, speculative_config=by_method[method]
    )
    yield process
    process.close()


def test_drafts_change_no_answer(drafting: HostProcess, plain: HostProcess, method: str):
    """The process checks after every batch that no block, pin or job is left."""
    documents = [words(300, 1), words(200, 2)]
    drafting.ask(*[Ask(document, OFF, max_tokens=1) for document in documents])
    prompts = [
        words(20 + number, 10 + number) + documents[number % 2] + words(9, 20 + number)
        for number in range(5)
    ]
    options = [EVERYTHING, OFF, EVERYTHING, OFF, EVERYTHING]
    answers = drafting.ask(
        *[Ask(p, o, max_tokens=120) for p, o in zip(prompts, options, strict=True)]
    )
    assert [answer.tokens for answer in answers] == plain.tokens(*prompts, max_tokens=120)
    assert [answer.grafted > 150 for answer in answers] == [True, False] * 2 + [True]
    assert drafting.counted("num_accepted") > (0 if method == "eagle" else 50)


def test_what_is_drafted_after_a_graft_is_no_exact_prefix(
    drafting: HostProcess, plain: HostProcess, method: str
):
    document = words(300, 3)
    drafting.ask(Ask(document, OFF, max_tokens=1))
    prompt = words(50, 4) + document
    [wrong] = drafting.ask(Ask(prompt, NAIVE, max_tokens=100))
    assert wrong.grafted >= 288
    [right] = drafting.ask(Ask(prompt + wrong.tokens, OFF))
    # vLLM computes the last block of a hit again for a head
    assert right.cached == (0 if method == "eagle" else BLOCK)
    assert [right.tokens] == plain.tokens(prompt + wrong.tokens)


@pytest.mark.parametrize("num_blocks", range(51, 58))
def test_a_request_that_just_fits(drafting: HostProcess, plain: HostProcess, num_blocks: int):
    """Room for drafts counts, too."""
    document, salt = words(40 * BLOCK, 1), str(num_blocks)
    drafting.ask(Ask(document, OFF, salt, max_tokens=1))
    prompt = words(10, 2) + document + words(num_blocks * BLOCK - len(document) - 20, 3)
    [answer] = drafting.ask(Ask(prompt, EVERYTHING, salt, max_tokens=1))
    assert [answer.tokens] == plain.tokens(prompt, max_tokens=1)


def test_preemption_while_drafting(drafting: HostProcess, plain: HostProcess):
    document = words(400, 5)
    drafting.ask(Ask(document, OFF, max_tokens=1))
    prompts = [words(100 + number, 30 + number) + document for number in range(5)]
    before = drafting.counted("num_preemptions")
    answers = drafting.ask(*[Ask(prompt, EVERYTHING, max_tokens=200) for prompt in prompts])
    assert drafting.counted("num_preemptions") > before
    assert [answer.tokens for answer in answers] == plain.tokens(*prompts, max_tokens=200)
