"""What a decoder layer does to rows, by every implementation, against the same in float64."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from devices import DEVICE
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.rows import add_norm, norm_rotate, read_rows, silu_mul, write_rows
from kvgraft.kv.rope import Rope

IMPLEMENTATIONS = ["reference", *(["triton"] if find_spec("triton") else [])]
EPS = 1e-5
pytestmark = [
    pytest.mark.parametrize("implementation", IMPLEMENTATIONS),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str),
]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within three roundings of what float64 gives."""
    assert found.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("n", "num_heads", "head_dim"), [(0, 3, 64), (1, 3, 80), (19, 5, 32), (8, 2, 128)]
)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_rotate(
    implementation: str, dtype: torch.dtype, n: int, num_heads: int, head_dim: int, normed: bool
) -> None:
    # strided, as the engine has them
    heads = normal(n, num_heads + 2, head_dim, dtype=dtype)[:, :num_heads]
    weight = normal(num_heads, head_dim, dtype=dtype, seed=1) if normed else None
    cos, sin = Rope(head_dim).table(torch.arange(n, device=DEVICE) * 1001)
    expected = heads.double()
    if weight is not None:
        expected = F.rms_norm(expected, (head_dim,), None, EPS) * weight.double()
    first, second = expected.chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    expected = torch.cat([first * c - second * s, second * c + first * s], -1)

    assert_near(
        norm_rotate(heads, weight, EPS, cos, sin, implementation=implementation), expected, dtype
    )


def make_pools(dtype: torch.dtype, *, together: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of five streams; together, a key lies next to its value, as in vLLM."""
    keys, values = normal(5, 64, 96, dtype=dtype, seed=2).chunk(2, dim=-1)
    return (keys, values) if together else (keys.contiguous(), values.contiguous())


@pytest.mark.parametrize("n", [0, 1, 19])
@pytest.mark.parametrize("with_values", [True, False])
@pytest.mark.parametrize("together", [False, True])
def test_write_rows(
    implementation: str, dtype: torch.dtype, n: int, with_values: bool, together: bool
) -> None:
    """Each head to its own stream, in the slots of its list; all else stays."""
    heads = LayerHeads((4, 1, 2), (1, 0, 0), (True, False, False))
    slots = torch.stack(
        [torch.randperm(64, generator=torch.Generator().manual_seed(s))[:n] for s in (0, 1)]
    )
    slots = slots.to(DEVICE)
    both = make_pools(dtype, together=together)
    pools = both[: 1 + with_values]
    rows = normal(n, 3 * 48 * 2, dtype=dtype, seed=4).view(n, 2, 3, 48).unbind(1)[: 1 + with_values]
    expected = [pool.clone() for pool in both]
    for pool, new in zip(expected, rows, strict=False):
        for head, (stream, page_list) in enumerate(
            zip(heads.streams, heads.page_lists, strict=True)
        ):
            pool[stream, slots[page_list]] = new[:, head]

    write_rows(pools, rows, heads, slots, implementation=implementation)
    for pool, written in zip(expected, both, strict=True):
        assert torch.equal(pool, written)


@pytest.mark.parametrize("n", [0, 1, 19])
@pytest.mark.parametrize("with_values", [True, False])
@pytest.mark.parametrize("together", [False, True])
def test_read_rows(
    implementation: str, dtype: torch.dtype, n: int, with_values: bool, together: bool
) -> None:
    """What is written is read again; a slot of -1 is not looked at."""
    heads = LayerHeads((4, 1, 2), (1, 0, 0), (True, False, False))
    slots = torch.stack(
        [torch.randperm(64, generator=torch.Generator().manual_seed(s))[:n] for s in (0, 1)]
    )
    slots = slots.to(DEVICE)
    pools = make_pools(dtype, together=together)[: 1 + with_values]
    slots[1, n // 2 :] = -1

    found = read_rows(pools, heads, slots, implementation=implementation)
    assert len(found) == len(pools)
    for pool, rows in zip(pools, found, strict=True):
        for head, (stream, page_list) in enumerate(
            zip(heads.streams, heads.page_lists, strict=True)
        ):
            held = slots[page_list] >= 0
            assert torch.equal(rows[held, head], pool[stream, slots[page_list][held]])


@pytest.mark.parametrize(("n", "size"), [(0, 64), (1, 96), (7, 1500)])
def test_add_norm(implementation: str, dtype: torch.dtype, n: int, size: int) -> None:
    rows, residual = (normal(n, size, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = normal(size, dtype=dtype, seed=2)
    before, kept = rows.double(), residual.clone()
    total, normed = add_norm(rows, residual, weight, EPS, implementation=implementation)
    assert_near(total, before + kept.double(), dtype)
    assert_near(normed, F.rms_norm(total.double(), (size,), weight.double(), EPS), dtype)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize(("n", "size"), [(0, 64), (1, 96), (7, 1500)])
def test_silu_mul(implementation: str, dtype: torch.dtype, n: int, size: int) -> None:
    gate_up = normal(n, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(silu_mul(gate_up, implementation=implementation), F.silu(gate) * up, dtype)
