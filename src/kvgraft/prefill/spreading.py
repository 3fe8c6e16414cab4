"""Spreading: apply the KV change of recomputed tokens to the other tokens of their segment."""

from typing import Any

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kernels.memoised import memoised
from kvgraft.prefill.device_tokens import DeviceTokens

AVERAGED = 8  # anchors on each side over which a change is averaged
FEWEST_ANCHORS = 3  # a segment with fewer anchors spreads no changes


class Spreading:
    """Anchors, whose KV change is known, and the weights with which it is applied to other tokens.

    Args:
        anchors: bool [T], recomputed tokens whose KV change is applied to others.
        chosen: bool [T], all grafted tokens that are recomputed.
        distance: distance in tokens at which a change has weight 1/e in an average.
        share: share of a change that is applied.

    Attributes:
        where: bool [T], the n tokens that are changed: grafted tokens of segments with anchors that
            are not recomputed.
        copied: bool [T], all copied tokens that are not recomputed; `where` is a part of them.
        around: int64 [c, w], anchors over which the change of each of the c anchors is averaged.
        weights: float32 [c, w], weights of these anchors, times `share`.
        sides: int64 [2, n], the anchors before and behind each token in `where`.
        behind: float32 [n], weight of the anchor behind.
    """

    def __init__(
        self, plan: Plan, anchors: Tensor, chosen: Tensor, distance: float, share: float = 1.0
    ) -> None:
        self.anchors = anchors
        self.copied = plan.grafted & ~plan.in_place & ~chosen
        segments = plan.segments
        some = anchors.nonzero()[:, 0]  # [c]
        around = torch.arange(len(some))[:, None] + torch.arange(-AVERAGED, AVERAGED + 1)  # [c, w]
        self.around = around.clamp(0, max(len(some) - 1, 0))
        near = (around == self.around) & (segments[some][self.around] == segments[some][:, None])
        decay = torch.exp(-(some[self.around] - some[:, None]).abs() / distance)
        averaged = torch.where(near, decay, 0.0)
        self.weights = (share * averaged / averaged.sum(1, keepdim=True)).float()
        # The last element stands for tokens of no segment.
        changed = torch.zeros(len(plan.segment_shifts) + 1, dtype=torch.bool)
        changed[segments[some]] = True
        self.where = changed[segments] & ~chosen
        rest = self.where.nonzero()[:, 0]  # [n]
        after = anchors.cumsum(0)[rest]
        self.sides = torch.stack([(after - 1).clamp(min=0), after.clamp(max=max(len(some) - 1, 0))])
        same = segments[some][self.sides] == segments[rest]
        distances = (some[self.sides] - rest).abs().float()
        weights = torch.where(same, 1 / distances, 0.0)
        self.behind = weights[1] / weights.sum(0)

    @property
    def has_anchors(self) -> bool:
        """False if nothing is changed."""
        return bool(self.where.any())

    def interpolate(self, changes: Tensor) -> Tensor:
        """Average the changes [c, Hkv, d] of the anchors, and interpolate them linearly: [n, Hkv,
        d]."""
        around, weights, sides, behind = self._on_device(changes.device, changes.dtype)
        changes = torch.einsum("cw,cwhd->chd", weights, changes[around])
        before, after = changes[sides]
        return torch.lerp(before, after, behind[:, None, None])

    @memoised
    def _on_device(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Upload indices and weights once for all layers."""
        around, sides = self.around.to(device), self.sides.to(device)
        return around, self.weights.to(device, dtype), sides, self.behind.to(device, dtype)


class DeviceSpreading(Spreading):
    """Spreading of tokens that only the device knows completely.

    Reading an attribute of `Spreading` waits for the device.

    Args:
        starts: bool [T], tokens that are no anchors.

    Attributes:
        plan: the plan of the prompts.
        chosen, starts, distance, share: as given.
    """

    def __init__(
        self,
        plan: Plan,
        chosen: DeviceTokens,
        starts: Tensor,
        distance: float,
        share: float = 1.0,
    ) -> None:
        self.plan, self.chosen, self.starts = plan, chosen, starts
        self.distance, self.share = distance, share

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        chosen = self.chosen.mask
        anchors = anchors_of(self.plan, chosen, self.starts)
        super().__init__(self.plan, anchors, chosen, self.distance, self.share)
        return getattr(self, name)

    @property
    def has_anchors(self) -> bool:
        """False if there can be none."""
        return bool(self.known_anchors.any() or self.chosen.found)

    @property
    def known_anchors(self) -> Tensor:
        """Anchors that the host knows, bool [T]; their segments may have too few."""
        return _no_start(self.plan, self.chosen.known, self.starts)


def anchors_of(plan: Plan, chosen: Tensor, starts: Tensor) -> Tensor:
    """Return the recomputed tokens whose changes are spread: bool [T].

    Segment starts bool [T] are no anchors, nor are tokens of segments with too few of them.
    """
    anchors = _no_start(plan, chosen, starts)
    few = plan.segments[anchors].bincount(minlength=plan.num_tokens) < FEWEST_ANCHORS
    return anchors & ~few[plan.segments]


def _no_start(plan: Plan, chosen: Tensor, starts: Tensor) -> Tensor:
    return chosen & (plan.segments >= 0) & ~starts
