"""Kernels of the native engine on a cache of vLLM's, however its blocks lie."""

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from devices import DEVICE
from kvgraft.kernels.changes import copy_changed, kv_changes
from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kv.rope import Rope, rotate
from kvgraft.vllm.compat.pools import PoolLayout

BLOCKS, HEADS, SIZE, DIM = 6, 3, 4, 32
IMPLEMENTATIONS = ["reference", *(["triton"] if find_spec("triton") else [])]
LAYOUTS = {  # shape in memory -> the axes [blocks, Hkv, N, 2 d]
    "heads first": ((BLOCKS, HEADS, SIZE, 2 * DIM), lambda x: x),
    "tokens first": ((BLOCKS, SIZE, HEADS, 2 * DIM), lambda x: x.transpose(1, 2)),
    "of several layers": ((BLOCKS, 2, HEADS, SIZE, 2 * DIM), lambda x: x[:, 1]),
    "several layers, tokens first": (
        (BLOCKS, 2, SIZE, HEADS, 2 * DIM),
        lambda x: x[:, 1].transpose(1, 2),
    ),
    "padded blocks": ((BLOCKS, HEADS + 2, SIZE, 2 * DIM), lambda x: x[:, :HEADS]),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def cache_of(layout: str, dtype: torch.dtype = torch.float32) -> Tensor:
    shape, view = LAYOUTS[layout]
    cache: Tensor = view(torch.randn(shape, device=DEVICE).to(dtype))
    return cache


def by_token(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [n, Hkv, d] in these slots, on the CPU."""
    rows = cache.transpose(1, 2)[slots // SIZE, slots % SIZE].cpu()
    return rows[..., :DIM], rows[..., DIM:]


@every_layout
def test_a_cache_is_a_pool_of_rows(layout: str):
    torch.manual_seed(0)
    cache, slots = cache_of(layout), torch.tensor([0, 7, 23, -1], device=DEVICE)
    own = PoolLayout.of(cache)
    assert own is not None
    rows, pools = own.rows(slots), own.pools(cache)
    assert rows[0, 3] < 0
    for pool, expected in zip(pools, by_token(cache, slots[:3]), strict=True):
        assert torch.equal(pool[:, rows[0, :3]].cpu(), expected.transpose(0, 1))


def test_rows_of_another_width_are_none():
    assert PoolLayout.of(torch.zeros(2, 1, SIZE, 2 * DIM + 1)) is None
    # padded: no multiples of d
    assert PoolLayout.of(torch.zeros(2, 3, SIZE, 2 * DIM + 8)[..., :-8]) is None
    # blocks side by side
    assert PoolLayout.of(torch.zeros(3, SIZE, 2, 2 * DIM).permute(2, 0, 1, 3)) is None


def test_one_head_may_have_any_stride():
    cache = torch.randn(BLOCKS, 1, SIZE, 2 * DIM)
    odd = cache.as_strided(cache.shape, (SIZE * 2 * DIM, 1, 2 * DIM, 1))  # as PyTorch may leave it
    own, slots = PoolLayout.of(odd), torch.arange(BLOCKS * SIZE)
    assert own == PoolLayout.of(cache)
    assert own is not None
    for pool, expected in zip(own.pools(odd), by_token(cache, slots), strict=True):
        assert torch.equal(pool[:, own.rows(slots)[0]], expected.transpose(0, 1))


@every_layout
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kernels_take_it(layout: str, implementation: str):
    torch.manual_seed(0)
    cache = cache_of(layout)
    source, target, positions = (
        torch.tensor([1, 5, 10]),
        torch.tensor([22, 13, 0]),
        torch.tensor([9, 40, 7]),
    )
    keys, values = by_token(cache, source)
    before, expected = by_token(cache, target), by_token(cache, source)
    own = PoolLayout.of(cache)
    assert own is not None
    pools, turn = own.pools(cache), tuple(part.to(DEVICE) for part in Rope(DIM).table(positions))
    old, new = (own.rows(slots).to(DEVICE) for slots in (source, target))

    changes = kv_changes(
        pools, own.heads, (new, turn), (old, turn), implementation=implementation
    ).cpu()
    turned = [rotate(part, *Rope(DIM).table(-positions)) for part in (before[0], keys)]
    wanted = torch.cat((turned[0] - turned[1], before[1] - values), -1).transpose(0, 1)
    torch.testing.assert_close(changes, wanted, atol=1e-5, rtol=1e-5)

    sides, weights = torch.full((2, 3), -1).to(DEVICE), torch.zeros(3).to(DEVICE)
    copy_changed(
        pools,
        own.heads,
        (old, turn),
        (new, turn),
        changes.to(DEVICE),
        sides,
        weights,
        implementation=implementation,
    )
    found = by_token(cache, target)
    torch.testing.assert_close(
        found[0], rotate(expected[0], *Rope(DIM).table(positions)), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(found[1], expected[1])


PROMPTS = {  # positions of the rows of each prompt
    "scattered": [[0, 2, 3, 9, 14]],
    "several prompts": [[4], [0, 1, 7]],
    "a run": [range(3, 15)],
}


def attention(query: Tensor, keys: Tensor, values: Tensor, positions: Sequence[int]) -> Tensor:
    """Queries [n, Hq, d] at these positions, keys and values [t, Hkv, d]; in float64."""
    query, keys, values = (
        query.double(),
        *(x.double().repeat_interleave(2, dim=1) for x in (keys, values)),
    )
    logits = torch.einsum("nhd,thd->hnt", query, keys) * DIM**-0.5
    future = torch.arange(len(keys)) > torch.tensor(list(positions))[:, None]
    return torch.einsum("hnt,thd->nhd", logits.masked_fill(future, -torch.inf).softmax(-1), values)


@every_layout
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["cpu", *IMPLEMENTATIONS])
def test_attention_reads_it(layout: str, prompts: str, dtype: torch.dtype, implementation: str):
    """Behind rows of others in the output, and NaN wherever nobody may look."""
    torch.manual_seed(1)
    cache, free = cache_of(layout, dtype).fill_(torch.nan), torch.randperm(BLOCKS - 1) + 1
    positions, tables, expected = [torch.tensor(list(at)) for at in PROMPTS[prompts]], [], []
    query = torch.randn(sum(map(len, positions)), 2 * HEADS, DIM).to(dtype)
    for at, asking in zip(positions, query.split([len(at) for at in positions]), strict=True):
        count = int(at[-1]) + 1
        blocks, free = free[: -(-count // SIZE)], free[-(-count // SIZE) :]
        slots = (blocks[:, None] * SIZE + torch.arange(SIZE)).flatten()
        own = slots[:count]
        cache[own // SIZE, :, own % SIZE] = torch.randn(count, HEADS, 2 * DIM).to(cache)
        expected.append(attention(asking, *by_token(cache, own), at.tolist()))
        tables.append(slots)
    pool = PoolLayout.of(cache)
    assert pool is not None
    rows = AttentionLayout.of(positions, [pool.rows(slots.to(DEVICE)) for slots in tables])
    output = torch.full((3 + len(query), *query.shape[1:]), 7.0, dtype=dtype, device=DEVICE)
    given = query.to(DEVICE), *pool.pools(cache), pool.heads, rows, DIM**-0.5, output[3:]
    segpaged_attention(*given, implementation=implementation)
    assert (output[:3] == 7).all()
    exact = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(output[3:].cpu().double(), torch.cat(expected), **exact)
