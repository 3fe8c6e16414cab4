"""From figures to verdicts: what an interval says of a bar."""

from math import inf

import msgspec

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"


class Verdict(msgspec.Struct, frozen=True):
    """One claim about one condition.

    Attributes:
        value, low, high: the figure and its 95 % interval, NaN where it has none.
        bar: what it must be.
        verdict: `holds` if the whole interval is on the right side of the bar, `fails` if it is on
            the other, else `undecided`.
        count: what the figure is of: episodes, segments, proposals.
        details: figures beside it.
    """

    hypothesis: str
    claim: str
    condition: str
    variation: str
    value: float
    low: float
    high: float
    bar: str
    verdict: str
    count: int
    details: dict[str, float | str]


def judge(low: float, high: float, *, below: float = inf, above: float = -inf) -> str:
    """What an interval says of a bar."""
    if low > below or high < above:
        return FAILS
    return HOLDS if high <= below and low >= above else UNDECIDED
