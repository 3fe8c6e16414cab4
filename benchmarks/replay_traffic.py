"""Sends the same sessions to plain vLLM and to ours, in turn, and keeps what became of every
request."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from load import Client, Outcome
from scenarios import SETTLE_S, OnProgress, Pair
from sessions import SessionShape, bundled_words, make_sessions
from traces import Body, EncodeBody, OwnAnswers, Session
from workload import arrivals

ANSWERS = ("recorded", "own")
WARM_UP = SessionShape(
    turns=2,
    known_share=1.0,
    system_tokens=32,
    tools_tokens=32,
    answer_tokens=16,
    documents=4,
    document_tokens=150,
)


@dataclass(frozen=True)
class Sending:
    """How sessions are sent.

    Attributes:
        max_tokens: of every answer, which has its full length.
        max_model_len: a session ends before the first request that is longer, with its answer.
        concurrency: sessions under way at most; 0 is one, or as many as arrive where there is a
            rate.
        rate: sessions that begin per second; 0 begins each as soon as `concurrency` allows. The
            requests of a session wait for each other.
        batch: sessions that run against one server before the other's turn; 0 is as many as run at
            once, or half of all where there is a rate. Where neither is given and one session runs
            at a time, the servers take turns with every request, so that both have the same moments
            of a machine that is not always equally fast.
        shared: sessions share one namespace instead of having one each.
        own_answers: later requests hold what the server answered instead of what was recorded, so
            that the two servers get different prompts.
        chat: send messages to /chat/completions instead of their tokens to /completions.
        seed: of arrivals.

    Raises:
        ValueError: a value out of its range.
    """

    max_tokens: int = 16
    max_model_len: int = 65536
    concurrency: int = 0
    rate: float = 0.0
    batch: int = 0
    shared: bool = False
    own_answers: bool = False
    chat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {
            "max_tokens": 1,
            "max_model_len": 2,
            "concurrency": 0,
            "rate": 0,
            "batch": 0,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def alternates(self) -> bool:
        """Whether the servers take turns with every request."""
        return self.concurrency <= 1 and not self.rate and not self.batch

    def namespace_of(self, number: int) -> str:
        """Where a session's text is kept."""
        return "shared" if self.shared else f"session {number}"

    def batch_of(self, count: int) -> int:
        """Sessions of a batch, of `count` in all."""
        return self.batch or (-(-count // 2) if self.rate else max(1, self.concurrency))

    def slots(self) -> AbstractAsyncContextManager[object]:
        """What a session holds while it is under way."""
        return (
            nullcontext()
            if self.rate and not self.concurrency
            else asyncio.Semaphore(max(1, self.concurrency))
        )


class Script:
    """What a session sends, request by request; made before any time is taken."""

    def __init__(self, session: Session, encode: EncodeBody) -> None:
        self.session, self.encode = session, encode
        self._tokens = [np.array(encode(turn.body), np.int32) for turn in session.turns]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each prompt as recorded."""
        return [len(tokens) for tokens in self._tokens]

    def request(self, number: int, own: OwnAnswers | None) -> tuple[Body, list[int]]:
        """(body, token ids) of a request, with own answers if there are any."""
        body = self.session.turns[number].body
        if own is None:
            return body, self._tokens[number].tolist()
        body = own.body(body)
        return body, self.encode(body)


@dataclass(frozen=True)
class Run:
    """A session on one server: its answers, and why it ended before its last request, if it did."""

    outcomes: tuple[Outcome, ...]
    ended: str | None

    @property
    def answered(self) -> tuple[Outcome, ...]:
        """All but a last one that failed."""
        return tuple(o for o in self.outcomes if o.first_s is not None and o.error is None)


@dataclass(frozen=True)
class Replayed:
    """A session on both servers."""

    name: str
    kind: str
    requests: int
    plain: Run
    ours: Run

    @property
    def pairs(self) -> list[tuple[Outcome, Outcome]]:
        """(plain, ours) of the requests that both answered, from the first one on."""
        return list(zip(self.plain.answered, self.ours.answered, strict=False))


def check_bodies(sessions: Sequence[Session], sending: Sending) -> None:
    """Raise ValueError if a session cannot be sent like that."""
    for session in sessions if sending.chat or sending.own_answers else ():
        if any("messages" not in turn.body for turn in session.turns):
            raise ValueError(
                f"{session.name}: --chat and own answers need bodies with messages, not prompts"
            )


async def replay(
    pair: Pair, scripts: Sequence[Script], sending: Sending, on_progress: OnProgress
) -> list[Replayed]:
    """All sessions on both servers, ours first in every other one, or in every other request.

    Raises:
        RuntimeError: a server did not answer the session that warms it up.
    """
    await _warm_up(pair, scripts[0].encode, sending)
    runs = await (_by_request if sending.alternates else _by_batch)(
        pair, scripts, sending, on_progress
    )
    return [
        Replayed(
            s.session.name, s.session.kind, len(s.lengths), runs[pair.plain][n], runs[pair.ours][n]
        )
        for n, s in enumerate(scripts)
    ]


async def _by_request(
    pair: Pair, scripts: Sequence[Script], sending: Sending, on_progress: OnProgress
) -> dict[Client, dict[int, Run]]:
    """One session at a time, request by request, ours first with every other one."""
    runs: dict[Client, dict[int, Run]] = {pair.plain: {}, pair.ours: {}}
    for number, script in enumerate(scripts):
        namespace = sending.namespace_of(number)
        both = {client: SessionRun(client, script, sending, namespace) for client in runs}
        for request in range(len(script.session.turns)):
            for client in pair.in_turn(number + request):
                await both[client].next_request()
        for client, session in both.items():
            runs[client][number] = session.so_far
        on_progress(number + 1, len(scripts))
    return runs


async def _by_batch(
    pair: Pair, scripts: Sequence[Script], sending: Sending, on_progress: OnProgress
) -> dict[Client, dict[int, Run]]:
    """Batch by batch, ours first in every other one."""
    runs: dict[Client, dict[int, Run]] = {pair.plain: {}, pair.ours: {}}
    total, numbered, size = (
        2 * len(scripts),
        list(enumerate(scripts)),
        sending.batch_of(len(scripts)),
    )
    for number in range(-(-len(scripts) // size)):
        batch = numbered[number * size : (number + 1) * size]
        for client in pair.in_turn(number):
            await asyncio.sleep(SETTLE_S)
            done = runs[client]
            await _run_batch(
                client,
                batch,
                sending,
                done,
                lambda: on_progress(sum(map(len, runs.values())), total),
            )
    return runs


async def _run_batch(
    client: Client,
    batch: Sequence[tuple[int, Script]],
    sending: Sending,
    done: dict[int, Run],
    on_done: Callable[[], object],
) -> None:
    loop = asyncio.get_running_loop()
    slots, begin = sending.slots(), loop.time()

    async def run(number: int, script: Script, at: float) -> None:
        await asyncio.sleep(begin + at - loop.time())
        async with slots:
            done[number] = await run_session(client, script, sending, sending.namespace_of(number))
        on_done()

    times = arrivals(len(batch), sending.rate, sending.seed + batch[0][0])
    async with asyncio.TaskGroup() as group:
        for (number, script), at in zip(batch, times, strict=True):
            group.create_task(run(number, script, at))


class SessionRun:
    """A session under way on one server."""

    def __init__(self, client: Client, script: Script, sending: Sending, namespace: str) -> None:
        self._client, self._script, self._sending, self._namespace = (
            client,
            script,
            sending,
            namespace,
        )
        self._own = OwnAnswers() if sending.own_answers else None
        self._outcomes: list[Outcome] = []
        self._ended: str | None = None

    @property
    def so_far(self) -> Run:
        """What became of its requests."""
        return Run(tuple(self._outcomes), self._ended)

    async def next_request(self) -> bool:
        """Send the next one; False if there is none: the last one failed, or this one does not fit
        into the server's context."""
        number = len(self._outcomes)
        if self._ended or number == len(self._script.session.turns):
            return False
        body, tokens = self._script.request(number, self._own)
        sending = self._sending
        if len(tokens) + sending.max_tokens > sending.max_model_len:
            needed = f"{len(tokens)} tokens and {sending.max_tokens} to answer"
            self._ended = f"request {number + 1} has {needed}, the context {sending.max_model_len}"
            return False
        asked = _messages(body) if sending.chat else {"prompt": tokens}
        extra = {"cache_salt": self._namespace}
        outcome = await self._client.send(
            self._script.session.kind, asked, sending.max_tokens, extra
        )
        self._outcomes.append(outcome)
        if outcome.error or outcome.first_s is None:
            self._ended = f"request {number + 1} failed: {outcome.error or 'no token'}"
        elif self._own:
            self._own.answered(outcome.text)
        return True


async def run_session(client: Client, script: Script, sending: Sending, namespace: str) -> Run:
    """One session, request by request, up to the first that fails or does not fit into the server's
    context."""
    session = SessionRun(client, script, sending, namespace)
    while await session.next_request():
        pass
    return session.so_far


def _messages(body: Body) -> dict[str, Any]:
    """What a chat request takes over from a body; its tools are text of the prompt and nothing
    else."""
    tools = {"tools": body["tools"], "tool_choice": "none"} if body.get("tools") else {}
    return {"messages": body["messages"], **tools}


async def _warm_up(pair: Pair, encode: EncodeBody, sending: Sending) -> None:
    """A session of two turns for both, so that nobody's first prompt and first graft find a cold
    program."""
    [session] = make_sessions("reordered", WARM_UP, 1, bundled_words(), "warm-up")
    script = Script(session, encode)
    for client in (pair.plain, pair.ours):
        run = await run_session(client, script, replace(sending, own_answers=False), "warm-up")
        if run.ended and len(run.outcomes) > len(run.answered):
            raise RuntimeError(f"{client.url}: {run.ended}")
