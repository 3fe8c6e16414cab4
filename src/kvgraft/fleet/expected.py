"""Expected prefill time of a prompt on each server, from the text that the server holds."""

from dataclasses import dataclass

import numpy as np

from kvgraft.core.costs import Costs
from kvgraft.core.fingerprints import Fingerprints

# assumed until a server reports its own value
BYTES_PER_TOKEN = 4.0


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
