"""The native engine's answers, scored with exact KV: the same as a server's guard does, as a
call."""

from dataclasses import replace

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.guard.distances import along
from kvgraft.guard.guard import ANSWER_TOKENS


def score(engine: Engine, request: Request, result: Result) -> dict[str, float]:
    """How far an answer is from exact KV along its first 128 tokens: `distances.along`, for
    `Guard.add`.

    The prompt is computed exactly in its own namespace, where it is known as such from then on
    (unless the request is not to be remembered).

    Args:
        result: that of the request, which asked for `return_logits`.

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
