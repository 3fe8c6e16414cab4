from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from devices import DEVICE
from kvgraft.kernels.cpu import align as cpu_align
from kvgraft.kernels.dispatch import align_copy, align_paged, kernel
from kvgraft.kv.rope import Rope, rotate, rotate_part

IMPLEMENTATIONS = ["reference", "cpu"]
if find_spec("triton"):
    IMPLEMENTATIONS.append("triton")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

NUM_LAYERS, NUM_SLOTS = 3, 160
# relative, to nearest
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def slots(n: int) -> tuple[Tensor, Tensor]:
    """Source and target, disjoint, in no order."""
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    return order[:n], order[n : 2 * n]


def shifts(n: int) -> Tensor:
    return torch.tensor([7, -7, 0, 1_000_000, -1_000_000], device=DEVICE).repeat(n // 5 + 1)[:n]


def pair_norms(x: Tensor) -> Tensor:
    """Length of every rotated pair: [n, H, D] -> [n, H, D/2]."""
    return x.unflatten(-1, (2, -1)).norm(dim=-2)


@every_implementation
@pytest.mark.parametrize(
    ("n", "num_heads", "head_dim"), [(0, 2, 64), (1, 1, 32), (63, 1, 80), (63, 3, 64), (5, 8, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layers", [range(1, 3), range(2, -1, -2), range(0)], ids=str)
def test_every_implementation(
    implementation: str, n: int, num_heads: int, head_dim: int, dtype: torch.dtype, layers: range
) -> None:
    """All that is not a source is NaN: it must neither arrive in a target nor change."""
    source, target = slots(n)
    pools = torch.full(
        (2, NUM_LAYERS, NUM_SLOTS, num_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE
    )
    pools[:, :, source] = normal(2, NUM_LAYERS, n, num_heads, head_dim, seed=3).to(dtype)
    cos, sin = Rope(head_dim).table(shifts(n))
    expected = pools.clone()
    for layer in layers:
        expected[0, layer, target] = rotate(pools[0, layer, source], cos, sin)
        expected[1, layer, target] = pools[1, layer, source]

    align_copy(*pools, layers, source, target, cos, sin, implementation=implementation)

    one_rounding_apart = (
        3 * ROUNDOFF[dtype] * pools[0, :, source].nan_to_num().abs().amax() if n else 0
    )
    torch.testing.assert_close(
        pools[0], expected[0], atol=float(one_rounding_apart), rtol=0, equal_nan=True
    )
    torch.testing.assert_close(pools[1], expected[1], atol=0, rtol=0, equal_nan=True)
    assert bool(pools[:, list(layers)][:, :, target].isfinite().all())


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shift", [7, -7, 1_000_000, -1_000_000])
def test_aligned_key_is_the_key_computed_at_the_new_position(
    implementation: str, dtype: torch.dtype, shift: int
) -> None:
    """Two roundings to the dtype, at the old position and after the turn, each at most `ROUNDOFF`
    of the pair's length.

    The tables add a few float32 roundings (three sines and cosines, three products), whatever the
    distance."""
    rope, old = Rope(64, theta=500000.0), torch.arange(63, device=DEVICE) + 1_000_100
    source, target = slots(63)
    key = normal(63, 2, 64, seed=4)
    keys = torch.zeros(1, NUM_SLOTS, 2, 64, dtype=dtype, device=DEVICE)
    keys[0, source] = rotate(key, *rope.table(old)).to(dtype)

    align_copy(
        keys,
        keys.clone(),
        range(1),
        source,
        target,
        *rope.table(old * 0 + shift),
        implementation=implementation,
    )

    error = pair_norms(keys[0, target].float() - rotate(key, *rope.table(old + shift)))
    num_roundings = (
        3 if implementation == "triton" and DEVICE == "cpu" else 2
    )  # its interpreter truncates: counts twice
    allowed = num_roundings * ROUNDOFF[dtype] * (1 + ROUNDOFF[dtype]) + 12 * ROUNDOFF[torch.float32]
    assert bool((error <= allowed * pair_norms(key)).all())


@every_implementation
def test_there_and_back(implementation: str) -> None:
    rope, (source, target) = Rope(80), slots(63)
    keys, values = normal(2, 1, NUM_SLOTS, 2, 80, seed=5)
    start = keys[0, source].clone()
    for old, new, sign in ((source, target, 1), (target, source, -1)):
        align_copy(
            keys,
            values,
            range(1),
            old,
            new,
            *rope.table(sign * shifts(63)),
            implementation=implementation,
        )
    torch.testing.assert_close(keys[0, source], start, atol=2e-6, rtol=0)


@every_implementation
@pytest.mark.parametrize("shift", [7, -7, 1_000_000])
def test_scores_depend_on_relative_distance_only(implementation: str, shift: int) -> None:
    rope, (source, target) = Rope(64), slots(63)
    positions = torch.arange(63, device=DEVICE) + 100
    query = normal(63, 1, 64, seed=6)
    keys, values = normal(2, 1, NUM_SLOTS, 1, 64, seed=7)
    keys[0, source] = rotate(normal(63, 1, 64, seed=8), *rope.table(positions))
    before = torch.einsum("nhd,thd->nt", rotate(query, *rope.table(positions + 9)), keys[0, source])

    moved = rope.table(torch.full_like(positions, shift))
    align_copy(keys, values, range(1), source, target, *moved, implementation=implementation)

    after = torch.einsum(
        "nhd,thd->nt", rotate(query, *rope.table(positions + 9 + shift)), keys[0, target]
    )
    torch.testing.assert_close(after, before, atol=64 * 2e-6, rtol=0)


@every_implementation
def test_no_shift_copies_bit_for_bit(implementation: str) -> None:
    source, target = slots(63)
    keys, values = normal(2, NUM_LAYERS, NUM_SLOTS, 2, 64, seed=9).bfloat16()
    still = Rope(64).table(torch.zeros(63, dtype=torch.int64, device=DEVICE))
    align_copy(
        keys, values, range(NUM_LAYERS), source, target, *still, implementation=implementation
    )
    assert torch.equal(keys[:, target], keys[:, source])
    assert torch.equal(values[:, target], values[:, source])


@every_implementation
def test_pool_with_keys_and_values_side_by_side(implementation: str) -> None:
    """Strides other than those of a pool of its own: [L, slots, 2, H, D]."""
    both = normal(NUM_LAYERS, NUM_SLOTS, 2, 2, 64, seed=10)
    keys, values = both.unbind(2)
    (source, target), cos_sin = slots(63), Rope(64).table(shifts(63))
    expected = rotate(keys[2, source], *cos_sin)
    align_copy(keys, values, range(2, 3), source, target, *cos_sin, implementation=implementation)
    torch.testing.assert_close(both[2, target, 0], expected, atol=2e-6, rtol=0)
    assert torch.equal(both[2, target, 1], both[2, source, 1])


@every_implementation
def test_keys_that_are_values_too(implementation: str) -> None:
    """Of latent attention, where only the last pairs of each half turn."""
    keys = normal(NUM_LAYERS, NUM_SLOTS, 1, 48, seed=11)
    (source, target), (cos, sin) = slots(63), Rope(48, rotary_dim=16).table(shifts(63))
    expected = keys.clone()
    expected[2, target] = rotate(keys[2, source], cos, sin)
    align_copy(keys, None, range(2, 3), source, target, cos, sin, implementation=implementation)
    torch.testing.assert_close(keys, expected, atol=2e-6, rtol=0)
    still = [*range(16), *range(24, 40)]
    assert torch.equal(keys[2, target][..., still], keys[2, source][..., still])


LAYOUTS = ["by head", "by token", "interleaved layers"]


def paged(layout: str, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Layers [pages, 3 heads, 16, W] as backends of vLLM lay them out; what nobody wrote is NaN."""
    shape = {
        "by head": (NUM_LAYERS, 10, 3, 16, width),
        "by token": (NUM_LAYERS, 10, 16, 3, width),
        "interleaved layers": (10, NUM_LAYERS, 16, 3, width),
    }[layout]
    pool = torch.full(shape, float("nan"), device=DEVICE).to(dtype)
    if layout == "interleaved layers":
        pool = pool.transpose(0, 1)
    return [layer if layout == "by head" else layer.transpose(1, 2) for layer in pool]


@every_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("width", "turning", "first", "interleaved"),
    [(128, 64, 0, False), (96, 32, 8, False), (96, 32, 64, True), (48, 0, 0, False)],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_paged(
    implementation: str,
    layout: str,
    width: int,
    turning: int,
    first: int,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    """Channels that do not turn arrive bit for bit; what is neither source nor target stays as it
    is."""
    source, target = slots(63)
    caches = paged(layout, width, dtype)[::-1]
    rows = [
        cache.view(torch.uint8 if dtype.itemsize == 1 else dtype).transpose(1, 2)
        for cache in caches
    ]
    content = (8 * normal(NUM_LAYERS, 63, 3, width, seed=5)).to(dtype)
    for layer, given in zip(rows, content, strict=True):
        layer[source // 16, source % 16] = given.view(layer.dtype)
    before = [layer.clone() for layer in rows]
    cos, sin = (
        Rope(turning).table(shifts(63)) if turning else (torch.zeros(63, 0, device=DEVICE),) * 2
    )

    align_paged(
        caches,
        source,
        target,
        cos,
        sin,
        first=first,
        interleaved=interleaved,
        implementation=implementation,
    )

    still = [channel for channel in range(width) if not first <= channel < first + turning]
    for old, new, given in zip(before, rows, content, strict=True):
        arrived = new[target // 16, target % 16].view(dtype)
        assert torch.equal(arrived[..., still].float(), given[..., still].float())
        expected = rotate_part(given.float(), cos, sin, first, interleaved)
        # its interpreter loses a carry
        if implementation == "triton" and DEVICE == "cpu" and dtype.itemsize == 1:
            carries = expected.frexp().mantissa.abs() >= 1 - torch.finfo(dtype).eps / 4
            expected = torch.where(carries, arrived.float(), expected)
        step = {torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}.get(
            dtype, 4 * ROUNDOFF.get(dtype, 0)
        )
        torch.testing.assert_close(
            arrived.float(), expected, rtol=step, atol=2e-2 if dtype.itemsize == 1 else 1e-4
        )
        new[target // 16, target % 16] = old[target // 16, target % 16]
        assert torch.equal(new.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"caches": [torch.zeros(2, 1, 8, 32), torch.zeros(2, 1, 16, 32)]}, "layers must be alike"),
        ({"caches": [torch.zeros(2, 1, 8, 32, dtype=torch.int8)]}, "int8"),
        ({"caches": [torch.zeros(2, 1, 32, 8).transpose(2, 3)]}, "strides"),
        ({"first": 2}, "channels 2 to 34 turn: rows have 32"),
        ({"sin": torch.zeros(3, 4)}, "sin must be"),
    ],
)
def test_arguments_of_paged_that_are_refused(changed: dict, message: str) -> None:
    given = {
        "caches": [torch.zeros(2, 1, 8, 32)] * 2,
        "source": torch.arange(3),
        "target": torch.arange(3, 6),
        "cos": torch.ones(3, 16),
        "sin": torch.zeros(3, 16),
    }
    with pytest.raises(ValueError, match=message):
        align_paged(**given | changed)


def test_more_tokens_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk is smaller; one has no shift at all, and the one after it only begins so."""
    monkeypatch.setattr(cpu_align, "CHUNK_ELEMENTS", 10 * 64)
    (source, target), shift = slots(63), shifts(63)
    shift[10:21] = 0
    keys, values = normal(2, 1, NUM_SLOTS, 1, 64, seed=11)
    expected = rotate(keys[0, source], *Rope(64).table(shift))
    align_copy(keys, values, range(1), source, target, *Rope(64).table(shift), implementation="cpu")
    torch.testing.assert_close(keys[0, target], expected, atol=2e-6, rtol=0)
    assert torch.equal(values[0, target], values[0, source])


def test_the_device_decides_unless_the_caller_does() -> None:
    assert kernel("align_copy", "cpu").__module__ == "kvgraft.kernels.cpu.align"
    assert kernel("align_copy", "cpu", "reference").__module__ == "kvgraft.kernels.reference.align"
    if "triton" in IMPLEMENTATIONS:
        assert kernel("align_copy", "cuda").__module__ == "kvgraft.kernels.triton.align"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'metal' of align_copy: allowed are reference, cpu, triton"
    ):
        kernel("align_copy", "cpu", "metal")
    with pytest.raises(ValueError, match=r"'align': allowed are .*align_copy"):
        kernel("align", "cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys": torch.zeros(2, 8, 1, 33)}, "even D"),
        ({"keys": torch.zeros(2, 8, 1, 32, dtype=torch.float64)}, "float64"),
        ({"keys": torch.zeros(2, 8, 1, 64)[..., ::2]}, "strides"),
        ({"values": torch.zeros(2, 8, 1, 16)}, "values must be as keys"),
        ({"layers": range(1, 3)}, r"within \[0, 2\)"),
        ({"layers": range(-1, 1)}, r"within \[0, 2\)"),
        ({"source": torch.zeros(3, dtype=torch.int32)}, "source must be"),
        ({"target": torch.zeros(2, dtype=torch.int64)}, "target must be"),
        ({"cos": torch.ones(3, 32)}, "cos must be"),
        ({"sin": torch.zeros(16, 3).T}, "sin must be"),
    ],
)
def test_arguments_that_are_refused(changed: dict, message: str) -> None:
    given = {
        "keys": torch.zeros(2, 8, 1, 32),
        "values": torch.zeros(2, 8, 1, 32),
        "layers": range(2),
        "source": torch.arange(3),
        "target": torch.arange(3, 6),
        "cos": torch.ones(3, 16),
        "sin": torch.zeros(3, 16),
    }
    with pytest.raises(ValueError, match=message):
        align_copy(**given | changed)
