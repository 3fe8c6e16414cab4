"""FP8 in name only rounds as vLLM's own kernels do, and figures are those of the answers that were
given."""

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed")

import torch
from vllm import _custom_ops as ops

from quantised_kv import Told, kl, towards_zero
from quantised_models import AVX512


@AVX512
@pytest.mark.parametrize("spread", [1e-3, 1.0, 200.0])
def test_it_rounds_as_the_kernels_of_the_platform(spread: float):
    numbers = spread * torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(0))
    packed = torch.zeros(1, 1, 64, 64, dtype=torch.uint8)
    keys, values = packed.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        numbers, numbers, keys, values, torch.arange(32), "vec", kv_cache_dtype="fp8"
    )
    written = values.reshape(32, 1, 64).view(torch.float8_e4m3fn).float()
    assert torch.equal(towards_zero(numbers), written)


def test_distances_are_along_one_answer():
    truth, ours = (Told((3,), [{3: one, 4: -1.0}], 0, 0) for one in (-0.5, -0.9))
    assert kl(truth, truth) == 0 < kl(ours, truth)
    with pytest.raises(ValueError, match="was given"):
        kl(Told((4,), ours.places, 0, 0), truth)
