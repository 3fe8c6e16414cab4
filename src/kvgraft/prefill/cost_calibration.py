"""Measurement of the costs of copying, recovery and prefill, for one model on one machine."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvgraft.core.costs import Costs, count_pairs
from kvgraft.core.matches import Match
from kvgraft.core.plan import Plan
from kvgraft.prefill.context import PrefillContext

# Runs of each pass. Small passes run more often, since other load delays them most.
REPEATS = 3
SMALL_REPEATS = 10
CPU = (16, 128, 1024)  # tokens of a small and of a large pass, and of a prompt
GPU = (128, 2048, 4096)


def calibrate(
    context: Callable[[Plan], PrefillContext],
    num_layers: int,
    block_size: int,
    length: int,
    *,
    on_gpu: bool,
) -> Costs:
    """Measure the costs of a model.

    On a GPU all layers are measured, since the host launches one while another is computed. On a
    CPU the first layer stands for all.

    Args:
        context: makes a prefill pass of a prompt with this plan, in blocks without content.
        length: tokens that fit into these blocks; more than needed are not used.
    """
    few, many, most = (-(-count // block_size) * block_size for count in sizes(on_gpu))
    length = min(length // block_size * block_size, most)
    many = min(many, length)
    few = min(few, many // 2 // block_size * block_size or many)
    shapes = [(few, few), (many, many), (few, length), (many, length)]
    repeats = [SMALL_REPEATS if count == few else REPEATS for count, _ in shapes]
    layers = range(num_layers if on_gpu else 1)
    seconds = np.array(
        [
            _pass_seconds(context, layers, block_size, *shape, times)
            for shape, times in zip(shapes, repeats, strict=True)
        ]
    )
    rows = np.array(
        [(1, count, count_pairs(tokens - count, tokens)) for count, tokens in shapes], float
    )
    copied = _copy_seconds(context, layers, block_size, length) / (length - 1)

    return Costs(
        *(num_layers / len(layers) * float(found) for found in (*_fit(rows, seconds), copied))
    )


def sizes(on_gpu: bool) -> tuple[int, int, int]:
    """Tokens of a small pass, a large pass and the prompt that are measured."""
    return GPU if on_gpu else CPU


def _fit(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Fit non-negative coefficients to the measured seconds, by least squares of relative
    errors."""
    relative, found = rows / seconds[:, None], np.zeros(rows.shape[1])
    used = np.ones(rows.shape[1], bool)
    while used.any():
        values = np.linalg.lstsq(relative[:, used], np.ones(len(seconds)), rcond=None)[0]
        if (values >= 0).all():
            found[used] = values
            break
        used[np.flatnonzero(used)[values.argmin()]] = False
    return found


def _pass_seconds(
    context: Callable[[Plan], PrefillContext],
    layers: range,
    size: int,
    rows: int,
    length: int,
    repeats: int,
) -> float:
    """Seconds of these layers for the last `rows` tokens of a prompt whose other tokens are
    cached."""
    plan = Plan.for_prompt(length, size, range((length - rows) // size))

    def prepared() -> Callable[[], object]:
        ctx = context(plan)
        return partial(ctx.run, layers, ctx.embed(plan.active))

    return _least(prepared, repeats)


def _copy_seconds(
    context: Callable[[Plan], PrefillContext], layers: range, size: int, length: int
) -> float:
    """Seconds of the copy of a prompt except its last token in these layers, from the first blocks
    of the pool."""
    plan = Plan.for_prompt(
        length, size, (), [Match(0, length, 0, np.arange(length // size, dtype=np.int32), 0, 0)]
    )
    return _least(lambda: partial(context(plan).graft, layers), SMALL_REPEATS)


def _least(make: Callable[[], Callable[[], object]], repeats: int) -> float:
    """Return the seconds of the fastest of some runs; each waits for the device.

    Each run does the same work twice, and only the second time counts. The first one also makes
    data that all layers share (slots, layouts, metadata), which must not be counted for every
    layer.
    """
    seconds = []
    for _ in range(repeats):
        work = make()
        work()
        _wait()
        started = time.perf_counter()
        work()
        _wait()
        seconds.append(time.perf_counter() - started)
    return max(min(seconds), 1e-9)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
