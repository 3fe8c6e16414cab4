"""Choice of a kernel's implementation, by device or by the caller. Modules are imported on first
use.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.watched import watched
from kvgraft.kernels.workload import Lengths


def _in_torch(module: str) -> dict[str, str]:
    """Return the modules of a kernel whose reference in plain torch also serves the CPU."""
    torch_module = f"kvgraft.kernels.reference.{module}"
    return {
        "reference": torch_module,
        "cpu": torch_module,
        "triton": f"kvgraft.kernels.triton.{module}",
    }


# kernel -> implementation -> the module with a function of that name
_KERNELS = {
    "add_norm": _in_torch("rows"),
    "align_copy": {
        name: f"kvgraft.kernels.{name}.align" for name in ("reference", "cpu", "triton")
    },
    "align_paged": _in_torch("align"),
    "anchors_nearby": _in_torch("changes"),
    "attention_mass": {
        "reference": "kvgraft.kernels.reference.attention",
        "cpu": "kvgraft.kernels.cpu.attention",
        "triton": "kvgraft.kernels.triton.mass",
    },
    "average_changes": _in_torch("changes"),
    "block_sparse_attention": {
        name: f"kvgraft.kernels.{name}.sparse" for name in ("reference", "cpu", "triton")
    },
    "copy_changed": _in_torch("changes"),
    "generated": {"triton": "kvgraft.kernels.triton.generated"},
    "generated_choice": {"triton": "kvgraft.kernels.triton.generated"},
    "kv_changes": _in_torch("changes"),
    "norm_rotate": _in_torch("rows"),
    "page_topk": _in_torch("topk"),
    "radix_topk": {name: f"kvgraft.kernels.{name}.topk" for name in ("reference", "cpu", "triton")},
    "read_rows": _in_torch("rows"),
    "segpaged_attention": {
        name: f"kvgraft.kernels.{name}.attention" for name in ("reference", "cpu", "triton")
    },
    "silu_mul": _in_torch("rows"),
    "write_rows": _in_torch("rows"),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# dtypes of quantised caches
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


@cache
def kernel(name: str, device_type: str, implementation: str | None = None) -> Callable[..., Any]:
    """Return the implementation of a kernel that the caller names, else the one for the device.

    Triton serves CUDA. The plain torch of `cpu` serves every other device, and CUDA without Triton.

    Raises:
        ValueError: no such kernel, or it has no such implementation.
    """
    if name not in _KERNELS:
        raise ValueError(f"kernel {name!r}: allowed are {', '.join(_KERNELS)}")
    modules = _KERNELS[name]
    if implementation is None:
        implementation = "triton" if "triton" in modules and has_triton(device_type) else "cpu"
    if implementation not in modules:
        raise ValueError(
            f"implementation {implementation!r} of {name}: allowed are {', '.join(modules)}"
        )
    return getattr(import_module(modules[implementation]), name)


def has_triton(device_type: str) -> bool:
    """Return whether Triton serves a device."""
    return device_type == "cuda" and find_spec("triton") is not None


def generates(device_type: str, implementation: str | None = None) -> bool:
    """Return whether generated kernels run: with `triton`, and by default on CUDA with Triton."""
    return implementation == "triton" or (implementation is None and has_triton(device_type))


def generated(
    text: str,
    name: str,
    tensors: Sequence[Tensor],
    blocks: tuple[Tensor, Lengths],
    tile: int,
    heads: int = 1,
) -> None:
    """Run a kernel of generated Triton source; see `kvgraft.decode.codegen.Source` for its
    arguments.

    Args:
        text: source of a module.
        name: name of the kernel function in it.
        tensors: inputs and outputs; without blocks the first is [S, ...].
        blocks: table int64 [S, B] of rows, and the number of blocks of each sequence.
        tile: blocks that a program takes at a time; 0 without blocks.
        heads: Hkv of keys and values [blocks, Hkv, b, d].
    """
    kernel("generated", tensors[0].device.type, "triton")(text, name, tensors, blocks, tile, heads)


@watched("top-k")
def generated_choice(
    text: str, name: str, tensors: Sequence[Tensor], blocks: tuple[Tensor, Tensor, int], width: int
) -> tuple[Tensor, Tensor]:
    """Run a kernel of generated Triton source that chooses pages; see
    `kvgraft.decode.fused.Choice`.

    Args:
        text: source of a module.
        name: name of the kernel function in it.
        tensors: inputs, and caches that the kernel changes.
        blocks: table int64 [S, B] of rows, tokens of each sequence int64 [S], and the number of
            full blocks of the longest sequence.
        width: maximum number of pages that are chosen for a sequence.

    Returns:
        Tables and lengths as of `page_topk`.
    """
    run = kernel("generated_choice", blocks[0].device.type, "triton")
    tables, lengths = run(text, name, tensors, blocks, width)
    return tables, lengths


def align_copy(
    keys: Tensor,
    values: Tensor | None,
    layers: range,
    source: Tensor,
    target: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Copy tokens to other slots and rotate their keys by R(new - old); values move unchanged
    (SparseX, section 3.1).

    For every layer, in place: `keys[layer, target] = rotate(keys[layer, source])` and
    `values[layer, target] = values[layer, source]`. One call takes all tokens of a step, of any
    number of requests.

    Args:
        keys, values: [L, num_slots, Hkv, D], the paged pool; float32, bfloat16 or float16, each row
            [D] contiguous. `values` is None where the keys also serve as values (MLA).
        layers: layers to copy, within [0, L).
        source, target: slots, int64 [n], valid and disjoint: no target may be a source or appear
            twice (not checked).
        cos, sin: tables of the shifts `new - old`, float32 [n, D / 2] (`Rope.table`).
        implementation: reference | cpu | triton; by default the device decides.

    Raises:
        ValueError: a shape, dtype, layer or implementation that is not allowed.
    """
    run = kernel("align_copy", keys.device.type, implementation)
    _check_pool(keys, values, layers)
    n, half = source.numel(), keys.shape[-1] // 2
    _check_moves(keys.device, n, half, source=source, target=target, cos=cos, sin=sin)
    if n and layers:
        run(keys, values, layers, source, target, cos, sin)


def align_paged(
    caches: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    first: int = 0,
    interleaved: bool = False,
    implementation: str | None = None,
) -> None:
    """Copy tokens of all layers as `align_copy` does, for caches with one tensor of pages per
    layer.

    A row holds what the cache keeps of a token for one head: keys and any other channels. Some
    channels rotate, all others move unchanged. A scale common to all numbers of a cache makes no
    difference.

    Args:
        caches: one tensor per layer, [pages, Hkv, b, W], with equal shape, strides, dtype and
            device. float32, bfloat16, float16 or 8-bit floats; the last stride must be 1.
        source, target: slots, page * b + offset, int64 [n], valid and disjoint (not checked).
        cos, sin: tables of the shifts `new - old`, float32 [n, R / 2]; no channel rotates if R is
            0.
        first: first of the R channels that rotate.
        interleaved: pair channel 2i of these with 2i + 1, instead of i with i + R / 2.
        implementation: reference | cpu | triton; by default the device decides.

    Raises:
        ValueError: a shape, dtype or implementation that is not allowed.
    """
    if not caches or not source.numel():
        return

    cache, n = caches[0], source.numel()

    for other in caches:
        form = other.shape, other.stride(), other.dtype, other.device
        if form != (cache.shape, cache.stride(), cache.dtype, cache.device):
            raise ValueError(
                f"{_describe(other)}: layers must be alike, the first is {_describe(cache)}"
            )

    if cache.dim() != 4 or cache.stride(-1) != 1 or cache.dtype not in (*_DTYPES, *_CODES):
        raise ValueError(
            f"{_describe(cache)}, strides {cache.stride()}: caches must be [pages, Hkv, b, W] in "
            f"{_DTYPES}"
        )

    half = cos.shape[-1]
    if not 0 <= first <= first + 2 * half <= cache.shape[-1]:
        raise ValueError(
            f"channels {first} to {first + 2 * half} turn: rows have {cache.shape[-1]}"
        )

    _check_moves(cache.device, n, half, source=source, target=target, cos=cos, sin=sin)
    kernel("align_paged", cache.device.type, implementation)(
        caches, source, target, cos, sin, first, interleaved
    )


@watched("attention")
def segpaged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: LayerHeads,
    layout: AttentionLayout,
    scale: float,
    output: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Causal attention of scattered queries to the tokens that each KV head keeps of their prompts
    (RedKnot, Algorithm 2).

    One call serves all heads of a layer and all prompts of a step, in prefill and decode. A head
    reads only the pages of its own list. With one list for all heads this is varlen paged
    attention.

    Args:
        query: [n, Hq, d], rows as in `layout`; Hq is a multiple of Hkv (GQA).
        keys, values: [streams, num_slots, d], the pool; in the dtype of `query`, or 8-bit floats
            that are converted when they are read. A scale of keys belongs into `scale`, and one of
            values applies to the result.
        heads: streams, page lists and visibility of the layer's KV heads.
        layout: queries, and the places of their contexts in the pool.
        scale: factor of the logits, usually d ** -0.5.
        output: contiguous tensor for the result; by default a new one.
        implementation: reference | cpu | triton; by default the device decides.

    Returns:
        [n, Hq, d] in the dtype of `query`.
    """
    if not len(query):
        return torch.empty_like(query)
    run = kernel("segpaged_attention", keys.device.type, implementation)
    attended: Tensor = run(query, keys, values, heads, layout, scale, output)
    return attended


def attention_mass(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    reduction: str = "sum",
    counts: Sequence[tuple[int, int]] = (),
    *,
    implementation: str | None = None,
) -> Tensor:
    """Softmax attention that each key receives, over queries and heads (SparseX Eq. 1 and 2).

    Args:
        query: [n, Hq, d] at `positions` int64 [n], ascending in each prompt. A query at -1 sees no
            key.
        keys: [T, Hkv, d] of positions 0.. of each prompt; key j is visible to query i of its prompt
            if j <= positions[i].
        scale: factor of the logits, usually d ** -0.5.
        reduction: sum | max over queries and heads.
        counts: queries and keys of each prompt; prompts lie end to end. By default there is one.
        implementation: reference | cpu | triton; by default the device decides.

    Returns:
        float32 [T]; sums to n * Hq under `sum`.

    Raises:
        ValueError: another reduction.
    """
    if reduction not in ("sum", "max"):
        raise ValueError(f"reduction must be sum or max, got {reduction!r}")
    if not positions.numel():
        return torch.zeros(len(keys), dtype=torch.float32, device=keys.device)
    run = kernel("attention_mass", keys.device.type, implementation)
    mass: Tensor = run(
        query, keys, positions, scale, reduction, counts or [(len(query), len(keys))]
    )
    return mass


@watched("attention")
def block_sparse_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    bound: Lengths | None = None,
    sinks: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Attention of one query token per sequence to some of its blocks. Each KV head is a sequence
    with its own table.

    Any paged decode kernel that takes tables and lengths could replace it.

    Args:
        query: [S, g, d], the queries of a KV head.
        keys: [pages, b, d], or [blocks, Hkv, b, d] with any strides, in which page p is head p %
            Hkv of block p // Hkv.
        values: the same as `keys`, with dv channels.
        tables: int64 [S, m], pages of the blocks. A partly filled block is the last; any page may
            follow.
        lengths: int64 [S], tokens in these blocks; the result is zero for 0.
        scale: factor of the logits, usually d ** -0.5.
        bound: upper bound of `lengths`, if several calls share the plan that divides the work among
            programs.
        sinks: float32 [Hkv, g], contiguous: a logit of each query head that adds to the softmax's
            denominator only (gpt-oss). Sequence s is head s % Hkv.
        implementation: reference | cpu | triton; by default the device decides.

    Returns:
        [S, g, dv] in the dtype of `query`.
    """
    run = kernel("block_sparse_attention", keys.device.type, implementation)
    attended: Tensor = run(query, keys, values, tables, lengths, scale, bound, sinks)
    return attended


@watched("top-k")
def radix_topk(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    tolerance: float = 0.0,
    *,
    remap: bool = True,
    implementation: str | None = None,
) -> Tensor:
    """The k best columns of each row (Vortex, section 5.2). Histograms of digits narrow down the
    k-th best score.

    Args:
        scores: float32 [S, n]; columns with a score of minus infinity are never chosen.
        lengths: int64 [S], columns of each row.
        k: at least 1.
        tolerance: share of k that may be taken unranked from the bin of the k-th best, evenly over
            the row; the bin is then not refined. 0 is exact, 1 looks at one digit.
        remap: take the first digit from the place of the score between the least and the greatest,
            so that bins are equally full for most distributions. Otherwise take it from the score's
            bits (section 11.2).
        implementation: reference | cpu | triton; by default the device decides. The reference is
            always exact.

    Returns:
        int64 [S, k], unordered; -1 at the end of rows with fewer columns.

    Raises:
        ValueError: a k or a tolerance out of range.
    """
    if k < 1 or not 0.0 <= tolerance <= 1.0:
        raise ValueError(
            f"k must be at least 1 and tolerance a share from 0 to 1, got {k} and {tolerance}"
        )
    if not scores.numel():
        return torch.full((len(scores), k), -1, device=scores.device)
    found: Tensor = kernel("radix_topk", scores.device.type, implementation)(
        scores, lengths, k, tolerance, remap
    )
    return found


@watched("top-k")
def page_topk(
    scores: Tensor,
    rows: Tensor,
    tokens: Tensor,
    size: int,
    always: tuple[int, int],
    k: int,
    tolerance: float = 0.0,
    *,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best blocks of each sequence, and the blocks that are always attended to, as tables for
    paged attention.

    Args:
        scores: float32 [S, B] with any row stride. Never chosen are columns with a score of minus
            infinity, and columns without a full block.
        rows: int64 [S, >= blocks], the page of each block.
        tokens: int64 [S], tokens of each sequence.
        size: tokens of a block.
        always: number of blocks at the beginning and at the end that are always attended to. The
            partly filled block is one of the latter.
        k, tolerance: as of `radix_topk`.
        implementation: reference | triton; by default the device decides. The reference is always
            exact.

    Returns:
        Tables int64 [S, n], pages in order, then the last one repeated, and the tokens in them,
        int64 [S].
    """
    run = kernel("page_topk", scores.device.type, implementation)
    tables, lengths = run(scores, rows, tokens, size, always, k, tolerance)
    return tables, lengths


def _check_pool(keys: Tensor, values: Tensor | None, layers: range) -> None:
    """Raise ValueError unless pool and layers are allowed for `align_copy`."""
    if keys.dim() != 4 or keys.shape[-1] % 2 or keys.dtype not in _DTYPES:
        raise ValueError(
            f"{_describe(keys)}: keys must be [L, slots, Hkv, even D] of one of {_DTYPES}"
        )
    for pool in (keys,) if values is None else (keys, values):
        if pool.shape != keys.shape or pool.dtype != keys.dtype or pool.device != keys.device:
            raise ValueError(f"{_describe(pool)}: values must be as keys, {_describe(keys)}")
        if pool.stride(-1) != 1:
            raise ValueError(f"strides {pool.stride()}: the last must be 1")
    if layers and not 0 <= min(layers) <= max(layers) < keys.shape[0]:
        raise ValueError(f"{layers}: layers must be within [0, {keys.shape[0]})")


def _check_moves(device: torch.device, n: int, half: int, **given: Tensor) -> None:
    """Raise ValueError unless slots are int64 [n] and tables float32 [n, half], contiguous on the
    device.
    """
    for name, tensor in given.items():
        shape, dtype = ((n, half), torch.float32) if name in ("cos", "sin") else ((n,), torch.int64)
        if (
            tensor.shape != shape
            or tensor.dtype != dtype
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{_describe(tensor)}: {name} must be contiguous {dtype} {list(shape)} on {device}"
            )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
