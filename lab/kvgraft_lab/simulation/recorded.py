"""Recorded traffic for simulated fleets: prompts of a trace as fingerprints."""

import numpy as np

from kvgraft.core.expected_prefill import BYTES_PER_TOKEN
from kvgraft.core.fingerprints import Fingerprints
from kvgraft.core.keys import scope_digest
from kvgraft_lab.simulation.run import Arrival
from kvgraft_lab.traffic.trace import RequestTrace, TracedRequest

ANSWER_TOKENS = 128  # of a request whose answer is not recorded


def texts_of(trace: RequestTrace, *, per_session: bool = False) -> list[Fingerprints]:
    """Of each prompt: what a router sees of its text is taken from its tokens here,
    `BYTES_PER_TOKEN` bytes each.

    Args:
        per_session: every session has a scope of its own, so that nothing is reused from others.
    """
    return [_text_of(request, request.session if per_session else "") for request in trace.requests]


def replayed(
    trace: RequestTrace, texts: list[Fingerprints], rate: float | None, seed: int = 0
) -> list[Arrival]:
    """Its requests in their order. If all have a time they come at these, or, with a rate, so much
    faster or slower; otherwise as a Poisson process.

    Args:
        rate: requests a second.

    Raises:
        ValueError: neither the trace has times, nor is there a rate.
    """
    count = len(trace.requests)
    if trace.by_time and trace.requests[-1].timestamp != trace.requests[0].timestamp:
        times = np.array([request.timestamp for request in trace.requests], float)
        times -= times[0]
        times *= 1.0 if rate is None else count / (times[-1] * rate)
    elif rate is None:
        raise ValueError("the requests of this trace have no times: a rate is needed")
    else:
        times = np.random.default_rng(seed).exponential(1 / rate, count).cumsum()
    return [
        Arrival(at, text, len(request.answer) or request.num_answered or ANSWER_TOKENS)
        for at, text, request in zip(times.tolist(), texts, trace.requests, strict=True)
    ]


def _text_of(request: TracedRequest, namespace: str) -> Fingerprints:
    data = request.tokens.astype(f"<i{BYTES_PER_TOKEN:.0f}").tobytes()
    return Fingerprints.of(data, scope_digest("", namespace))
