"""What spreading changes needs on the device, made once for a prefill pass and used by all its layers."""

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
    """The telling tokens, now and at their source, and the copied tokens that are not recomputed.

    Attributes:
        now, before: slots int64 [lists, c] of the telling tokens, and what turns their keys to position 0.
        source, target: slots int64 [lists, n] of the others; turns of their shifts and of their positions.
        around, weights: [c, w], see `Spreading`.
        sides: int64 [2, n], see `Spreading`; -1 where nothing is taken over.
        behind: float32 [n], see `Spreading`.
    """

    now: tuple[Tensor, Turn]
    before: tuple[Tensor, Turn]
    source: tuple[Tensor, Turn]
    target: tuple[Tensor, Turn]
    around: Tensor
    weights: Tensor
    sides: Tensor
    behind: Tensor

    @classmethod
    def of(
        cls, plan: Plan, spreading: Spreading, sources: Tensor, rope: Rope, now: Tensor, target: Tensor
    ) -> "SpreadingRows":
        """Bring it to the device of the slots.

        Args:
            sources: int64 [lists, g], of the tokens in `plan.graft_targets`, on the CPU.
            now: slots int64 [lists, c] of the telling tokens.
            target: slots int64 [lists, n] of the tokens in `others`.
        """
        rest, device = others(plan, spreading), now.device
        is_telling, is_other = (where[plan.graft_targets] for where in (spreading.telling, rest))
        here, there = plan.positions[spreading.telling], plan.positions[rest]
        shifts = plan.graft_shifts
        was = here - shifts[is_telling]
        distinct, which = shifts[is_other].unique(return_inverse=True)
        takes = spreading.where[rest]  # bool [n]
        sides = torch.full((2, len(there)), -1)
        sides[:, takes] = spreading.sides
        behind = torch.zeros(len(there))
        behind[takes] = spreading.behind
        positions, before, source, which, around, sides = _sent(
            device,
            torch.cat([-here, -was, there, distinct]),
            sources[:, is_telling],
            sources[:, is_other],
            which,
            spreading.around,
            sides,
        )
        weights, behind = _sent(device, spreading.weights, behind)
        counts = len(here), len(was), len(there), len(distinct)
        tables = zip(*(part.split(counts) for part in rope.table(positions)), strict=True)
        new_turn, old_turn, place, shift = tables
        cos, sin = (part[which] for part in shift)
        return cls(
            (now, new_turn), (before, old_turn), (source, (cos, sin)), (target, place), around, weights, sides, behind
        )

    def spread(self, pools: tuple[Tensor, ...], heads: LayerHeads) -> None:
        """In one layer, whose recomputed tokens are stored: copy the others with what they take over."""
        changes = average_changes(kv_changes(pools, heads, self.now, self.before), self.around, self.weights)
        copy_changed(pools, heads, self.source, self.target, changes, self.sides, self.behind)


def others(plan: Plan, spreading: Spreading) -> Tensor:
    """Return the copied tokens that are not recomputed: bool [T]."""
    return plan.grafted & ~plan.in_place & ~spreading.chosen


def _sent(device: torch.device, *tensors: Tensor) -> Sequence[Tensor]:
    """Copy tensors of one dtype to the device in one upload."""
    packed = torch.cat([tensor.flatten() for tensor in tensors]).to(device, non_blocking=True)
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
