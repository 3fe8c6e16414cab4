"""Slots, RoPE tables and weights of a `Spreading` on the device, made once for a prefill pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kernels.changes import Turn, average_changes, copy_changed, kv_changes
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.upload import upload
from kvgraft.kv.rope import Rope
from kvgraft.prefill.spreading import Spreading


@dataclass(frozen=True, eq=False)
class SpreadingRows:
    """The c anchors, and the n copied tokens that are not recomputed; see `Spreading`.

    Attributes:
        recomputed, cached: slots int64 [lists, c] of the anchors, in the prompt and at their
            source, with tables that rotate their keys to position 0.
        source, target: slots int64 [lists, n] of the copied tokens, with tables of their shifts and
            of their positions.
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
        """Upload the data that all layers share to the device of the slots.

        Args:
            sources: int64 [lists, g], source slots of the tokens in `plan.graft_targets`, on the
                CPU.
            recomputed: slots int64 [lists, c] of the anchors.
            target: slots int64 [lists, n] of the copied tokens.
        """
        device, copied = target.device, spreading.copied
        is_anchor, is_copied = (where[plan.graft_targets] for where in (spreading.anchors, copied))
        at_anchor, at_target = plan.positions[spreading.anchors], plan.positions[copied]
        at_source = at_anchor - plan.graft_shifts[is_anchor]
        positions = torch.cat([at_anchor, at_source, at_target])

        changed = spreading.where[copied]  # bool [n]
        sides = torch.full((2, len(at_target)), -1)
        sides[:, changed] = spreading.sides
        behind = torch.zeros(len(at_target))
        behind[changed] = spreading.behind

        longest = int(positions.max()) + 1
        positions, segments, cached, source, around, weights, sides, behind, *shifts = upload(
            device,
            positions,
            plan.segments[copied],
            sources[:, is_anchor],
            sources[:, is_copied],
            spreading.around,
            spreading.weights,
            sides,
            behind,
            *rope.table(plan.segment_shifts),
        )
        cos, sin = rope.table(positions, longest)
        counts = len(at_anchor), len(at_source), len(at_target)
        (new, old, place), (new_sin, old_sin, place_sin) = cos.split(counts), sin.split(counts)
        # Negated sines rotate the keys of anchors back to position 0.
        sin[: 2 * len(at_anchor)].neg_()
        return cls(
            (recomputed, (new, new_sin)),
            (cached, (old, old_sin)),
            (source, (shifts[0][segments], shifts[1][segments])),
            (target, (place, place_sin)),
            around,
            weights,
            sides,
            behind,
        )

    def apply(self, pools: tuple[Tensor, ...], heads: LayerHeads) -> None:
        """Copy the KV of one layer, plus the interpolated change of its anchors, whose new KV is
        already stored."""
        changes = kv_changes(pools, heads, self.recomputed, self.cached)
        averaged = average_changes(changes, self.around, self.weights)
        copy_changed(pools, heads, self.source, self.target, averaged, self.sides, self.behind)
