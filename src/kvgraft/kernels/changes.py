"""KV changes of recomputed tokens, and copies that apply them: one launch each on CUDA.

A change is what the keys and values of a token are now, less what they were where it was first
read, both with the keys turned back to position 0 (docs/policies.md, `spread`). The tensors come
from the engine, and are not checked. Lists, heads and pools are as in `segpaged_attention`."""

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
    """How keys and values of `c` tokens have changed.

    Args:
        pools: keys and values, or keys alone (MLA), [streams, num_slots, d] each.
        new: slots int64 [lists, c], and what turns their keys to position 0.
        old: the same of where they were first read; slots of -1 are lost, and have not changed.
        implementation: reference | triton; by default the device decides.

    Returns:
        float32 [Hkv, c, W]: keys, and behind them values.
    """
    run = dispatch.kernel("kv_changes", pools[0].device.type, implementation)
    changes: Tensor = run(pools, heads, new, old)
    return changes


def average_changes(
    changes: Tensor, around: Tensor, weights: Tensor, *, implementation: str | None = None
) -> Tensor:
    """Weighted sums of the changes around each token.

    Args:
        changes: float32 [Hkv, c, W].
        around: int64 [c, w], which changes.
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
    """Copy keys and values to other slots, keys turned, and add what lies between two changes.

    Args:
        source: slots int64 [lists, n], -1 where a list has lost one (nothing is copied then); turn
            of the shifts.
        target: slots int64 [lists, n]; turn of their positions.
        changes: float32 [Hkv, c, W] of `average_changes`, c > 0.
        sides: int64 [2, n], the changes before and behind each token; -1, -1 for none.
        weights: float32 [n], of the change behind.
        implementation: reference | triton; by default the device decides.
    """
    run = dispatch.kernel("copy_changed", pools[0].device.type, implementation)
    run(pools, heads, source, target, changes, sides, weights)
