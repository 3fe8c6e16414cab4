"""Times of decode steps on a context of random keys and values. Only their cost has a meaning, not
the chosen blocks.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request
from kvgraft.engine.sampling import SamplingParams
from kvgraft.engine.sparse import SparseDecode
from kvgraft.engine.step_graphs import StepGraphs
from kvgraft.flows import DENSE, parse_flow

Step = Callable[[], object]


class Steps:
    """Sequences of equal length in the pool of an idle engine. Their pages are never released.

    Args:
        context: tokens of a sequence, including the one that a step computes.
        batch: number of sequences.

    Raises:
        RequestError, PoolExhausted: the sequences do not fit.
    """

    def __init__(self, engine: Engine, context: int, batch: int) -> None:
        self._engine = engine
        engine.clear_cache()
        for pool in engine.memory.cache.pools:
            pool.normal_()

        tokens = (
            np.random.default_rng(0).integers(0, engine.config.vocab_size, context - 1).tolist()
        )
        self._sequences = engine.occupy(
            [
                Request(tokens, "full", SamplingParams(2), namespace=str(number))
                for number in range(batch)
            ]
        )
        for sequence in self._sequences:
            sequence.tokens.append(tokens[0])

    def under(self, flow: str) -> Step:
        """Return a step under this flow. It can be repeated."""
        return self.of(flow)[0]

    def of(self, flow: str, *, enforce_eager: bool = False) -> tuple[Step, StepGraphs]:
        """Return a step under this flow, and the graphs that count its runs."""
        engine, sequences = self._engine, [copy.copy(sequence) for sequence in self._sequences]
        for sequence in sequences:
            sequence.flow, sequence.num_indexed = parse_flow(flow), 0
        own = SparseDecode(engine.memory.cache, engine.config.group)
        steps = StepGraphs(engine.decoder, engine.memory.cache, own, enforce_eager=enforce_eager)
        return partial(steps.decode, sequences), steps


def in_turn(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step in every round, after three warm-up rounds that capture CUDA
    graphs.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-3, rounds):
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            step()
            wait()
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def wait() -> None:
    """Wait until the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.inference_mode()
def speedups(
    engine: Engine, flows: Sequence[str], context: int, rounds: int = 15
) -> dict[str, tuple[float, float]]:
    """Return for each flow the decode speed of one sequence of `context` tokens.

    Returns:
        Tokens per second, and speed relative to dense attention.
    """
    steps = Steps(engine, context, 1)
    found: dict[str, tuple[float, float]] = {}
    for flow in flows:  # two at a time: caches of many flows would not fit the pool's memory
        times = in_turn({DENSE: steps.under(DENSE), flow: steps.under(flow)}, rounds)
        ratio = statistics.median(
            dense / own for dense, own in zip(times[DENSE], times[flow], strict=True)
        )
        found[flow] = 1.0 / statistics.median(times[flow]), ratio
    engine.scheduler.abort(list(engine.scheduler.running))
    return found
