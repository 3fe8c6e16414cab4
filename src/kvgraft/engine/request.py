"""Requests, results and reports of the native engine."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import numpy as np
from torch import Tensor

from kvgraft.core.prompt import Part
from kvgraft.core.report import PrefillReport
from kvgraft.decode.flow import Flow
from kvgraft.engine.sampling import SamplingParams
from kvgraft.prefill.context import Policy


class RequestError(ValueError):
    """A request that can never be served as it stands; the message says what is allowed."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
        prompt: text, parts (`str` and reusable `Segment`), or token ids, which are used unchanged.
        policy: how reused KV is recovered: a name, `name:option=value,...`, or a `Policy`; None is
            the engine's own.
        sampling: length, temperature, stop strings and other parameters of generation.
        namespace: isolation key. A request finds only content of its own namespace and of the
            shared ones.
        remember: False leaves nothing of this request in the caches for later requests.
        return_logits: keep in the result the float32 logits from which each token of the answer was
            chosen.
        flow: how decode steps attend: `quest`, `quest:topk_blocks=64`, `my.py`, or a `Flow`;
            `dense` attends to all tokens; None is the engine's own.
        match: `exact` or `similar`, which grafts near-duplicates, too; None is the engine's own.
        forced_output: token ids with which the answer begins, whatever the model would choose. They
            are computed one by one like any answer, and under the flow. The policy does not see
            them.
        shared_namespaces: other namespaces whose text may be grafted, or kept in part if their
            documents were read on their own. This request leaves nothing in them. If several
            namespaces know a text, the longest piece wins, then `namespace`, then this order.
    """

    prompt: str | Sequence[Part] | Sequence[int]
    policy: str | Policy | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = "default"
    remember: bool = True
    return_logits: bool = False
    flow: str | Flow | None = None
    match: Literal["exact", "similar"] | None = None
    forced_output: Sequence[int] = ()
    shared_namespaces: Sequence[str] = ()


# A text or a list of token ids is a request with default settings.
Prompt = Request | str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]


def as_requests(given: Prompts) -> list[Request]:
    """Return the requests that are meant: one for a prompt by itself, or one for each item of a
    sequence of prompts.

    Raises:
        RequestError: an item is no prompt.
    """
    if (
        isinstance(given, Request | str | bytes | Mapping)
        or not isinstance(given, Iterable)
        or _are_ids(given)
    ):
        return [as_request(given)]
    return [as_request(one, number) for number, one in enumerate(given)]


def as_request(given: Any, number: int = 0) -> Request:
    """Return a prompt as a Request; RequestError, which names its number, if it is no prompt."""
    if isinstance(given, Request):
        return given
    if isinstance(given, str):
        return Request(given)
    if _are_ids(given):
        return Request([int(token) for token in given])
    kind = type(given).__name__
    raise RequestError(
        f"request {number} is of type {kind}: must be text, token ids or a Request (parts: "
        "Request([...]))"
    )


def _are_ids(given: Any) -> bool:
    """Return whether this is a non-empty sequence of integers."""
    is_sequence = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str | bytes)
    return is_sequence and len(given) > 0 and all(isinstance(token, Integral) for token in given)


@dataclass
class Report(PrefillReport):
    """Outcome, timing and work of one request. Its stages are queue, match, align, dense, select,
    sparse.

    Attributes:
        ttft_s: seconds from submission to the first token.
        flops: floating-point operations of the prompt's prefill, without embedding and output
            layer. `ffn_flops` are those in FFNs, the others are in attention and its projections.
        kv_bytes: peak memory of the prompt's keys and values, including room for the answer.
        counts: further counters, such as `promoted_heads`.
    """

    ttft_s: float = 0.0
    flops: int = 0
    ffn_flops: int = 0
    kv_bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Result:
    """The answer to one request. `finish_reason` is `length`, `eos`, `stop` or `error` (then
    `error` says why); `logits` are float32 [tokens of the answer, V], if they were asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str
    report: Report
    logits: Tensor | None = None
    error: str | None = None

    @property
    def first_logits(self) -> Tensor | None:
        """Logits of the first token, float32 [V]."""
        return None if self.logits is None else self.logits[0]


@dataclass(frozen=True)
class Event:
    """One step of a streamed answer: its new final text. The last event of a request has its
    `result`."""

    index: int
    text: str
    result: Result | None = None


def check_shared(request: Request) -> Sequence[str]:
    """Return the request's `shared_namespaces`; ValueError unless they are distinct and other than
    its own."""
    names = request.shared_namespaces
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"shared_namespaces must be a sequence of strings, got {names!r}")
    if len({request.namespace, *names}) <= len(names):
        raise ValueError(
            f"shared_namespaces must be distinct and others than {request.namespace!r}, got "
            f"{list(names)}"
        )
    return names


def check_forced_output(request: Request, vocab_size: int) -> None:
    """Raise ValueError unless the request's forced output is valid token ids within max_tokens."""
    answer, most = request.forced_output, request.sampling.max_tokens
    if isinstance(answer, str) or not all(
        type(token) is int and 0 <= token < vocab_size for token in answer
    ):
        raise ValueError(
            f"forced_output must be token ids in 0..{vocab_size - 1}, got {str(answer)[:80]}"
        )
    if len(answer) > most:
        raise ValueError(f"forced_output has {len(answer)} tokens, but max_tokens is {most}")
