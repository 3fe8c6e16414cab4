"""How long a prompt would take to its first token on each server, by what these hold and by what
waits there."""

from dataclasses import dataclass

import numpy as np

from kvgraft.prefill.costs import Costs
from kvgraft.segments.fingerprints import Fingerprints

BYTES_PER_TOKEN = 4.0  # until a server says otherwise


@dataclass(frozen=True, eq=False)
class Expected:
    """Of one prompt, by server: float64 [servers] each.

    Attributes:
        prefix_tokens, grafted_tokens: that would be there, as a beginning and elsewhere; the others
            are computed.
        prefill_s: seconds of its own prefill.
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
    """What a prompt would take.

    Args:
        known: bool [servers, n], which fingerprints are known where.
        begun: the same of `Fingerprints.chain`: what was read there as a beginning.
        costs: of the model on its machine.
        work: share of what is grafted that is computed all the same.
    """
    num_tokens = text.num_bytes / bytes_per_token
    # no gap: one bit that is set by chance says little
    beginning = np.logical_and.accumulate(known & begun, axis=1)
    last = beginning.sum(axis=1)  # how many fingerprints the beginning has
    prefix = np.append(0, text.places)[last] / bytes_per_token
    behind = np.arange(known.shape[1]) >= last[:, None]
    grafted = text.known_bytes(known & behind) / bytes_per_token
    new = np.maximum(num_tokens - prefix - grafted, 1.0)
    pairs = (num_tokens**2 - prefix**2) / 2  # of all that is not there as a beginning
    share = grafted / (grafted + new)
    full = costs.computing(new + grafted, pairs)
    reuse = costs.grafting(new, pairs * (1 - share), grafted, pairs * share, work)
    return Expected(prefix, grafted, np.where(grafted > 0, np.minimum(full, reuse), full))
