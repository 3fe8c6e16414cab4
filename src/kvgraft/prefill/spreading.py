"""Which recomputed tokens tell how the others of their segment have changed, and what these take over of it."""

import torch
from torch import Tensor

from kvgraft.kernels.memoised import memoised
from kvgraft.prefill.plan import Plan

AVERAGED = 8  # telling tokens on either side, over which a change is averaged


class Spreading:
    """The telling tokens next to each other token of a segment.

    Args:
        telling: bool [T], recomputed tokens whose changes are spread.
        chosen: bool [T], all grafted tokens that are recomputed.
        distance: in tokens, at which a change weighs 1/e in an average.
        share: of a change that is taken over.

    Attributes:
        where: bool [T], grafted tokens of segments that have telling ones, without those that are recomputed.
        around: int64 [c, w], telling tokens around each telling one, as rows of the telling ones.
        weights: float32 [c, w], of these in a change that is taken over.
        sides: int64 [2, n], the telling tokens before and behind each token in `where`, as rows of the telling ones.
        behind: float32 [n], weight of the one behind.
    """

    def __init__(self, plan: Plan, telling: Tensor, chosen: Tensor, distance: float, share: float = 1.0) -> None:
        self.telling, self.chosen = telling, chosen
        segments, places = plan.segments, torch.arange(plan.num_tokens)
        some = telling.nonzero()[:, 0]  # [c]
        around = torch.arange(len(some))[:, None] + torch.arange(-AVERAGED, AVERAGED + 1)  # [c, w], rows of some
        self.around = around.clamp(0, max(len(some) - 1, 0))
        near = (around == self.around) & (segments[some][self.around] == segments[some][:, None])
        averaged = torch.where(near, torch.exp(-(some[self.around] - some[:, None]).abs() / distance), 0.0)
        self.weights = (share * averaged / averaged.sum(1, keepdim=True)).float()
        self.where = (segments >= 0) & ~chosen & torch.isin(segments, segments[some])
        rest = places[self.where]  # [n]
        after = torch.searchsorted(some, rest)
        self.sides = torch.stack([(after - 1).clamp(min=0), after.clamp(max=max(len(some) - 1, 0))])
        same = segments[some][self.sides] == segments[rest]
        distances = (some[self.sides] - rest).abs().float()
        weights = torch.where(same, 1 / distances, 0.0)
        self.behind = weights[1] / weights.sum(0)

    def between(self, changes: Tensor) -> Tensor:
        """Changes [c, Hkv, d] of the telling tokens, averaged and interpolated linearly at the others: [n, Hkv, d]."""
        around, weights, sides, behind = self._beside(changes.device, changes.dtype)
        changes = torch.einsum("cw,cwhd->chd", weights, changes[around])
        before, after = changes[sides]
        return torch.lerp(before, after, behind[:, None, None])

    @memoised
    def _beside(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What all layers need, where they need it."""
        around, sides = self.around.to(device), self.sides.to(device)
        return around, self.weights.to(device, dtype), sides, self.behind.to(device, dtype)
