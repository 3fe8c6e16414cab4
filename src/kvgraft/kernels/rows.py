"""Row operations of a decoder layer, apart from matrix products and attention: one launch each on
CUDA.

The tensors come from the engine, so only properties that differ between calls are checked.
"""

from torch import Tensor

from kvgraft.kernels import dispatch
from kvgraft.kernels.heads import LayerHeads


def norm_rotate(
    heads: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Normalise each head (RMSNorm), then rotate it (RoPE).

    Args:
        heads: [n, H, d]; the last dimension is contiguous.
        weight: [H, d], the norm's weight; None skips the norm.
        eps: epsilon of the norm.
        cos, sin: float32 [n, d / 2], contiguous.
        implementation: reference | triton; by default the device decides.

    Returns:
        [n, H, d] in the dtype of `heads`.
    """
    turned: Tensor = dispatch.kernel("norm_rotate", heads.device.type, implementation)(
        heads, weight, eps, cos, sin
    )
    return turned


def write_rows(
    pools: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    heads: LayerHeads,
    slots: Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Store keys and values of one layer in the pool.

    Args:
        pools: keys and values, or keys alone (MLA), [streams, num_slots, d] each, with equal
            strides, the last being 1.
        rows: rows for each pool, [n, Hkv, d] with equal strides, the last being 1.
        heads: stream and page list of each KV head.
        slots: int64 [page lists, n].
        implementation: reference | triton; by default the device decides.
    """
    dispatch.kernel("write_rows", slots.device.type, implementation)(pools, rows, heads, slots)


def read_rows(
    pools: tuple[Tensor, ...],
    heads: LayerHeads,
    slots: Tensor,
    *,
    implementation: str | None = None,
) -> tuple[Tensor, ...]:
    """Copy keys and values of one layer from the pool.

    Args:
        pools, heads, slots: as in `write_rows`; the result for a slot of -1 has no meaning.
        implementation: reference | triton; by default the device decides.

    Returns:
        [n, Hkv, d] of each pool, contiguous.
    """
    rows: tuple[Tensor, ...] = dispatch.kernel("read_rows", slots.device.type, implementation)(
        pools, heads, slots
    )
    return rows


def add_norm(
    rows: Tensor, residual: Tensor, weight: Tensor, eps: float, *, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual stream and normalise the sum (RMSNorm).

    Args:
        rows: [n, D], contiguous; overwritten by the sum.
        residual: [n, D], contiguous.
        weight: [D].
        implementation: reference | triton; by default the device decides.

    Returns:
        The sum and the normalised sum, [n, D] each.
    """
    run = dispatch.kernel("add_norm", rows.device.type, implementation)
    total, normed = run(rows, residual, weight, eps)
    return total, normed


def silu_mul(gate_up: Tensor, *, implementation: str | None = None) -> Tensor:
    """SwiGLU of gate and up in one tensor, [n, 2 F] -> [n, F]; may overwrite its input.

    Args:
        implementation: reference | triton; by default the device decides.
    """
    inner: Tensor = dispatch.kernel("silu_mul", gate_up.device.type, implementation)(gate_up)
    return inner
