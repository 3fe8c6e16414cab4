"""Distance of a policy from full recomputation along full's own answer, token by token.

Its unit is order noise: the distance of full itself when the segments are in another order.

If a policy's answer equals full's, its distributions are already known. Otherwise full's answer is
forced, and the model runs again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Generic, TypeVar

from torch import Tensor

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.guard.distances import along

# tokens of full's answer that are compared
ANSWER_TOKENS = 32
# name in place of a policy
ORDER_NOISE = "order noise"
# number of other orders of a prompt
ORDERS = 2
# attempts to draw another order
TRIES = 100

Part = TypeVar("Part")
Places = TypeVar("Places", Tensor, Sequence[Mapping[int, float]])


@dataclass(frozen=True)
class ScoredPlaces(Generic[Places]):
    """An answer, and the model's next-token distribution at each of its places.

    Attributes:
        tokens: token ids of the answer.
        places: logits [n, V], or the log-probabilities of the most likely tokens.
    """

    tokens: tuple[int, ...]
    places: Places


def distances(
    ours: ScoredPlaces[Places],
    truth: ScoredPlaces[Places],
    give: Callable[[tuple[int, ...]], ScoredPlaces[Places]],
    measure: Callable[[Places, Places, Sequence[int]], dict[str, float]],
) -> dict[str, float]:
    """Return the distances of `ours` along full's answer, `truth`.

    Args:
        give: asks again under our policy, with a forced answer.
        measure: computes the distances of places.

    Raises:
        ValueError: the forced answer was not followed.
    """
    answer = truth.tokens[:ANSWER_TOKENS]
    if not follows(ours.tokens, answer):
        ours = give(answer)
    if not follows(ours.tokens, answer):
        raise ValueError(f"the answer {list(answer)} was given, and {list(ours.tokens)} came back")
    return measure(ours.places[: len(answer)], truth.places[: len(answer)], answer)


def follows(tokens: Sequence[int], answer: Sequence[int]) -> bool:
    """Return whether these token ids begin with an answer."""
    return tuple(tokens[: len(answer)]) == tuple(answer)


def send(engine: Engine, request: Request) -> Result:
    """Return the native engine's answer. Documents of policies that keep a part of them are
    computed first.

    Raises:
        ValueError: the request cannot be answered; the message says why.
    """
    return send_all(engine, [request])[0]


def send_all(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """Return the native engine's answers to requests that run at the same time; see `send`."""
    for request in requests:
        engine.read_documents(request)
    results = engine.generate(requests)
    for result in results:
        if result.error:
            raise ValueError(f"the engine cannot answer a prompt: {result.error}")
    return results


def send_forced(
    engine: Engine, requests: Sequence[Request], answer: tuple[int, ...]
) -> list[Result]:
    """Return the native engine's results for these requests with a forced answer. They are decoded
    together.

    Raises:
        ValueError: see `send`.
    """
    sampling = SamplingParams(max_tokens=len(answer), ignore_eos=True)
    forced = [replace(request, sampling=sampling, forced_output=answer) for request in requests]
    return send_all(engine, forced)


def native_distances(
    engine: Engine, request: Request, ours: Result, truth: Result
) -> dict[str, float]:
    """Return the distances of the native engine's answer from that of `full`. Both need logits.

    Raises:
        ValueError: see `send`; or an answer has no logits.
    """

    def give(answer: tuple[int, ...]) -> ScoredPlaces[Tensor]:
        return _scored(send_forced(engine, [request], answer)[0])

    return distances(_scored(ours), _scored(truth), give, along)


def other_orders(
    parts: Sequence[Part], movable: Sequence[int], seed: str
) -> list[tuple[Part, ...]]:
    """Return up to two other orders of the parts at the movable places, drawn by `seed`. All other
    parts stay.
    """
    rng, found = Random(seed), [tuple(parts)]  # noqa: S311
    for _ in range(TRIES):
        order = list(parts)
        for place, source in zip(movable, rng.sample(movable, len(movable)), strict=True):
            order[place] = parts[source]
        if tuple(order) not in found:
            found.append(tuple(order))
        if len(found) > ORDERS:
            break
    return found[1:]


def _scored(result: Result) -> ScoredPlaces[Tensor]:
    if result.logits is None:
        raise ValueError("the answer needs its logits")
    return ScoredPlaces(tuple(result.token_ids), result.logits)
