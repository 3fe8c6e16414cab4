"""Changes of keys and values, averaged and added, by every implementation, against a loop in
float64."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from devices import DEVICE
from kvgraft.kernels.changes import anchors_nearby, average_changes, copy_changed, kv_changes
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kv.rope import Rope, rotate

IMPLEMENTATIONS = ["reference", *(["triton"] if find_spec("triton") else [])]
HEADS = LayerHeads((4, 1, 2), (1, 0, 0), (True, False, False))  # the first follows the second list
NUM_SLOTS = 192
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
with_or_without_values = pytest.mark.parametrize("num_pools", [1, 2])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def pools_of(dtype: torch.dtype, dim: int, count: int) -> tuple[Tensor, ...]:
    return tuple(normal(5, NUM_SLOTS, dim, seed=seed).to(dtype) for seed in range(count))


def slots(n: int) -> tuple[Tensor, Tensor]:
    """Two times [2, n], by list, disjoint and in no order."""
    orders = [
        torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)
    ]
    both = torch.stack(orders)[:, : 2 * n].to(DEVICE)
    return both[:, :n].contiguous(), both[:, n:].contiguous()


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x [n, d]"""
    return rotate(x.float()[:, None], *turn)[:, 0]


def turned_back(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    return turned(x, (turn[0], -turn[1]))


@every_implementation
@every_dtype
@with_or_without_values
@pytest.mark.parametrize(("n", "dim"), [(1, 32), (19, 80), (8, 128)])
def test_changes(implementation: str, dtype: torch.dtype, num_pools: int, n: int, dim: int) -> None:
    pools, (new, old) = pools_of(dtype, dim, num_pools), slots(n)
    old[1, n // 2] = -1  # lost by one list
    new_turn, old_turn = (Rope(dim).table(torch.arange(n, device=DEVICE) * by) for by in (7, 11))
    found = kv_changes(
        pools, HEADS, (new, new_turn), (old, old_turn), implementation=implementation
    )
    for head, (stream, page_list) in enumerate(zip(HEADS.streams, HEADS.page_lists, strict=True)):
        now, was = ([pool[stream, at[page_list]] for pool in pools] for at in (new, old))
        expected = torch.cat(
            [turned_back(now[0], new_turn) - turned_back(was[0], old_turn)]
            + [a.float() - b.float() for a, b in zip(now[1:], was[1:], strict=True)], -1,
        )  # fmt: skip
        expected[old[page_list] < 0] = 0.0
        torch.testing.assert_close(found[head], expected, atol=1e-5, rtol=1e-5)


@every_implementation
def test_averages(implementation: str) -> None:
    changes, weights = normal(3, 21, 96), normal(21, 5, seed=1)
    around = torch.randint(0, 21, (21, 5), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    expected = np.einsum("cw,hcwd->hcd", weights.cpu(), changes.cpu()[:, around.cpu()])
    found = average_changes(changes, around, weights, implementation=implementation)
    np.testing.assert_allclose(found.cpu(), expected, atol=1e-5)


@every_implementation
@pytest.mark.parametrize("num_tokens", [12, 150, 700])
@pytest.mark.parametrize("share_of_anchors", [0.05, 0.4])
def test_anchors_nearby(implementation: str, num_tokens: int, share_of_anchors: float) -> None:
    """Against what `Spreading` says of averages and sides, in a loop."""
    random = np.random.default_rng(num_tokens)
    segments = np.sort(random.integers(0, 6, num_tokens))
    is_anchor = random.random(num_tokens) < share_of_anchors
    is_anchor[:2], segments[:2] = True, 0
    # the last places are no anchors, and in no segment
    anchors = np.concatenate([np.flatnonzero(is_anchor), [num_tokens, num_tokens]])
    own = np.append(segments, -1)[anchors]
    others = np.flatnonzero(~is_anchor)
    around, weights, sides, behind = anchors_nearby(
        (torch.from_numpy(anchors).to(DEVICE), torch.from_numpy(own).to(DEVICE)),
        (torch.from_numpy(others).to(DEVICE), torch.from_numpy(segments[others]).to(DEVICE)),
        20.0, 0.5, 3, 3,
        implementation=implementation,
    )  # fmt: skip
    averaging = np.zeros((len(anchors), len(anchors)))
    np.add.at(averaging, (np.arange(len(anchors))[:, None], around.cpu()), weights.cpu())
    for row in range(len(anchors) - 2):
        near = [
            other
            for other in range(row - 3, row + 4)
            if 0 <= other < len(anchors) and own[other] == own[row]
        ]
        expected = np.zeros(len(anchors))
        expected[near] = np.exp(-np.abs(anchors[near] - anchors[row]) / 20.0)
        np.testing.assert_allclose(averaging[row], 0.5 * expected / expected.sum(), atol=1e-6)
    for token, (first, second), weight in zip(
        others, sides.T.tolist(), behind.tolist(), strict=True
    ):
        mine = np.flatnonzero(own == segments[token])
        if len(mine) < 3:
            assert (first, second) == (-1, -1)
            continue
        before, after = mine[anchors[mine] < token], mine[anchors[mine] > token]
        if len(before):
            assert first == before[-1]
        if len(after):
            assert second == after[0]
        expected = (
            (token - anchors[first]) / (anchors[second] - anchors[first])
            if len(before) and len(after)
            else float(len(after) > 0)
        )
        assert weight == pytest.approx(expected, abs=1e-6)


@every_implementation
@every_dtype
@with_or_without_values
@pytest.mark.parametrize(("n", "dim"), [(0, 32), (1, 32), (19, 80), (67, 128)])
def test_copies_that_take_over_changes(
    implementation: str, dtype: torch.dtype, num_pools: int, n: int, dim: int
) -> None:
    """All else stays as it is."""
    pools, (source, target) = pools_of(dtype, dim, num_pools), slots(n)
    changes = normal(3, 6, dim * num_pools, seed=5)
    sides = torch.randint(0, 6, (2, n), generator=torch.Generator().manual_seed(6)).to(DEVICE)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    sides[:, ::3] = -1
    source[1, 1::4] = -1  # lost by one list
    positions = torch.arange(n, device=DEVICE) * 13
    shift, place = Rope(dim).table(positions - 400), Rope(dim).table(positions)
    expected = [pool.float() for pool in pools]
    for head, (stream, page_list) in enumerate(zip(HEADS.streams, HEADS.page_lists, strict=True)):
        has = source[page_list] >= 0
        old, new = source[page_list][has], target[page_list][has]
        first, second = changes[head, sides[0, has]], changes[head, sides[1, has]]
        added = first + weights[has, None] * (second - first)
        added[sides[0, has] < 0] = 0.0
        own_shift, own_place = (tuple(part[has] for part in turn) for turn in (shift, place))
        expected[0][stream, new] = turned(pools[0][stream, old], own_shift) + turned(
            added[:, :dim], own_place
        )
        if num_pools > 1:
            expected[1][stream, new] = pools[1][stream, old].float() + added[:, dim:]
    copy_changed(
        pools,
        HEADS,
        (source, shift),
        (target, place),
        changes,
        sides,
        weights,
        implementation=implementation,
    )
    tolerance = 2 * torch.finfo(dtype).eps
    for pool, right in zip(pools, expected, strict=True):
        torch.testing.assert_close(pool.float(), right, atol=tolerance, rtol=tolerance)
        untouched = torch.ones(5, dtype=torch.bool, device=DEVICE)
        untouched[list(HEADS.streams)] = False
        assert torch.equal(pool.float()[untouched], right[untouched])
