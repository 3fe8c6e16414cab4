"""What the guard's scorer asks of the engine, and when; test_guard.py drives it with a real one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind

from kvgraft.guard.guard import ANSWER_TOKENS, Ticket
from kvgraft.policies import parse_policy
from kvgraft.server.call import Call
from kvgraft.server.logprob_recorder import LogprobRecorder
from kvgraft.server.metrics import GuardMetrics
from kvgraft.server.scorer import (
    AT_ONCE,
    CHUNK,
    FLOOR_S,
    MOST_WAITING,
    NUM_LOGPROBS,
    AnswerSample,
    Scorer,
)
from kvgraft.vllm.options import KEY, TRIAL_OF

TICKET = Ticket("spread", parse_policy("spread"), is_watched=True)
PROMPT = list(range(2 * CHUNK + 100))
ANSWER = [7, 8]
OURS = [{7: -0.1, 8: -3.0}, {8: -0.2, 7: -2.0}]
REPORT = {"outcome": "grafted", "recomputed_tokens": 20, "fresh_tokens": 10}


class Gate:
    """Says of every token of an answer that it is certain, and keeps what it was asked."""

    def __init__(self) -> None:
        self.num_waiting, self.num_cached, self.fails = 0, 0, False
        self.report = dict(REPORT)
        self.asked: list[tuple[str | None, dict[str, Any], int, dict[str, Any]]] = []
        self.adapters: list[Any] = []

    async def run(
        self,
        call: Call,
        params: dict[str, Any],
        token_ids: list[int],
        request_id: str,
        **sampling: Any,
    ) -> Any | None:
        assert call.low_priority
        self.adapters.append(call.lora_request)
        self.asked.append((call.salt, params, len(token_ids), sampling))
        if self.fails:
            return None
        certain = [
            {token: SimpleNamespace(logprob=0.0)} for token in params[KEY].get("forced_output", ())
        ]
        return SimpleNamespace(
            num_cached_tokens=min(self.num_cached, len(token_ids) - 1),
            outputs=[SimpleNamespace(logprobs=certain)],
            kv_transfer_params={KEY: self.report},
        )

    @property
    def lengths(self) -> list[int]:
        """Of the prompts, but for those that warm up."""
        return [length for _, _, length, _ in self.asked[3:]]


def sample(**changes: Any) -> AnswerSample:
    given = {"prompt": PROMPT, "answer": ANSWER, "logprobs": OURS, "depth": 1, "found": {}}
    return AnswerSample(
        TICKET, "a", Call.internal_request("salt of a", "an adapter"), **{**given, **changes}
    )


class Setting:
    """A scorer over a gate, with a clock that stands still but when told."""

    def __init__(self, tokens_per_minute: float = 1e9) -> None:
        self.now, self.gate, self.scored = 0.0, Gate(), list[Mapping[str, float]]()
        self.metrics = GuardMetrics("m")
        self.scorer = Scorer(
            self.gate,
            tokens_per_minute,
            lambda _, found: self.scored.append(found),
            self.metrics,
            lambda: self.now,
        )

    def count(self, outcome: str) -> float:
        return self.metrics.answers.labels(outcome)._value.get()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)  # between two looks


def play(scene: Callable[[Setting], Awaitable[None]], tokens_per_minute: float = 1e9) -> Setting:
    async def run() -> Setting:
        setting = Setting(tokens_per_minute)
        await scene(setting)
        return setting

    return asyncio.run(run())


def test_a_prompt_is_computed_chunk_by_chunk_and_its_answer_given():
    async def scene(setting: Setting) -> None:
        setting.scorer.add(sample())
        await until(lambda: bool(setting.scored))

    setting = play(scene)
    assert setting.gate.lengths == [CHUNK, 2 * CHUNK, len(PROMPT), len(PROMPT)]
    assert {salt for salt, *_ in setting.gate.asked[3:]} == {"salt of a"}
    assert setting.gate.adapters == [None] * 3 + ["an adapter"] * 4
    _, params, _, sampling = setting.gate.asked[-1]
    assert params[KEY]["forced_output"] == ANSWER
    assert params[KEY]["control"]["op"] == "score"
    assert sampling == {"max_tokens": 2, "logprobs": NUM_LOGPROBS, "ignore_eos": True}
    assert setting.scored[0]["loglik"] == pytest.approx((-0.1 - 0.2) / 2)
    assert setting.count("scored") == 1
    assert setting.metrics.tokens._value.get() == 3 * CHUNK + 2 * len(PROMPT) + len(ANSWER), (
        "nothing was cached"
    )


def test_sessions_whose_depth_grows_without_end_have_few_metrics():
    metrics = GuardMetrics("m")
    for depth in range(50):
        metrics.observe("of any depth", depth, {"answer_kl": 0.0, "flips": 0.0, "loglik": 0.0})
    shown = {depth for _, policy, depth in metrics.kl.metric._metrics if policy == "of any depth"}
    assert shown == {"0", "1", "2", "3", "4", "5+"}


def test_nobody_shares_what_warms_up():
    async def scene(setting: Setting) -> None:
        await until(lambda: len(setting.gate.asked) == 3)

    salts = [salt for salt, *_ in play(scene).gate.asked]
    assert len({*salts, "salt of a"}) == 4


def test_what_is_tried_is_asked_for_once_with_the_policy_that_it_would_have_had():
    async def scene(setting: Setting) -> None:
        setting.scorer.add(sample(trial_of="r1"))
        await until(lambda: bool(setting.scored))

    setting = play(scene)
    [(salt, params, length, _)] = setting.gate.asked[3:]
    assert (salt, length) == ("salt of a", len(PROMPT))
    assert params == {KEY: {"policy": str(TICKET.policy), "forced_output": ANSWER}, TRIAL_OF: "r1"}
    assert setting.scored[0]["loglik"] == pytest.approx((0.1 + 0.2) / 2), "the other way round"
    assert setting.metrics.tokens._value.get() == 30 + len(ANSWER)


def test_what_was_not_tried_after_all_is_not_scored():
    async def scene(setting: Setting) -> None:
        setting.gate.report["outcome"] = "miss"
        setting.scorer.add(sample(trial_of="r1"))
        await until(lambda: setting.count("failed") == 1)

    assert not play(scene).scored


def test_nothing_is_computed_while_something_waits_but_for_the_floor():
    async def scene(setting: Setting) -> None:
        await until(lambda: len(setting.gate.asked) == 3)
        setting.gate.num_waiting = 1
        setting.scorer.add(sample())
        await asyncio.sleep(0.1)  # as long as it would take
        assert not setting.gate.lengths
        for number in (1, 2, 3):
            setting.now += FLOOR_S + 1
            await until(lambda: len(setting.gate.lengths) >= number)  # noqa: B023
            await asyncio.sleep(0.05)  # likewise
            assert len(setting.gate.lengths) == number + (number == 3), (
                "behind the last chunk the answer is given"
            )
        assert setting.scored

    play(scene)


def test_what_is_cached_costs_neither_tokens_nor_turns():
    async def scene(setting: Setting) -> None:
        await until(lambda: len(setting.gate.asked) == 3)
        setting.gate.num_waiting, setting.gate.num_cached = 1, len(PROMPT)
        setting.scorer.add(sample())
        setting.now += FLOOR_S + 1
        for _ in range(3):
            setting.now += 0.1
            await asyncio.sleep(0.05)  # of the scorer
        await until(lambda: bool(setting.scored))

    setting = play(scene)
    assert setting.metrics.tokens._value.get() == 4 + len(ANSWER), "one of each chunk"
    assert setting.now < 2 * FLOOR_S


def test_so_many_tokens_a_minute():
    async def scene(setting: Setting) -> None:
        setting.scorer.add(sample())
        # a second's worth is there, and is overdrawn
        await until(lambda: setting.gate.lengths == [CHUNK])
        await asyncio.sleep(0.05)  # as long as it would take
        assert setting.gate.lengths == [CHUNK]
        setting.now += 60 * (CHUNK + 1) / 600
        await until(lambda: len(setting.gate.lengths) == 2)

    play(scene, tokens_per_minute=600)


def test_chunks_come_one_by_one_while_answers_are_generated_together():
    most, now = {"chunks": 0, "answers": 0}, {"chunks": 0, "answers": 0}

    async def scene(setting: Setting) -> None:
        run = setting.gate.run

        async def slowly(
            call: Call, params: dict[str, Any], *rest: Any, **sampling: Any
        ) -> Any | None:
            kind = "answers" if "forced_output" in params[KEY] else "chunks"
            now[kind] += 1
            most[kind] = max(most[kind], now[kind])
            await asyncio.sleep(0.02 if kind == "answers" else 0.001)  # of the engine
            now[kind] -= 1
            return await run(call, params, *rest, **sampling)

        setting.gate.run = slowly  # type: ignore[method-assign]
        for _ in range(8):
            setting.scorer.add(sample())
        await until(lambda: len(setting.scored) == 8)

    play(scene)
    assert most == {"chunks": 1, "answers": AT_ONCE}


def test_too_many_are_not_kept():
    async def scene(setting: Setting) -> None:
        # nothing has begun yet
        taken = [setting.scorer.add(sample()) for _ in range(MOST_WAITING + 3)]
        assert taken == [True] * MOST_WAITING + [False] * 3
        await until(lambda: len(setting.scored) == MOST_WAITING)
        assert setting.scorer.add(sample())

    play(scene)


def test_a_reset_drops_what_waits_and_ends_what_is_being_scored():
    async def scene(setting: Setting) -> None:
        await until(lambda: len(setting.gate.asked) == 3)
        setting.gate.num_waiting = 1
        for _ in range(3):
            setting.scorer.add(sample())
        await asyncio.sleep(0.05)  # one is being scored
        await setting.scorer.reset()
        await until(lambda: setting.count("dropped") == 3)
        assert setting.metrics.waiting._value.get() == 0
        setting.gate.num_waiting = 0
        await setting.scorer.reset()
        setting.scorer.add(sample(prompt=PROMPT[:10]))
        await until(lambda: bool(setting.scored))

    setting = play(scene)
    assert setting.gate.lengths == [10, 10]
    assert setting.count("failed") == 0


def test_it_goes_on_after_what_failed():
    async def scene(setting: Setting) -> None:
        setting.gate.fails = True
        setting.scorer.add(sample())
        await until(lambda: setting.count("failed") == 1)
        setting.gate.fails = False
        setting.scorer.add(sample())
        await until(lambda: bool(setting.scored))

    assert play(scene).count("scored") == 1


def test_it_goes_on_when_nobody_can_note_what_was_found():
    async def scene(setting: Setting) -> None:
        found, setting.scored = setting.scored, None  # type: ignore[assignment]
        for _ in range(2 * AT_ONCE):
            setting.scorer.add(sample())
        await until(lambda: setting.count("failed") == 2 * AT_ONCE)
        setting.scored = found
        setting.scorer.add(sample())
        await until(lambda: bool(setting.scored))

    assert play(scene).metrics.waiting._value.get() == 0


def output(tokens: list[int]) -> Any:
    logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
    first = SimpleNamespace(token_ids=tokens, logprobs=logprobs, cumulative_logprob=-2.0)
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[first])


@pytest.mark.parametrize(
    "kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY]
)
def test_what_vllm_says_is_noted_and_taken_out(kind: RequestOutputKind):
    one, tokens = LogprobRecorder(TICKET, "a", kind, "salt"), list(range(ANSWER_TOKENS + 5))
    if kind == RequestOutputKind.FINAL_ONLY:
        outputs = [output(tokens)]
    else:
        steps = range(len(tokens))
        outputs = [
            output([n] if kind == RequestOutputKind.DELTA else tokens[: n + 1]) for n in steps
        ]
    for told in outputs:
        one.take(told)
        assert (told.outputs[0].logprobs, told.outputs[0].cumulative_logprob) == (None, None)
    assert (one.prompt, one.answer) == ([1, 2, 3], tokens[:ANSWER_TOKENS])
    assert one.logprobs == [{token: -1.0} for token in one.answer]
    assert one.is_whole


def test_what_a_client_has_asked_for_itself_stays():
    one, told = LogprobRecorder(TICKET, "a", None, "salt"), output([1])
    one.take(told)
    assert told.outputs[0].logprobs
    assert not one.is_whole
