"""Which implementation of a kernel runs: by device, or as the caller names it. Modules are imported
on first use."""

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
    """Of a kernel whose plain torch is the CPU's, too."""
    torch_module = f"kvgraft.kernels.reference.{module}"
    return {
        "reference": torch_module,
        "cpu": torch_module,
        "triton": f"kvgraft.kernels.triton.{module}",
    }


_KERNELS = {  # kernel -> implementation -> the module that holds a function of that name
    "add_norm": _in_torch("rows"),
    "align_copy": {
        name: f"kvgraft.kernels.{name}.align" for name in ("reference", "cpu", "triton")
    },
    "align_paged": _in_torch("align"),
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
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)  # of quantised caches


@cache
def kernel(name: str, device_type: str, implementation: str | None = None) -> Callable[..., Any]:
    """The implementation of a kernel that the caller names, else the one for the device.

    Triton serves CUDA; the plain torch of `cpu` serves every other device, and CUDA without Triton.

    Raises:
        ValueError: no such kernel, or it has no such implementation.
    """
    if name not in _KERNELS:
        raise ValueError(f"kernel {name!r}: allowed are {', '.join(_KERNELS)}")
    modules = _KERNELS[name]
    if implementation is None:
        implementation = "triton" if "triton" in modules and _has_triton(device_type) else "cpu"
    if implementation not in modules:
        raise ValueError(
            f"implementation {implementation!r} of {name}: allowed are {', '.join(modules)}"
        )
    return getattr(import_module(modules[implementation]), name)


def _has_triton(device_type: str) -> bool:
    return device_type == "cuda" and find_spec("triton") is not None


def generates(device_type: str, implementation: str | None = None) -> bool:
    """Whether generated kernels run: with `triton`, by default on CUDA with Triton."""
    return implementation == "triton" or (implementation is None and _has_triton(device_type))


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
        name: of its function.
        tensors: inputs and outputs; without blocks the first is [S, ...].
        blocks: table int64 [S, B] of rows, and how many of them each sequence has.
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
        name: of its function.
        tensors: inputs, and caches that it changes.
        blocks: table int64 [S, B] of rows, tokens of each sequence int64 [S], and full blocks of
            the longest.
        width: pages of a sequence that are chosen at most.

    Returns:
        As of `page_topk`.
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
    """Copy tokens to other slots and turn their keys by R(new - old); values move unchanged
    (SparseX, section 3.1).

    For every layer, in place: `keys[layer, target] = rotate(keys[layer, source])` and
    `values[layer, target] = values[layer, source]`. All tokens of a step, of any number of
    requests, go in one call.

    Args:
        keys, values: [L, num_slots, Hkv, D], the paged pool; float32, bfloat16 or float16, each row
            [D] contiguous. No values where the keys serve as such (MLA).
        layers: the layers to copy, within [0, L).
        source, target: slots, int64 [n], valid and disjoint: no target may be a source or appear
            twice (not checked).
        cos, sin: of the shifts `new - old`, float32 [n, D / 2] (`Rope.table`).
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
    """As `align_copy`, for caches of which each layer is a tensor of its own, pages of rows: all
    layers in one call.

    A row is what is kept of a token for one head, keys and whatever is kept beside them. Some of
    its channels turn, all others move unchanged. A scale that all numbers of a cache share makes no
    difference.

    Args:
        caches: a layer each, [pages, Hkv, b, W], alike but for where they lie: float32, bfloat16,
            float16 or 8-bit floats, with any strides, the last being 1.
        source, target: slots, page * b + offset, int64 [n], valid and disjoint (not checked).
        cos, sin: of the shifts `new - old`, float32 [n, R / 2]; none turn if R is 0.
        first: of the R channels that turn.
        interleaved: whether channel 2i of these turns with 2i + 1, not i with the one in the other
            half.
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
    """Causal attention of scattered queries to what each KV head keeps of their prompts (RedKnot,
    Algorithm 2).

    One call serves all heads of a layer and all prompts of a step, in prefill and decode; a head
    reads the pages of its own list and no others. With one list that all heads follow it is varlen
    paged attention.

    Args:
        query: [n, Hq, d], rows as in `layout`; Hq is a multiple of Hkv (GQA).
        keys, values: [streams, num_slots, d], the pool.
        heads: where the layer's KV heads lie and what they see.
        scale: of the logits, usually d ** -0.5.
        output: where the result goes, contiguous; by default it is made.
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
        query: [n, Hq, d] at `positions` int64 [n], ascending in each prompt.
        keys: [T, Hkv, d] of positions 0.. of each prompt; key j is visible to query i of its prompt
            if j <= positions[i].
        scale: of the logits, usually d ** -0.5.
        reduction: sum | max over queries and heads.
        counts: queries and keys of each prompt, which lie end to end; by default there is one.
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
    *,
    implementation: str | None = None,
) -> Tensor:
    """Attention of one query token a sequence to some of its blocks, each KV head a sequence with a
    table of its own.

    What a paged decode kernel does for one KV head: any that takes tables and lengths can serve in
    its place.

    Args:
        query: [S, g, d], the queries of a KV head.
        keys: [pages, b, d], or [blocks, Hkv, b, d] with any strides, of which page p is head p %
            Hkv of block p // Hkv; values: the same, of dv channels.
        tables: int64 [S, m], pages of the blocks, the one that is not full last; any page behind
            it.
        lengths: int64 [S], tokens in these blocks; zeros come of none.
        scale: of the logits, usually d ** -0.5.
        bound: at least `lengths`, where several calls shall share the plan of how programs share
            the work.
        implementation: reference | cpu | triton; by default the device decides.

    Returns:
        [S, g, dv] in the dtype of `query`.
    """
    run = kernel("block_sparse_attention", keys.device.type, implementation)
    attended: Tensor = run(query, keys, values, tables, lengths, scale, bound)
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
    """The k best columns of each row (Vortex, section 5.2): histograms of digits narrow down where
    the k-th best is.

    Args:
        scores: float32 [S, n]; columns that are scored minus infinity are never chosen.
        lengths: int64 [S], columns that each row has.
        k: at least 1.
        tolerance: share of k that may be taken at random from the bin of the k-th best: then the
            bin is not refined. 0 is exact, 1 looks at one digit.
        remap: the first digit is of where the score lies between the least and the greatest, so
            that bins hold about as many as they do elsewhere, whatever the distribution; else of
            its bits (section 11.2).
        implementation: reference | cpu | triton; by default the device decides. The reference is
            always exact.

    Returns:
        int64 [S, k], in no order, -1 at the end where a row has less.

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
    """The k best blocks of each sequence beside those that are always attended to, as paged
    attention takes them.

    Args:
        scores: float32 [S, B] with any distance from row to row; columns that are scored minus
            infinity, or that a sequence has no full block for, are never chosen.
        rows: int64 [S, >= blocks], the page of each block.
        tokens: int64 [S], of each sequence.
        size: tokens of a block.
        always: how many blocks at the beginning and at the end, the one that is being filled among
            them.
        k, tolerance: as of `radix_topk`.
        implementation: reference | triton; by default the device decides. The reference is always
            exact.

    Returns:
        Tables int64 [S, n], pages in order, then the last one again, and the tokens in them, int64
        [S].
    """
    run = kernel("page_topk", scores.device.type, implementation)
    tables, lengths = run(scores, rows, tokens, size, always, k, tolerance)
    return tables, lengths


def _check_pool(keys: Tensor, values: Tensor | None, layers: range) -> None:
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
    """Slots [n] and tables [n, half]."""
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
