"""Slots, RoPE tables and weights of a `Spreading` on the device, made once for a prefill pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgraft.kernels.changes import Turn, average_changes, copy_changed, kv_changes
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kv.rope import Rope
from kvgraft.prefill.plan import Plan
from kvgraft.prefill.spreading import Spreading


@dataclass(frozen=True, eq=False)
class SpreadingRows:
    """The c anchors, and the n copied tokens that are not recomputed; see `Spreading`.

    Attributes:
        recomputed, cached: slots int64 [lists, c] of the anchors, in the prompt and at their source;
            tables that rotate their keys to position 0.
        source, target: slots int64 [lists, n] of the copied tokens; tables of their shifts and of
            their positions.
        around, weights: [c, w].
        sides: int64 [2, n]; -1 for tokens that are copied unchanged.
        behind: float32 [n].
    """

    recomputed: tuple[Tensor, Turn]
    cached: tuple[Tensor, Turn]
    source: tuple[Tensor, Turn]
    target: tuple[Tensor, Turn]
    around: Tensor
    weights: Tensor
    sides: Tensor
    behind: Tensor

    @classmethod
    def of(
        cls,
        plan: Plan,
        spreading: Spreading,
        sources: Tensor,
        rope: Rope,
        recomputed: Tensor,
        target: Tensor,
    ) -> "SpreadingRows":
        """Upload what all layers share to the device of the slots.

        Args:
            sources: int64 [lists, g], of the tokens in `plan.graft_targets`, on the CPU.
            recomputed: slots int64 [lists, c] of the anchors.
            target: slots int64 [lists, n] of the copied tokens.
        """
        device, copied = target.device, spreading.copied
        is_anchor, is_copied = (where[plan.graft_targets] for where in (spreading.anchors, copied))
        at_anchor, at_target = plan.positions[spreading.anchors], plan.positions[copied]
        at_source = at_anchor - plan.graft_shifts[is_anchor]
        shifts, which = plan.graft_shifts[is_copied].unique(return_inverse=True)

        changed = spreading.where[copied]  # bool [n]
        sides = torch.full((2, len(at_target)), -1)
        sides[:, changed] = spreading.sides
        behind = torch.zeros(len(at_target))
        behind[changed] = spreading.behind

        positions, cached, source, which, around, sides = _upload(
            device,
            torch.cat([-at_anchor, -at_source, at_target, shifts]),
            sources[:, is_anchor],
            sources[:, is_copied],
            which,
            spreading.around,
            sides,
        )
        weights, behind = _upload(device, spreading.weights, behind)
        counts = len(at_anchor), len(at_source), len(at_target), len(shifts)
        parts = zip(*(part.split(counts) for part in rope.table(positions)), strict=True)
        to_origin, from_source, place, by_shift = parts
        cos, sin = (part[which] for part in by_shift)
        return cls(
            (recomputed, to_origin),
            (cached, from_source),
            (source, (cos, sin)),
            (target, place),
            around,
            weights,
            sides,
            behind,
        )

    def apply(self, pools: tuple[Tensor, ...], heads: LayerHeads) -> None:
        """Copy the KV of one layer, changed by what its recomputed anchors, already stored, have changed."""
        changes = kv_changes(pools, heads, self.recomputed, self.cached)
        averaged = average_changes(changes, self.around, self.weights)
        copy_changed(pools, heads, self.source, self.target, averaged, self.sides, self.behind)


def _upload(device: torch.device, *tensors: Tensor) -> Sequence[Tensor]:
    """Copy tensors of one dtype to the device in one upload."""
    packed = torch.cat([tensor.flatten() for tensor in tensors]).to(device, non_blocking=True)
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
