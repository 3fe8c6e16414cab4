"""Record of a watched request's answer: its tokens and their log-probabilities.

vLLM computes the log-probabilities of the most likely tokens on the guard's behalf. The client does
not receive them.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind

from kvgraft.guard.guard import ANSWER_TOKENS, Ticket

# number of most likely tokens at each position of the answer
NUM_LOGPROBS = 20
# log-probabilities of one position, by token id
Logprobs = dict[int, float]


@dataclass
class LogprobRecorder:
    """Record of one request.

    Attributes:
        ticket: the guard's ticket of the request.
        tenant: name of the tenant.
        kind: vLLM's output kind (delta, cumulative or final); None: no log-probabilities were
            requested on the guard's behalf, and nothing is recorded.
        cache_salt: cache key of the request, once it is admitted.
        lora_request: its adapter, once it is admitted.
        engine: index of its engine, once it is admitted; None if there is one only.
        request_id: its id in the engine, once it is admitted.
        found: the answer's distances from exact KV, once they are known.
        prompt: token ids.
        answer: its first token ids, at most ANSWER_TOKENS.
        logprobs: of each position of `answer`.
    """

    ticket: Ticket
    tenant: str
    kind: RequestOutputKind | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    engine: int | None = None
    request_id: str = ""
    found: dict[str, float] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def take(self, output: Any) -> None:
        """Record an output of vLLM, and remove the log-probabilities that the client did not ask
        for."""
        if self.kind is None:
            return

        first = output.outputs[0]
        if self.kind != RequestOutputKind.DELTA:
            self.answer, self.logprobs = [], []
        self.prompt = self.prompt or list(output.prompt_token_ids or ())

        room = ANSWER_TOKENS - len(self.answer)
        self.answer += list(first.token_ids)[:room]
        self.logprobs += places(first.logprobs, room)

        first.logprobs = first.cumulative_logprob = None

    @property
    def is_whole(self) -> bool:
        """Return whether there is an answer, with log-probabilities for all its tokens."""
        return self.cache_salt is not None and 0 < len(self.answer) == len(self.logprobs)


def places(logprobs: Any, most: int | None = None) -> list[Logprobs]:
    """Convert vLLM's log-probabilities of the first positions of an answer, by token id.

    Args:
        most: maximum number of positions; None: all.
    """
    named = list(logprobs or ())[:most]
    return [{int(token): float(one.logprob) for token, one in place.items()} for place in named]


def can_be_watched(params: Any) -> bool:
    """Return whether the guard can score a request with these sampling parameters.

    The request must give one answer, and must not ask for log-probabilities itself.
    """
    return params.n == 1 and params.logprobs is None and params.logprob_token_ids is None


def watched(params: Any) -> Any:
    """Return a copy of sampling parameters that requests NUM_LOGPROBS log-probabilities per
    token."""
    params = params.clone()
    params.logprobs = NUM_LOGPROBS
    return params
