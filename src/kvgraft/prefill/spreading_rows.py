"""Slots, RoPE tables and weights of a `Spreading` on the device, made once for a prefill pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kernels.changes import (
    Turn,
    anchors_nearby,
    average_changes,
    copy_changed,
    kv_changes,
)
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.upload import upload
from kvgraft.kv.rope import Rope
from kvgraft.prefill.spreading import AVERAGED, FEWEST_ANCHORS, DeviceSpreading, Spreading


@dataclass(frozen=True, eq=False)
class SpreadingRows:
    """The c anchors, and the n copied tokens that are not recomputed; see `Spreading`.

    Attributes:
        recomputed, cached: slots int64 [lists, c] of the anchors, in the prompt and at their
            source, with tables of their positions.
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
        positions, segments, cached, source, around, weights, sides, behind, shifts = upload(
            device,
            positions,
            plan.segments[copied],
            sources[:, is_anchor],
            sources[:, is_copied],
            spreading.around,
            spreading.weights,
            sides,
            behind,
            torch.stack(rope.table(plan.segment_shifts)),
        )
        new, old, place = _turns(rope.table(positions, longest), len(at_anchor))
        shift_cos, shift_sin = shifts[:, segments]
        return cls(
            (recomputed, new),
            (cached, old),
            (source, (shift_cos, shift_sin)),
            (target, place),
            around,
            weights,
            sides,
            behind,
        )

    @classmethod
    def of_found(
        cls,
        spreading: DeviceSpreading,
        found: Tensor,
        sources: Tensor,
        rope: Rope,
        slots: Tensor,
    ) -> "SpreadingRows":
        """Return the rows of a spreading whose tokens only the device knows.

        The copied tokens are those that the host does not know to be recomputed. Those that are
        recomputed have no source. Anchors that are none stand for the last token of the last
        prompt, which is in no segment.

        Args:
            found: int64 [f] on the device, all tokens that the host does not know.
            sources: as in `of`.
            slots: int64 [lists, T] of all tokens, on the device.
        """
        plan, chosen, lists = spreading.plan, spreading.chosen, len(slots)
        copied = plan.grafted & ~plan.in_place & ~chosen.known
        last = plan.num_tokens - 1
        positions, segments = plan.positions, plan.segments
        # by token: source slots, position at the source, position, segment
        table = torch.full((lists + 3, plan.num_tokens), -1)
        table[:lists, plan.graft_targets] = sources
        table[lists:] = torch.stack([positions, positions, segments])
        table[lists, plan.graft_targets] -= plan.graft_shifts
        longest = int(table[lists : lists + 2].max()) + 1

        # by token: its place among the copied ones, and the anchor that it is
        no_anchor = (segments < 0) | spreading.starts
        of_found = torch.stack(
            [copied.cumsum(0) - 1, torch.arange(plan.num_tokens).masked_fill(no_anchor, last)]
        )
        given = (
            table, of_found, spreading.known_anchors.nonzero()[:, 0], copied.nonzero()[:, 0],
            positions[copied], segments[copied], sources[:, copied[plan.graft_targets]],
        )  # fmt: skip
        table, of_found, known, places, at_target, segments, source, shifts = upload(
            slots.device, *given, torch.stack(rope.table(plan.segment_shifts))
        )

        rank, anchors = of_found[:, found]
        source.index_fill_(1, rank, -1)
        anchors = (torch.cat([known, anchors]) if len(known) else anchors).sort().values
        own = table[:, anchors]
        cached, (at_source, at_anchor, anchor_segments) = own[:lists], own[lists:]
        nearby = anchors_nearby(
            (anchors, anchor_segments),
            (places, segments),
            spreading.distance,
            spreading.share,
            AVERAGED,
            FEWEST_ANCHORS,
        )
        at = torch.cat([at_anchor, at_source, at_target])
        new, old, place = _turns(rope.table(at, longest), len(anchors))
        shift_cos, shift_sin = shifts[:, segments]
        return cls(
            (slots[:, anchors], new),
            (cached, old),
            (source, (shift_cos, shift_sin)),
            (slots[:, places], place),
            *nearby,
        )

    def apply(self, pools: tuple[Tensor, ...], heads: LayerHeads) -> None:
        """Copy the KV of one layer, plus the interpolated change of its anchors, whose new KV is
        already stored."""
        changes = kv_changes(pools, heads, self.recomputed, self.cached)
        averaged = average_changes(changes, self.around, self.weights)
        copy_changed(pools, heads, self.source, self.target, averaged, self.sides, self.behind)


def _turns(table: Turn, num_anchors: int) -> tuple[Turn, Turn, Turn]:
    """Split tables of the anchors' positions, of those at their source, and of copied tokens."""
    cos, sin = table
    counts = num_anchors, num_anchors, len(cos) - 2 * num_anchors
    new, old, place = zip(cos.split(counts), sin.split(counts), strict=True)
    return new, old, place
