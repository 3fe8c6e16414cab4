"""Quality target of the operator, such as `flips=0.01` or `kl=0.05`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Measure = Literal["flips", "kl"]
# nats; the KL of an answer counts as at most this
CLIP = 1.0
# keys in the distances of an answer
NAMES = {"flips": "flips", "kl": "answer_kl"}


def as_share(measure: Measure, distances: Mapping[str, float]) -> float:
    """Return a measure of an answer as a share in [0, 1].

    Flips are a share already. The KL is clipped at CLIP and divided by it.

    Args:
        distances: those of `distances.along`.
    """
    value = distances[NAMES[measure]]
    return value if measure == "flips" else min(value, CLIP) / CLIP


@dataclass(frozen=True)
class Target:
    """Greatest acceptable mean of a measure.

    Attributes:
        measure: `flips` or `kl`.
        most: share of the tokens for flips; nats, clipped at CLIP, for KL.
    """

    measure: Measure
    most: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Parse `measure=number`.

        Raises:
            ValueError: the text is not a target; the message says what is allowed.
        """
        measure, equals, number = str(text).partition("=")
        try:
            most = float(number)
        except ValueError:
            most = 0.0
        if measure not in get_args(Measure) or not equals or not 0 < most < 1:
            raise ValueError(
                f"guard_target must be flips=SHARE or kl=NATS, above 0 and below 1, got {text!r}"
            )
        return cls(measure, most)  # type: ignore[arg-type]

    @property
    def share(self) -> float:
        """The target as a share in [0, 1], comparable with `as_share`."""
        return self.most if self.measure == "flips" else self.most / CLIP

    def __str__(self) -> str:
        return f"{self.measure}={self.most:g}"
