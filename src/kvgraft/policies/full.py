"""Full recomputation: the exact answer, and the fallback of all other policies."""

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.prefill.context import Hidden, Policy, PrefillContext


@dataclass(frozen=True)
class Full(Policy):
    """Compute every token that is not an exact prefix hit."""

    name: ClassVar[str] = "full"
    uses_grafts: ClassVar[bool] = False

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Run all layers on all active tokens."""
        return self.recompute(ctx)
