"""Kernels of the native engine on a cache of vLLM's, however its blocks lie."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from devices import DEVICE
from kvgraft.kernels.changes import copy_changed, kv_changes
from kvgraft.kv.rope import Rope, rotate
from kvgraft.vllm.compat.pools import PoolLayout

BLOCKS, HEADS, SIZE, DIM = 6, 3, 4, 32
IMPLEMENTATIONS = ["reference", *(["triton"] if find_spec("triton") else [])]
LAYOUTS = {
    "heads first": lambda: torch.randn(BLOCKS, HEADS, SIZE, 2 * DIM),
    "tokens first": lambda: torch.randn(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2),
    "of several layers": lambda: torch.randn(BLOCKS, 2, HEADS, SIZE, 2 * DIM)[:, 1],
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def by_token(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [n, Hkv, d] in these slots."""
    rows = cache.transpose(1, 2)[slots // SIZE, slots % SIZE]
    return rows[..., :DIM], rows[..., DIM:]


@every_layout
def test_a_cache_is_a_pool_of_rows(layout: str):
    torch.manual_seed(0)
    cache, slots = LAYOUTS[layout](), torch.tensor([0, 7, 23, -1])
    own = PoolLayout.of(cache)
    assert own is not None
    rows, pools = own.rows(slots), own.pools(cache)
    assert rows[:, 3].tolist() == [-1] * HEADS
    for pool, expected in zip(pools, by_token(cache, slots[:3]), strict=True):
        assert torch.equal(pool[0][rows[:, :3]], expected.transpose(0, 1))


def test_rows_of_another_width_are_none():
    assert PoolLayout.of(torch.zeros(2, 1, SIZE, 2 * DIM + 1)) is None
    assert PoolLayout.of(torch.zeros(2, 3, SIZE, 2 * DIM + 8)[..., :-8]) is None  # padded: no multiples of d


@every_layout
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kernels_take_it(layout: str, implementation: str):
    torch.manual_seed(0)
    cache = LAYOUTS[layout]()
    source, target, positions = torch.tensor([1, 5, 10]), torch.tensor([22, 13, 0]), torch.tensor([9, 40, 7])
    keys, values = by_token(cache, source)
    before, expected = by_token(cache, target), by_token(cache, source)
    cache, own = cache.to(DEVICE), PoolLayout.of(cache)
    assert own is not None
    pools, turn = own.pools(cache), tuple(part.to(DEVICE) for part in Rope(DIM).table(positions))
    old, new = (own.rows(slots).to(DEVICE) for slots in (source, target))

    changes = kv_changes(pools, own.heads, (new, turn), (old, turn), implementation=implementation).cpu()
    turned = [rotate(part, *Rope(DIM).table(positions)) for part in (before[0], keys)]
    wanted = torch.cat((turned[0] - turned[1], before[1] - values), -1).transpose(0, 1)
    torch.testing.assert_close(changes, wanted, atol=1e-5, rtol=1e-5)

    sides, weights = torch.full((2, 3), -1).to(DEVICE), torch.zeros(3).to(DEVICE)
    copy_changed(
        pools, own.heads, (old, turn), (new, turn), changes.to(DEVICE), sides, weights, implementation=implementation
    )
    found = by_token(cache.cpu(), target)
    torch.testing.assert_close(found[0], rotate(expected[0], *Rope(DIM).table(positions)), atol=1e-5, rtol=1e-5)
    assert torch.equal(found[1], expected[1])
