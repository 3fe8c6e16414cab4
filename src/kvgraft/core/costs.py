"""Seconds of copying, recovery and prefill, of one model on one machine."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

# Setting of costs that are measured when a server or an engine starts.
MEASURED = "measured"


@dataclass(frozen=True)
class Costs:
    """Costs of a model on a machine, in seconds. The defaults count tokens instead of seconds.

    Attributes:
        pass_s: seconds of a pass through all layers, for any number of tokens.
        token_s: seconds of each token computed in it.
        pair_s: seconds of each pair of a computed token and a key that it sees.
        copy_s: seconds of each token copied and aligned.

    Raises:
        ValueError: one of them is negative or no number.
    """

    pass_s: float = 32.0
    token_s: float = 1.0
    pair_s: float = 0.0
    copy_s: float = 0.02

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < float("inf")
            ):
                raise ValueError(
                    f"{item.name} must be a number of seconds of at least 0, got {value!r}"
                )

    def computing(self, num_tokens: np.ndarray | float, num_pairs: np.ndarray | int) -> np.ndarray:
        """Seconds of one pass; arguments of any shape."""
        found: np.ndarray = (
            self.pass_s + self.token_s * num_tokens + self.pair_s * np.asarray(num_pairs)
        )
        return found

    def grafting(
        self,
        new: np.ndarray | int,
        new_pairs: np.ndarray,
        grafted: np.ndarray | int,
        grafted_pairs: np.ndarray,
        work: float,
    ) -> np.ndarray:
        """Seconds of a prompt with `new` new and `grafted` grafted tokens.

        Grafted tokens are copied. A share `work` of them, and of their pairs, is computed with the
        new tokens. Recovery takes one pass more than prefill.
        """
        recovered = self.computing(new + work * grafted, new_pairs + work * grafted_pairs)
        found: np.ndarray = recovered + self.pass_s + self.copy_s * grafted
        return found

    def save(self, path: Path) -> None:
        """Write the costs as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Costs":
        """Read a file that `save` has written.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds something else; the message names the file.
        """
        try:
            given = json.loads(Path(path).read_text())
            if not isinstance(given, dict) or given.keys() != {item.name for item in fields(cls)}:
                raise ValueError(f"it must hold {', '.join(item.name for item in fields(cls))}")
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{path} holds no costs: {error}") from error


# Costs by numbers of tokens alone.
TOKENS = Costs()


def find_costs(given: str | Path | Costs, measure: Callable[[], Costs]) -> Costs:
    """Return costs from an argument: `Costs`, the path of a file, `measured`, or `tokens`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds something else.
    """
    if isinstance(given, Costs):
        return given
    named = {MEASURED: measure, "tokens": lambda: TOKENS}
    return named[str(given)]() if str(given) in named else Costs.load(given)


def count_pairs(first: np.ndarray | int, stop: np.ndarray | int) -> np.ndarray:
    """Number of (token, key) pairs of the tokens [first, stop) of a prompt."""
    first, stop = np.asarray(first, np.int64), np.asarray(stop, np.int64)
    found: np.ndarray = (stop * (stop + 1) - first * (first + 1)) // 2
    return found
