"""What quality an operator wants kept: `flips=0.01`, `kl=0.05`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Measure = Literal["flips", "kl"]
CLIP = 1.0  # nats: a greater KL of an answer counts as this
NAMES = {"flips": "flips", "kl": "answer_kl"}  # as in the distances of an answer


def as_share(measure: Measure, distances: Mapping[str, float]) -> float:
    """What is measured of an answer's distances (`distances.along`), in [0, 1]: flips, or KL of at
    most CLIP over that."""
    value = distances[NAMES[measure]]
    return value if measure == "flips" else min(value, CLIP) / CLIP


@dataclass(frozen=True)
class Target:
    """The greatest mean of a measure: flips as a share of the tokens, KL in nats, clipped at
    CLIP."""

    measure: Measure
    most: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """From `measure=number`; ValueError says what is allowed."""
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
        """As the values of `as_share`."""
        return self.most if self.measure == "flips" else self.most / CLIP

    def __str__(self) -> str:
        return f"{self.measure}={self.most:g}"
