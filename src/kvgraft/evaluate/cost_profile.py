"""How long this machine takes for what the cost model weighs: measured, and what that means for
prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.engine.costs import measure_costs
from kvgraft.engine.engine import Engine
from kvgraft.methods import require_share
from kvgraft.prefill.costs import Costs, count_pairs, sizes

PROMPTS = (1024, 4096, 16384)  # tokens


@dataclass(frozen=True)
class PromptSeconds:
    """Of a prompt of so many tokens: computed in full; or all of it but the last token grafted,
    which is copying it and computing a share of it again."""

    tokens: int
    full_s: float
    grafted_s: float
    copied_s: float


@dataclass(frozen=True)
class CostProfile:
    """Measured costs, and what follows for prompts.

    Attributes:
        measured_tokens: of the longest prompt that was measured; longer ones are extrapolated.
        recomputed_share: of grafted tokens that are computed again.
    """

    costs: Costs
    measured_tokens: int
    recomputed_share: float
    prompts: tuple[PromptSeconds, ...]


def profile(engine: Engine, recomputed_share: float) -> CostProfile:
    """Measure an engine whose cache is empty.

    Raises:
        ValueError: a share that is none.
    """
    require_share("recomputed_share", recomputed_share)
    costs = measure_costs(engine.decoder, engine.memory.cache, engine.max_length)
    measured = min(engine.max_length, sizes(engine.decoder.device.type == "cuda")[-1])
    return CostProfile(costs, measured, recomputed_share, estimate(costs, recomputed_share))


def estimate(
    costs: Costs, recomputed_share: float, lengths: Sequence[int] = PROMPTS
) -> tuple[PromptSeconds, ...]:
    """What prompts of these lengths take."""
    found = []
    for length in lengths:
        grafted, pairs, last = length - 1, count_pairs(0, length), count_pairs(length - 1, length)
        full = costs.computing(length, pairs)
        reuse = costs.grafting(1, last, grafted, pairs - last, recomputed_share)
        found.append(PromptSeconds(length, float(full), float(reuse), costs.copy_s * grafted))
    return tuple(found)


def render(found: CostProfile) -> RenderableType:
    """A line for each prompt, and what that follows from, for a rich console."""
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
    """In the unit that suits it."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
