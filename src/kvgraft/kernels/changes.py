"""KV changes of recomputed tokens, and copies that apply them: one launch each on CUDA.

A change is the difference between the keys and values of a token now and at its first computation,
with both keys rotated back to position 0 (docs/policies.md, `spread`). The tensors come from the
engine and are not checked. Lists, heads and pools are as in `segpaged_attention`.
"""

from torch import Tensor

from kvgraft.kernels import dispatch
from kvgraft.kernels.heads import LayerHeads

Turn = tuple[Tensor, Tensor]  # cosine and sine, float32 [n, d / 2] each


def kv_changes(
    pools: tuple[Tensor, ...],
    heads: LayerHeads,
    new: tuple[Tensor, Turn],
    old: tuple[Tensor, Turn],
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the changes of keys and values of `c` tokens.

    Args:
        pools: keys and values, or keys alone (MLA), [streams, num_slots, d] each.
        heads: streams and page lists of the layer's KV heads.
        new: slots int64 [lists, c], and the tables of their positions. Keys are rotated back.
        old: the same for the first computation. A slot of -1 is lost, and its change is 0.
        implementation: reference | triton; by default the device decides.

    Returns:
        float32 [Hkv, c, W]: keys, followed by values.
    """
    run = dispatch.kernel("kv_changes", pools[0].device.type, implementation)
    changes: Tensor = run(pools, heads, new, old)
    return changes


def average_changes(
    changes: Tensor, around: Tensor, weights: Tensor, *, implementation: str | None = None
) -> Tensor:
    """Return weighted sums of the changes around each token.

    Args:
        changes: float32 [Hkv, c, W].
        around: int64 [c, w], indices of changes.
        weights: float32 [c, w].
        implementation: reference | triton; by default the device decides.

    Returns:
        float32 [Hkv, c, W].
    """
    run = dispatch.kernel("average_changes", changes.device.type, implementation)
    averaged: Tensor = run(changes, around, weights)
    return averaged


def copy_changed(
    pools: tuple[Tensor, ...],
    heads: LayerHeads,
    source: tuple[Tensor, Turn],
    target: tuple[Tensor, Turn],
    changes: Tensor,
    sides: Tensor,
    weights: Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Copy keys and values to other slots, rotate the keys, and add an interpolation between two
    changes.

    Args:
        pools, heads: as in `kv_changes`.
        source: slots int64 [lists, n], and the tables of the shifts. Nothing is copied for -1, a
            slot that a list has lost.
        target: slots int64 [lists, n], and the tables of their positions.
        changes: float32 [Hkv, c, W] of `average_changes`, c > 0.
        sides: int64 [2, n], the changes before and after each token; -1, -1 for none.
        weights: float32 [n], weight of the change after the token.
        implementation: reference | triton; by default the device decides.
    """
    run = dispatch.kernel("copy_changed", pools[0].device.type, implementation)
    run(pools, heads, source, target, changes, sides, weights)


def anchors_nearby(
    anchors: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor],
    distance: float,
    share: float,
    averaged: int,
    fewest: int,
    *,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which anchors change which tokens, and how much (docs/policies.md, `spread`).

    Args:
        anchors: places int64 [c], ascending, c > 0, and the segment of each, int64 [c]; -1 for one
            that changes nothing. Anchors of a segment lie together.
        tokens: places int64 [n] and segments int64 [n] of the other tokens, none of them -1.
        distance: distance between places at which an anchor has weight 1/e in an average.
        share: share of a change that is applied.
        averaged: number of anchors on each side over which a change is averaged.
        fewest: number of anchors below which a segment is not changed.
        implementation: reference | triton; by default the device decides.

    Returns:
        `around` and `weights` of `average_changes`, w = 2 * averaged + 1; `sides` and `weights` of
        `copy_changed`.
    """
    run = dispatch.kernel("anchors_nearby", anchors[0].device.type, implementation)
    around, weights, sides, behind = run(anchors, tokens, distance, share, averaged, fewest)
    return around, weights, sides, behind
