"""KV in eight bits for host memory and disk: symmetric, with one scale per channel."""

import torch
from torch import Tensor

_LEVELS = 127


def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Round every channel to multiples of its scale: the largest magnitude over the tokens, divided
    by 127.

    Args:
        tensor: [streams, n, d], floating point, n at least 1.

    Returns:
        int8 [streams, n, d] and float32 [streams, 1, d]; the error is at most scale / 2.

    Raises:
        ValueError: another shape or dtype, or values that are not finite in float32.
    """
    if tensor.dim() != 3 or not tensor.shape[1] or not tensor.is_floating_point():
        raise ValueError(
            f"cannot quantise {tensor.dtype} {list(tensor.shape)}: must be floating point "
            "[streams, n, d]"
        )
    values = tensor.float()
    if not torch.isfinite(values).all():
        raise ValueError("cannot quantise values that are not finite")
    scale = values.abs().amax(dim=1, keepdim=True) / _LEVELS
    # the least scale, for subnormal values and zeros; zeros stay zeros
    scale.clamp_(min=torch.finfo(torch.float32).tiny)
    return (values / scale).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8), scale


def dequantise(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of `quantise`, int8 [streams, n, d], times their scale, float32 [streams,
    1, d], in a dtype.
    """
    return (values.float() * scale).to(dtype)
