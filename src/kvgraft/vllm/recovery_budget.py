"""How far recoveries go in a step of vLLM, in seconds by measured costs."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvgraft.prefill.costs import TOKENS, Costs, count_pairs

LEAST_S = 1e-9  # of a step: costs may be zero, and recoveries must end all the same


@dataclass
class RecoveryBudget:
    """What a recovery may spend before other work of vLLM must come between, and what its parts
    cost.

    Attributes:
        num_layers: of the model, which share the costs of a pass.
        pause: lets other work come between. More is left when it returns.
        costs: of a pass through all layers.
        seconds: left of this step, or tokens by `TOKENS`.
    """

    num_layers: int
    pause: Callable[[], None] = lambda: None
    costs: Costs = TOKENS
    seconds: float = float("inf")

    def spend(self, seconds: float) -> bool:
        """Call before work of so many seconds; True if other work of vLLM came between."""
        has_paused = self.seconds <= 0
        while self.seconds <= 0:
            self.pause()
        self.seconds -= seconds
        return has_paused

    def affords(self, seconds: float) -> bool:
        """Whether that much is left."""
        return seconds <= self.seconds

    def whole_pass(self, positions: Tensor) -> float:
        """Seconds of all layers for tokens at these positions, int64 [n] on the CPU."""
        num_pairs = int(positions.sum()) + positions.numel()
        return float(self.costs.computing(positions.numel(), num_pairs))

    def layer(self, positions: Tensor) -> float:
        """Seconds of one layer."""
        return self.whole_pass(positions) / self.num_layers

    def rows(self, count: int) -> float:
        """Seconds of one layer for so many tokens, without the keys that they see: positions on a
        device would have to be waited for."""
        return float(self.costs.computing(count, 0)) / self.num_layers

    def copy(self, num_tokens: int, num_layers: int = 1) -> float:
        """Seconds in which so many tokens are copied and aligned in so many layers."""
        return self.costs.copy_s * num_tokens * num_layers / self.num_layers


def seconds_of_step(costs: Costs, num_tokens: int, prompt_tokens: int) -> float:
    """Seconds in which vLLM would compute the last so many tokens of a prompt."""
    pairs = count_pairs(max(0, prompt_tokens - num_tokens), prompt_tokens)
    return max(LEAST_S, float(costs.computing(num_tokens, pairs)))
