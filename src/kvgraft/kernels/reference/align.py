"""Copy with delta-RoPE ("align") in plain torch: the truth that other implementations are held to."""

from torch import Tensor

from kvgraft.kv.rope import rotate


def align_copy(
    keys: Tensor, values: Tensor | None, layers: range, source: Tensor, target: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """See `kvgraft.kernels.dispatch.align_copy`."""
    for layer in layers:
        keys[layer, target] = rotate(keys[layer, source], cos, sin)
        if values is not None:
            values[layer, target] = values[layer, source]
