"""Measured costs of this machine for the cost model, and the resulting times of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.core.costs import Costs, count_pairs
from kvgraft.engine.costs import measure_costs
from kvgraft.engine.engine import Engine
from kvgraft.methods import require_share
from kvgraft.prefill.cost_calibration import sizes

# lengths of prompts in tokens
PROMPTS = (1024, 4096, 16384)


@dataclass(frozen=True)
class PromptSeconds:
    """Times of a prompt: computed in full, or grafted except for the last token.

    A grafted prompt is copied, and a share of it is recomputed.
    """

    tokens: int
    full_s: float
    grafted_s: float
    copied_s: float


@dataclass(frozen=True)
class CostProfile:
    """Measured costs, and the resulting times of prompts.

    Attributes:
        costs: measured costs.
        measured_tokens: tokens of the longest measured prompt; times of longer ones are
            extrapolated.
        recomputed_share: share of grafted tokens that are recomputed.
        prompts: times of prompts.
    """

    costs: Costs
    measured_tokens: int
    recomputed_share: float
    prompts: tuple[PromptSeconds, ...]


def profile(engine: Engine, recomputed_share: float) -> CostProfile:
    """Measure an engine with an empty cache.

    Raises:
        ValueError: `recomputed_share` is not a share.
    """
    require_share("recomputed_share", recomputed_share)
    costs = measure_costs(engine.decoder, engine.memory.cache, engine.max_length)
    measured = min(engine.max_length, sizes(engine.decoder.device.type == "cuda")[-1])
    return CostProfile(costs, measured, recomputed_share, estimate(costs, recomputed_share))


def estimate(
    costs: Costs, recomputed_share: float, lengths: Sequence[int] = PROMPTS
) -> tuple[PromptSeconds, ...]:
    """Return the times of prompts of these lengths."""
    found = []
    for length in lengths:
        grafted, pairs, last = length - 1, count_pairs(0, length), count_pairs(length - 1, length)
        full = costs.computing(length, pairs)
        reuse = costs.grafting(1, last, grafted, pairs - last, recomputed_share)
        found.append(PromptSeconds(length, float(full), float(reuse), costs.copy_s * grafted))
    return tuple(found)


def render(found: CostProfile) -> RenderableType:
    """Return a line for each prompt, and the costs behind it, for a rich console."""
    title = (
        f"seconds to the first token; of what is grafted {found.recomputed_share:.0%} is computed "
        "again"
    )
    table = Table(title=title, title_justify="left")
    for name in ("prompt tokens", "computed", "grafted", "of it copied", "times faster"):
        table.add_column(name, justify="right")

    for one in found.prompts:
        seconds = (f"{value:.4g}" for value in (one.full_s, one.grafted_s, one.copied_s))
        table.add_row(
            f"{one.tokens:,}",
            *seconds,
            f"{one.full_s / one.grafted_s:.1f}" if one.grafted_s else "",
        )

    costs = found.costs
    figures = (
        f"a pass {_duration(costs.pass_s)}; in it a token {_duration(costs.token_s)}, a token that "
        "sees 1,000 others "
        f"{_duration(1000 * costs.pair_s)} more; a token copied {_duration(costs.copy_s)}. "
        "Measured on one layer, with "
        f"prompts of up to {found.measured_tokens:,} tokens"
    )
    return Group(table, Text(figures))


def _duration(seconds: float) -> str:
    """Return a time in a suitable unit."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
