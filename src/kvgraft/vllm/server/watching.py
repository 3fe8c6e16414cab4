"""What a watched request says about its answer while it runs: tokens, and how likely the model found them.

vLLM is asked for the log-probabilities of the most likely tokens, and what it says of them stays here.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind

from kvgraft.guard.guard import ANSWER_TOKENS, Ticket

TOLD = 20  # most likely tokens of each place
Told = dict[int, float]  # log-probabilities, by token


@dataclass
class Watched:
    """One request.

    Attributes:
        longest: prompt and answer that can be scored.
        kind: how vLLM's outputs follow each other.
        salt: the cache key under which it runs, and `request_id` as the engine knows it, when it has been admitted.
        found: its distances from exact KV, when they are known.
        prompt: its tokens. `answer`: those that it has had for an answer, and `told` about each of them.
    """

    ticket: Ticket
    tenant: str
    longest: int
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    salt: str | None = None
    request_id: str = ""
    found: dict[str, float] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)

    def take(self, output: Any) -> None:
        """Note an output of vLLM, and remove what its client has not asked for."""
        if not self.ticket.is_watched:
            return
        first = output.outputs[0]
        if self.kind != RequestOutputKind.DELTA:
            self.answer, self.told = [], []
        self.prompt = list(output.prompt_token_ids or self.prompt)
        room = max(0, min(ANSWER_TOKENS, self.longest - len(self.prompt)) - len(self.answer))
        self.answer += list(first.token_ids)[:room]
        self.told += [told_of(place) for place in list(first.logprobs or ())[:room]]
        first.logprobs = first.cumulative_logprob = None

    @property
    def is_whole(self) -> bool:
        """Whether it can be scored: there is an answer, and something is known of all its tokens."""
        return self.salt is not None and 0 < len(self.answer) == len(self.told)


def told_of(place: Any) -> Told:
    """What vLLM says of a place, of the tokens that it names."""
    return {int(token): float(one.logprob) for token, one in place.items()}


def can_be_watched(params: Any) -> bool:
    """Whether a request with these sampling parameters gives one answer, and has not asked for log-probabilities
    itself."""
    return params.n == 1 and params.logprobs is None and params.logprob_token_ids is None


def watched(params: Any) -> Any:
    """These sampling parameters, asking for what is told of each place."""
    params = params.clone()
    params.logprobs = TOLD
    return params
