"""Scoring of the native engine's answers with exact KV, as the guard of a server does it."""

from dataclasses import replace

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.guard.distances import along
from kvgraft.guard.guard import ANSWER_TOKENS


def score(engine: Engine, request: Request, result: Result) -> dict[str, float]:
    """Return an answer's distances from exact KV along its first 128 tokens, for `Guard.add`.

    The prompt is computed exactly in the request's namespace. Later requests find it there, unless
    the request is not to be remembered.

    Args:
        result: result of the request, which asked for `return_logits`.

    Returns:
        The distances of `distances.along`.

    Raises:
        ValueError: there is no answer, it has no logits, or the engine cannot compute the prompt
            exactly.
    """
    if result.logits is None or not result.token_ids:
        raise ValueError("the answer has no logits: ask for return_logits")

    answer = result.token_ids[:ANSWER_TOKENS]
    sampling = SamplingParams(max_tokens=len(answer), ignore_eos=True)
    [exact] = engine.generate(
        [
            replace(
                request, policy="full", sampling=sampling, forced_output=answer, return_logits=True
            )
        ]
    )

    if exact.logits is None:
        raise ValueError(f"the prompt cannot be computed exactly: {exact.error}")
    return along(result.logits[: len(answer)], exact.logits[: len(answer)], answer)
