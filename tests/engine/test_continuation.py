"""Prompts that begin with an earlier one go on with its KV, exact or not; policies recover it where
it is."""

from pathlib import Path

import numpy as np
import pytest

from kvgraft import Engine, Policy, Request, Result, SamplingParams
from kvgraft.policies import Epic, Full, Naive, SparseX, Spread, Transitive
from kvgraft.prefill.context import Hidden, PrefillContext
from models import VOCAB_SIZE

SIZE = 16
TOLERANCE = 1e-4
EVERYTHING = SparseX(boundary_layers=1, recompute_share=1.0)


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


DOCUMENT, OPENING, NEW = words(100, 1), words(37, 2), words(30, 3)


@pytest.fixture
def engine(model_dirs: dict[str, Path]) -> Engine:
    engine = Engine(
        model_dirs["qwen3"], dtype="float32", continuation=True, poison_dropped_pages=True
    )
    ask(engine, DOCUMENT, Full())
    return engine


def ask(
    engine: Engine, prompt: list[int], policy: Policy, max_tokens: int = 1, **fields: object
) -> Result:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    result = engine.generate([Request(prompt, policy, sampling, return_logits=True, **fields)])[0]  # type: ignore[arg-type]
    report = result.report
    kinds = (
        report.prefix_tokens,
        report.continued_tokens,
        report.grafted_tokens,
        report.fresh_tokens,
    )
    assert sum(kinds) == report.prompt_tokens
    return result


def second_turn(engine: Engine, policy: Policy) -> list[int]:
    """A conversation whose first prompt is answered, and what comes next in it."""
    first = ask(engine, OPENING + DOCUMENT, policy, max_tokens=20)
    assert first.report.grafted_tokens >= 96
    assert first.report.continued_tokens == 0
    return OPENING + DOCUMENT + first.token_ids + NEW


def test_the_next_turn_goes_on_with_all_of_the_last_one(engine: Engine):
    prompt = second_turn(engine, Naive())
    report = ask(engine, prompt, Naive()).report
    assert report.prefix_tokens == 32  # the blocks before the first graft
    assert report.continued_tokens == (37 + 100 + 19) // SIZE * SIZE - 32
    assert (report.grafted_tokens, report.outcome) == (0, "continued")
    assert report.computed_share == pytest.approx(report.fresh_tokens / report.prompt_tokens)
    third = ask(engine, prompt + words(40, 4), Naive()).report
    assert third.prefix_tokens == 32
    assert third.continued_tokens == (len(prompt) - 1) // SIZE * SIZE - 32
    engine.check()


def test_it_reads_what_the_last_turn_has_left(engine: Engine):
    prompt = second_turn(engine, Naive())
    expected = ask(engine, prompt, Naive(), remember=False)
    engine.memory.cache.values[:, grafted_slots(engine)] += 1.0
    changed = ask(engine, prompt, Naive(), remember=False)
    assert changed.report.continued_tokens == expected.report.continued_tokens > 0
    assert float((changed.first_logits - expected.first_logits).abs().max()) > 1e-2  # type: ignore[operator]


def grafted_slots(engine: Engine) -> list[int]:
    """Where the KV lies that was grafted, and that only prompts find which go on with it."""
    blocks = engine.memory.admission.approximate._blocks.values()
    pages = {engine.memory.pool.lookup(key) for key, _, grafted in blocks if grafted}
    return [page * SIZE + offset for page in pages if page is not None for offset in range(SIZE)]


@pytest.mark.parametrize(
    "policy",
    [
        EVERYTHING,
        *(policy(recompute_share=1.0, continued_share=1.0) for policy in (Transitive, Spread)),
    ],
    ids=str,
)
def test_it_is_recovered_for_the_new_question_where_it_is(engine: Engine, policy: Policy):
    prompt = second_turn(engine, policy)
    slots = grafted_slots(engine)
    # it relies on layer 0, which is exact
    damaged = range(isinstance(policy, Spread), engine.config.num_layers)
    for stream in engine.memory.cache.layout.streams(0, damaged):
        engine.memory.cache.values[stream, slots] += 1.0
    used = engine.memory.pool.num_free
    continued = ask(engine, prompt, policy)
    assert continued.report.recomputed_tokens == len(slots) < continued.report.continued_tokens
    assert engine.memory.pool.num_free == used, "nothing was copied, and nothing is held"
    truth = ask(engine, prompt, Full(), namespace="nobody else")
    assert float((continued.first_logits - truth.first_logits).abs().max()) < TOLERANCE  # type: ignore[operator]
    engine.check()


def test_a_part_of_it_is_recovered_by_the_default(engine: Engine):
    prompt = second_turn(engine, Transitive())
    num_grafted, report = len(grafted_slots(engine)), ask(engine, prompt, Transitive()).report
    assert report.continued_tokens > num_grafted > 90
    assert 0.02 * num_grafted <= report.recomputed_tokens <= 0.02 * num_grafted + 3


def test_what_others_read_stays_as_it_is(engine: Engine):
    prompt = second_turn(engine, EVERYTHING)
    requests = [
        Request(prompt + words(20, 6 + n), EVERYTHING, SamplingParams(max_tokens=2))
        for n in range(2)
    ]
    first, second = engine.generate(requests)
    assert first.report.continued_tokens == second.report.continued_tokens > 0
    assert (first.report.recomputed_tokens, second.report.recomputed_tokens) == (
        len(grafted_slots(engine)),
        0,
    )
    engine.check()


def test_nobody_goes_on_with_what_a_failed_recovery_has_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    prompt = second_turn(engine, EVERYTHING)

    def fail(self: Policy, ctx: PrefillContext) -> Hidden:
        ctx.run(range(1), ctx.embed(ctx.plan.active))
        raise RuntimeError("as if")

    with monkeypatch.context() as patched:
        patched.setattr(SparseX, "recover", fail)
        with pytest.raises(RuntimeError, match="as if"):
            ask(engine, prompt, EVERYTHING)
    engine.check()
    again = ask(engine, prompt, EVERYTHING)
    assert (again.report.continued_tokens, again.report.prefix_tokens) == (0, 32)
    truth = ask(engine, prompt, Full(), namespace="nobody else")
    assert float((again.first_logits - truth.first_logits).abs().max()) < TOLERANCE  # type: ignore[operator]


def test_of_what_was_computed_exactly_the_answer_is_exact(engine: Engine):
    prompt = second_turn(engine, EVERYTHING)
    continued = ask(engine, prompt, EVERYTHING)
    assert continued.report.continued_tokens > 96
    truth = ask(engine, prompt, Full(), namespace="nobody else")
    assert float((continued.first_logits - truth.first_logits).abs().max()) < TOLERANCE  # type: ignore[operator]


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        (Naive(), {"namespace": "another"}),
        (Epic(), {}),
        (Full(), {}),
        (Naive(), {"match": "exact", "flow": "quest"}),
    ],
    ids=["another namespace", "another policy", "full", "a flow"],
)
def test_others_do_not_go_on_with_it(engine: Engine, policy: Policy, fields: dict[str, str]):
    prompt = second_turn(engine, Naive())
    report = ask(engine, prompt, policy, **fields).report
    assert report.continued_tokens == 0
    assert report.prefix_tokens <= 32


def test_new_text_behind_it_is_grafted(engine: Engine):
    prompt = second_turn(engine, Naive())
    other = words(90, 5)
    ask(engine, other, Full())
    report = ask(engine, prompt + other + NEW, Naive()).report
    assert report.continued_tokens >= 112
    assert report.grafted_tokens >= 80
    assert report.outcome == "grafted"
    engine.check()


def test_it_ends_with_its_pages(engine: Engine):
    prompt = second_turn(engine, Naive())
    before = ask(engine, prompt, Naive(), remember=False).report.continued_tokens
    chain = engine.memory.admission.approximate
    last = [engine.memory.pool.lookup(key) for key, *_ in chain._blocks.values()][-1]
    engine.memory.pool._drop([last])
    assert ask(engine, prompt, Naive(), remember=False).report.continued_tokens == before - SIZE
    engine.clear_cache()
    assert ask(engine, prompt, Naive()).report.continued_tokens == 0


def test_what_is_not_remembered_is_not_gone_on_with(engine: Engine):
    ask(engine, OPENING + DOCUMENT, Naive(), remember=False)
    assert ask(engine, OPENING + DOCUMENT + NEW, Naive()).report.continued_tokens == 0


def test_depth_grows_by_grafts_alone(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["qwen3"], dtype="float32", continuation=True, max_depth=2)
    ask(engine, DOCUMENT, Full())
    texts = [words(64, 10 + number) for number in range(4)]
    reports = []
    known = DOCUMENT
    # each new text is first read behind a graft of the last one
    for number, text in enumerate(texts):
        reports.append(ask(engine, words(5, 20 + number) + known + text, Naive()).report)
        known = text
    assert [report.depth for report in reports] == [1, 2, 3, 0], (
        "what is three grafts away from exact KV is no source"
    )
    assert [report.reason for report in reports] == [None, None, None, "too_deep"]
    assert [report.too_deep_tokens >= 48 for report in reports] == [False, False, False, True]
    prompt = words(5, 20) + DOCUMENT + texts[0] + NEW
    report = ask(engine, prompt, Naive()).report
    assert (report.depth, report.continued_tokens > 0) == (1, True)


def test_a_session_without_an_end_finds_its_last_text_however_deep_it_is(
    model_dirs: dict[str, Path],
):
    engine = Engine(model_dirs["qwen3"], dtype="float32")
    ask(engine, DOCUMENT, Full())
    known, reports = DOCUMENT, []
    for number in range(12):
        text = words(64, 40 + number)
        reports.append(ask(engine, words(5, 60 + number) + known + text, Naive()).report)
        known = text
    assert [report.depth for report in reports] == [*range(1, 13)]
    assert all(report.grafted_tokens >= 48 and not report.too_deep_tokens for report in reports)
