import pytest
import torch

from kvgraft.kv.quant import dequantise, quantise


@pytest.mark.parametrize("magnitude", [1e-44, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", [(3, 63, 80), (1, 1, 1), (2, 5, 7)])
def test_the_error_is_at_most_half_a_scale(shape, magnitude):
    tensor = magnitude * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values, scale = quantise(tensor)
    assert (values.dtype, values.shape) == (torch.int8, shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (shape[0], 1, shape[2]))
    error = (dequantise(values, scale) - tensor).abs()
    assert (error <= scale / 2 * (1 + 1e-5)).all()
    torch.testing.assert_close(
        scale, (tensor.abs().amax(1, keepdim=True) / 127).clamp(min=2.0**-126)
    )


def test_channels_have_scales_of_their_own():
    tensor = torch.ones(2, 4, 3) * torch.tensor([1e-3, 1.0, 1e3])
    torch.testing.assert_close(dequantise(*quantise(tensor)), tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros_and_the_dtype_is_kept(dtype):
    tensor = torch.zeros(2, 3, 4, dtype=dtype)
    tensor[0, 0, 0] = -1
    assert torch.equal(dequantise(*quantise(tensor), dtype), tensor)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.full((1, 2, 3), torch.nan), "not finite"),
        (torch.full((1, 2, 3), -torch.inf), "not finite"),
        (torch.full((1, 2, 3), 1e300, dtype=torch.float64), "not finite"),
        (torch.zeros(2, 3), r"\[2, 3\]: must be"),
        (torch.zeros(1, 0, 3), "must be"),
        (torch.zeros(1, 2, 3, dtype=torch.int8), "torch.int8"),
    ],
)
def test_what_cannot_be_quantised_is_refused(tensor, message):
    with pytest.raises(ValueError, match=message):
        quantise(tensor)
