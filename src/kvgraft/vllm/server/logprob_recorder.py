"""What a watched request says about its answer while it runs: tokens, and how likely the model
found them.

vLLM is asked for the log-probabilities of the most likely tokens, and what it says of them stays
here."""

from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind

from kvgraft.guard.guard import ANSWER_TOKENS, Ticket

NUM_LOGPROBS = 20  # most likely tokens of each place
Logprobs = dict[int, float]  # of one place, by token


@dataclass
class LogprobRecorder:
    """One request.

    Attributes:
        kind: how vLLM's outputs follow each other; None: vLLM was not asked for log-probabilities
            on our behalf.
        cache_salt, lora_request: under which it runs, and `request_id` as the engine knows it, once
            it is admitted.
        found: its distances from exact KV, when they are known.
        prompt: its tokens. `answer`: those that it has had for an answer, and `logprobs` of each
            place.
    """

    ticket: Ticket
    tenant: str
    kind: RequestOutputKind | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    request_id: str = ""
    found: dict[str, float] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def take(self, output: Any) -> None:
        """Note an output of vLLM, and remove what its client has not asked for."""
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
        """Whether there is an answer, and something is known of all its tokens."""
        return self.cache_salt is not None and 0 < len(self.answer) == len(self.logprobs)


def places(logprobs: Any, most: int | None = None) -> list[Logprobs]:
    """What vLLM says of the first places of an answer, of the tokens that it names."""
    named = list(logprobs or ())[:most]
    return [{int(token): float(one.logprob) for token, one in place.items()} for place in named]


def can_be_watched(params: Any) -> bool:
    """Whether a request with these sampling parameters gives one answer, and has not asked for
    log-probabilities itself."""
    return params.n == 1 and params.logprobs is None and params.logprob_token_ids is None


def watched(params: Any) -> Any:
    """These sampling parameters, asking for log-probabilities."""
    params = params.clone()
    params.logprobs = NUM_LOGPROBS
    return params
