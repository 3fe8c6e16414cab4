"""Expected prefill time of a prompt on each server, from the text that the server holds."""

from dataclasses import dataclass

import numpy as np

from kvgraft.core.costs import Costs
from kvgraft.core.fingerprints import Fingerprints

# assumed until a server reports its own value
BYTES_PER_TOKEN = 4.0
# load cap: requests of a server as a multiple of the mean, plus one
IMBALANCE = 1.5
# minimum seconds of a prompt, because costs may be zero
TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Expected:
    """Expected prefill of one prompt by server; each array is float64 [servers].

    Attributes:
        prefix_tokens: tokens that the server holds as the beginning of a prompt.
        grafted_tokens: tokens that it holds elsewhere; it computes the others.
        prefill_s: seconds of this prompt's prefill.
    """

    prefix_tokens: np.ndarray
    grafted_tokens: np.ndarray
    prefill_s: np.ndarray


def expect(
    text: Fingerprints,
    known: np.ndarray,
    begun: np.ndarray,
    costs: Costs,
    *,
    work: float,
    bytes_per_token: float = BYTES_PER_TOKEN,
) -> Expected:
    """Return the expected prefill of a prompt on each server.

    Args:
        text: fingerprints of the prompt.
        known: bool [servers, n], whether a server holds a fingerprint.
        begun: bool [servers, n], the same for `Fingerprints.chain`: held as the beginning of a
            prompt.
        costs: costs of the model on its machine.
        work: share of the grafted tokens that is recomputed.
        bytes_per_token: mean bytes of text per token.
    """
    num_tokens = text.num_bytes / bytes_per_token
    # the beginning must have no gap, because a single bit may be set by a collision
    beginning = np.logical_and.accumulate(known & begun, axis=1)
    # number of fingerprints in the beginning
    last = beginning.sum(axis=1)
    prefix = np.append(0, text.places)[last] / bytes_per_token

    behind = np.arange(known.shape[1]) >= last[:, None]
    grafted = text.known_bytes(known & behind) / bytes_per_token
    new = np.maximum(num_tokens - prefix - grafted, 1.0)
    # query-key pairs of all tokens after the prefix
    pairs = (num_tokens**2 - prefix**2) / 2
    share = grafted / (grafted + new)

    full = costs.computing(new + grafted, pairs)
    reuse = costs.grafting(new, pairs * (1 - share), grafted, pairs * share, work)
    return Expected(prefix, grafted, np.where(grafted > 0, np.minimum(full, reuse), full))


def with_delays(prefill_s: np.ndarray, waiting_s: np.ndarray) -> np.ndarray:
    """Return the prefill seconds of a prompt with those by which it delays other prompts.

    If prompts wait even at the least busy server, this prompt's prefill delays them, too. Its
    seconds then count once more for each of them, which favours servers that know more of its text,
    and so the throughput.

    Args:
        prefill_s: seconds of this prompt's prefill by server, float64 [servers].
        waiting_s: seconds of prefill of the prompts that wait there, float64 [servers].
    """
    delayed: np.ndarray = prefill_s * (1.0 + waiting_s.min() / max(prefill_s.mean(), TINY))
    return delayed


def is_overloaded(loads: np.ndarray, imbalance: float = IMBALANCE) -> np.ndarray:
    """Return which servers have more running requests than the load cap, bool [servers]."""
    found: np.ndarray = loads > imbalance * loads.mean() + 1
    return found
