"""Budget of recoveries in a step of vLLM, in seconds by measured costs."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvgraft.core.costs import TOKENS, Costs, count_pairs

# minimum seconds of a step; costs may be zero, and recoveries must still end
LEAST_S = 1e-9


@dataclass
class RecoveryBudget:
    """Time that a recovery may spend before other work of vLLM must run, and costs of its parts.

    Attributes:
        num_layers: layers of the model, which share the costs of a pass equally.
        pause: lets other work of vLLM run; there is new time when it returns.
        costs: costs of a pass through all layers.
        seconds: time left in this step, or tokens with `TOKENS`.
    """

    num_layers: int
    pause: Callable[[], None] = lambda: None
    costs: Costs = TOKENS
    seconds: float = float("inf")

    def spend(self, seconds: float) -> bool:
        """Spend time before a piece of work, pausing while none is left.

        Returns:
            True if other work of vLLM ran in between.
        """
        has_paused = self.seconds <= 0
        while self.seconds <= 0:
            self.pause()
        self.seconds -= seconds
        return has_paused

    def affords(self, seconds: float) -> bool:
        """Return True if this much time is left."""
        return seconds <= self.seconds

    def whole_pass(self, positions: Tensor) -> float:
        """Return the seconds of all layers for tokens at these positions, int64 [n] on the CPU."""
        num_pairs = int(positions.sum()) + positions.numel()
        return float(self.costs.computing(positions.numel(), num_pairs))

    def layer(self, positions: Tensor) -> float:
        """Return the seconds of one layer for tokens at these positions."""
        return self.whole_pass(positions) / self.num_layers

    def rows(self, count: int) -> float:
        """Return the seconds of one layer for `count` tokens, without the keys that they attend to.

        Their positions may be on a device, and reading them would wait for it.
        """
        return float(self.costs.computing(count, 0)) / self.num_layers

    def copy(self, num_tokens: int, num_layers: int = 1) -> float:
        """Return the seconds to copy and align `num_tokens` tokens in `num_layers` layers."""
        return self.costs.copy_s * num_tokens * num_layers / self.num_layers


def seconds_of_step(costs: Costs, num_tokens: int, prompt_tokens: int) -> float:
    """Return the seconds that vLLM needs for the last `num_tokens` tokens of a prompt."""
    pairs = count_pairs(max(0, prompt_tokens - num_tokens), prompt_tokens)
    return max(LEAST_S, float(costs.computing(num_tokens, pairs)))
