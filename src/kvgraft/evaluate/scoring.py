"""How far a policy is from full recomputation along full's own answer, token by token, and how far
full itself is when the same text stands in another order: the unit.

An answer that is equal to full's has been asked for already; of any other, full's is given and
asked about."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Generic, TypeVar

from torch import Tensor

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.guard.distances import along

ANSWER_TOKENS = 32  # of full's answer that are looked at
ORDER_NOISE = "order noise"  # in the place of a policy
ORDERS = 2  # other orders of a prompt
TRIES = 100  # drawings until there is another one, if there is

Part = TypeVar("Part")
Places = TypeVar("Places", Tensor, Sequence[Mapping[int, float]])


@dataclass(frozen=True)
class ScoredPlaces(Generic[Places]):
    """An answer, and what the model thought of the next token at each of its places: logits [n, V],
    or the log-probabilities of the most likely tokens."""

    tokens: tuple[int, ...]
    places: Places


def distances(
    ours: ScoredPlaces[Places],
    truth: ScoredPlaces[Places],
    give: Callable[[tuple[int, ...]], ScoredPlaces[Places]],
    measure: Callable[[Places, Places, Sequence[int]], dict[str, float]],
) -> dict[str, float]:
    """Distances along full's answer, `truth`; `give` asks again under our policy, with an answer
    given.

    Raises:
        ValueError: the answer that was given has not been taken.
    """
    answer = truth.tokens[:ANSWER_TOKENS]
    if ours.tokens[: len(answer)] != answer:
        ours = give(answer)
    if ours.tokens[: len(answer)] != answer:
        raise ValueError(f"the answer {list(answer)} was given, and {list(ours.tokens)} came back")
    return measure(ours.places[: len(answer)], truth.places[: len(answer)], answer)


def send(engine: Engine, request: Request) -> Result:
    """The native engine's answer; documents of which a part is kept have been read before.

    Raises:
        ValueError: it cannot be answered; the message says why.
    """
    engine.read_documents(request)
    [result] = engine.generate([request])
    if result.error:
        raise ValueError(f"the engine cannot answer a prompt: {result.error}")
    return result


def native_distances(
    engine: Engine, request: Request, ours: Result, truth: Result
) -> dict[str, float]:
    """Distances of the native engine's answer to a request from that of `full`; both with their
    logits.

    Raises:
        ValueError: as `send`, or an answer has no logits.
    """

    def give(answer: tuple[int, ...]) -> ScoredPlaces[Tensor]:
        sampling = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        return _scored(send(engine, replace(request, sampling=sampling, forced_output=answer)))

    return distances(_scored(ours), _scored(truth), give, along)


def other_orders(
    parts: Sequence[Part], movable: Sequence[int], seed: str
) -> list[tuple[Part, ...]]:
    """At most two other orders of the parts at these places, drawn by `seed`; all else stays. None
    of one part."""
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
