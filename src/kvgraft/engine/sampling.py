"""Sampling of the next token from logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this, float32 scores overflow. 0 is greedy.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request.

    Attributes:
        max_tokens: tokens generated at most.
        temperature: 0 is greedy.
        top_p: keep the smallest set of most likely tokens with at least this probability.
        top_k: keep this number of most likely tokens; 0 keeps all.
        seed: equal seeds draw equal tokens from equal logits; None draws differently every time.
        stop: generated text ends before any of these strings.
        ignore_eos: continue to max_tokens after an end-of-sequence token.

    Raises:
        ValueError: a value is out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature != 0 and not _MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 or at least {_MIN_TEMPERATURE}, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be None or in [0, 2**63), got {self.seed}")
        if not isinstance(self.stop, tuple) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise ValueError(f"stop must be a tuple of non-empty strings, got {self.stop!r}")

    @property
    def is_greedy(self) -> bool:
        """Return whether sampling takes the most likely token."""
        return self.temperature == 0


class Sampler:
    """Chooses the tokens of one request. Its random state is its own, so results do not depend on
    the batch."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def sample(self, logits: Tensor, best: int | None = None) -> int:
        """Logits [V] on any device -> a token id: greedy, or a draw in float32 after top-k and
        top-p.

        Args:
            best: the most likely token, if it is known.
        """
        params = self.params
        if params.is_greedy:
            return int(logits.argmax()) if best is None else best

        scores = logits.float().cpu()
        tokens = None  # ids of the scores, most likely first; None: scores lie in vocabulary order
        if params.top_k or params.top_p < 1:
            scores, tokens = scores.topk(min(params.top_k or len(scores), len(scores)))

        probabilities = (scores / params.temperature).softmax(dim=0)
        if params.top_p < 1:
            before = probabilities.cumsum(dim=0) - probabilities
            probabilities = probabilities[before < params.top_p]

        choice = int(torch.multinomial(probabilities, 1, generator=self._generator))
        return choice if tokens is None else int(tokens[choice])


def most_likely(
    logits: Tensor | Sequence[Tensor], samplers: Sequence[Sampler]
) -> list[int] | list[None]:
    """Return the most likely token of each row of logits [b, V], in one read from the device; None
    for each row if no sampler needs it."""
    if not any(sampler.params.is_greedy for sampler in samplers):
        return [None] * len(samplers)
    if not isinstance(logits, Tensor):
        logits = logits[0][None] if len(logits) == 1 else torch.stack(tuple(logits))
    found: list[int] = logits.argmax(dim=-1).tolist()
    return found
