"""The demonstration: three applications, each under three policies, on the bundled model or one of the user's own."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.segments.prompt import Segment
from kvgraft.testbed.scenarios import Item, Prompt, make_scenarios

POLICIES = ("full", "naive", "sparsex")
MAX_TOKENS = 4  # enough for the first word of an answer in a subword vocabulary

Outcomes = Mapping[str, Result]  # of one prompt, by policy


@dataclass(frozen=True)
class PolicyRow:
    """What one policy did on `num_prompts` prompts.

    Attributes:
        ttft_ms: median time to the first token, in milliseconds.
        speedup: median over prompts of the time of `full` divided by the time of this policy.
        reused: grafted tokens as a share of the prompt tokens.
        recomputed: tokens computed again in the last layer, as a share of the grafted tokens.
        right: answers whose first word is the expected one, whatever their case.
        same_as_full: answers whose first word is that of `full`.
        fallbacks: prompts whose grafts were found and not used.
    """

    policy: str
    num_prompts: int
    ttft_ms: float
    speedup: float
    reused: float
    recomputed: float
    right: int
    same_as_full: int
    fallbacks: int


@dataclass(frozen=True)
class ScenarioTable:
    """One row per policy, in the order of `POLICIES`."""

    name: str
    description: str
    rows: tuple[PolicyRow, ...]


@dataclass(frozen=True)
class DemoReport:
    """All tables, the rows over all scenarios together, and one sentence that says what they show."""

    seed: int
    items: int
    tables: tuple[ScenarioTable, ...]
    overall: tuple[PolicyRow, ...]
    summary: str


def run_demo(
    engine: Engine, *, seed: int = 0, items: int = 10, on_progress: Callable[[int, int], None] | None = None
) -> DemoReport:
    """Run every scenario under every policy.

    An item begins with an empty cache, then the engine reads the prompts of phase 1. The prompts of phase 2 leave
    nothing behind, so that all policies reuse the same pages; they follow one another prompt by prompt.

    Args:
        engine: on the bundled model, or on another one, whose answers may be wrong.
        seed, items: of the scenarios; `items` of each.
        on_progress: called with the number of requests done, and of all requests.

    Raises:
        ValueError: `items` is below 1; the model cannot take a prompt (too long for it, say).
    """
    scenarios = make_scenarios(seed, items)
    all_items = [item for scenario in scenarios for item in scenario.items]
    total = sum(len(item.phase_1) + len(item.phase_2) * len(POLICIES) for item in all_items)
    steps = iter(range(1, total + 1))

    def advance() -> None:
        if on_progress is not None:
            on_progress(next(steps), total)

    _run_item(engine, all_items[0], lambda: None)  # warm-up
    outcomes = {s.name: [o for item in s.items for o in _run_item(engine, item, advance)] for s in scenarios}
    tables = tuple(ScenarioTable(s.name, s.description, _rows(outcomes[s.name])) for s in scenarios)
    overall = _rows()
    return DemoReport(seed, items, tables, overall, _summary(overall))
