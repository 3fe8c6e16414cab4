"""The experiments behind docs/results/quality.md: answers of every method on the testbed's task suites.

    python benchmarks/quality.py                    all of them (hours)
    python benchmarks/quality.py main lengths       some

Each writes tables and pictures to docs/results/quality/NAME and goes on where it was stopped. The texts have seeds that
nothing was tuned on (`--seed 1000`); choices were made on seed 1 (`--seed 1 --out elsewhere`).
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvgraft.evaluate import layers, plots, results, runner
from kvgraft.evaluate.hosts import Host, open_host
from kvgraft.evaluate.progress import progress_bar
from kvgraft.evaluate.runner import Row, Settings
from kvgraft.evaluate.tasks import PATTERNS, find_suites
from kvgraft.testbed import MODEL_DIR

HELD_BACK_SEED = 1000
NUM_LAYERS = 8
SEGMENT = 118  # tokens of a segment of the suites at 1024 tokens
METHODS = ("full", "naive", "epic", "cacheblend", "prophet", "sparsex:boundary=0", "sparsex", "transitive")
CHOICES = ("rows=all_fresh", "reduction=max", "rows=all_fresh,reduction=max", "unit=block")
WORK = (0.05, 0.10, 0.20, 0.35)


@dataclass(frozen=True)
class Experiment:
    """One directory of results."""

    policies: tuple[str, ...]
    suites: str = "all"
    lengths: tuple[int, ...] = (1024,)
    items: int = 12
    patterns: tuple[str, ...] = PATTERNS
    host: str = "native"
    segments: int = 8


def _sparsex(work: float, **options: str) -> str:
    """SparseX's rule at this share of the grafted work: one dense layer where that is affordable, else none."""
    boundary = 1 if work > 1.2 / NUM_LAYERS else 0
    dense = boundary / NUM_LAYERS
    topk = (work - dense) / (1 - dense)
    more = "".join(f",{name}={value}" for name, value in options.items())
    return f"sparsex:boundary={boundary},topk={topk:.4f},overflow_blocks=0{more}"


def _rules(work: float) -> tuple[str, ...]:
    """Ways to choose tokens, at equal work."""
    after_check = max(0.0, (work - 1 / NUM_LAYERS) / (1 - 1 / NUM_LAYERS))
    dense = (f"cacheblend:share={after_check:.4f}",) if after_check else ()
    return (
        _sparsex(work),
        _sparsex(work, rows="question"),
        _sparsex(work, reduction="max"),
        _sparsex(work, unit="block"),
        *dense,
        f"epic:tokens={round(work * SEGMENT)}",
        f"prophet:share={work:.2f}",
        f"transitive:hops=0,topk={work:.2f}",
        f"transitive:topk={work:.2f}",
    )


PAPER_METHODS = {  # the rows of SparseX's tables
    "full": "full recompute", "naive": "naive reuse", "cacheblend": "CacheBlend", "epic": "EPIC",
    "sparsex:boundary=0": "SparseX (w/o hybrid)", "sparsex": "SparseX (w/ hybrid)", "transitive": "transitive (ours)",
}  # fmt: skip
TABLE_1 = {  # LOCOMO, Qwen3-32B: score, TTFT in seconds
    "full": (0.68, 9.23), "naive": (0.54, 0.48), "cacheblend": (0.60, 1.32), "epic": (0.55, 0.59),
    "sparsex:boundary=0": (0.64, 0.66), "sparsex": (0.67, 0.87),
}  # fmt: skip
TABLE_2 = {  # RULER, Qwen3-8B: MQ-NIAH, VT, CWE, FWE
    "full": (1.00, 1.00, 0.95, 0.87), "naive": (0.69, 0.33, 0.92, 0.82), "cacheblend": (0.81, 0.65, 0.95, 0.84),
    "epic": (0.84, 0.49, 0.93, 0.83), "sparsex:boundary=0": (0.90, 0.80, 0.95, 0.86),
    "sparsex": (1.00, 0.94, 0.94, 0.89),
}  # fmt: skip
TABLE_3 = {  # mean over the eight tasks of Qwen2.5-7B: AutoGen, MAD
    "full": (52.70, 47.62), "sparsex:boundary=0": (50.83, 50.96), "sparsex": (51.48, 50.84)
}  # fmt: skip
EXPERIMENTS: Mapping[str, Experiment] = {
    "main": Experiment(METHODS),
    "lengths": Experiment(METHODS, lengths=(512, 2048, 4096), items=3),
    "boundary": Experiment(
        ("full", *(f"sparsex:boundary={b},topk={k}" for b in (0, 1, 2, 3, 4) for k in (0.05, 0.1, 0.2))), items=4
    ),
    "rules": Experiment(("full", *(rule for work in WORK for rule in _rules(work))), items=3),
    "transitive": Experiment(
        (
            "full",
            *(f"transitive:probe={p},hops={h},topk=0.05" for p in (0, 1, 2, 3) for h in (0, 1, 2, 3)),
            *(f"transitive:first={first},topk=0.05" for first in (0.2, 0.6, 0.8)),
            *(f"transitive:topk={k}" for k in (0.01, 0.02, 0.1, 0.2)),
            *(f"transitive:topk=0.05,{choice}" for choice in CHOICES),
        ),
        items=3,
    ),
    "vllm": Experiment(METHODS, items=3, host="vllm"),
}  # fmt: skip


def main() -> None:
    """Run the chosen experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"{', '.join(EXPERIMENTS)}, layers")
    parser.add_argument("--seed", type=int, default=HELD_BACK_SEED)
    parser.add_argument("--items", type=int, help="texts a task, instead of the experiment's own number")
    parser.add_argument("--out", type=Path, default=Path("docs/results/quality"))
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in (*EXPERIMENTS, "layers"):
            parser.error(f"unknown experiment {name!r}: choose from {', '.join(EXPERIMENTS)}, layers")
    for name in arguments.names or (*EXPERIMENTS, "layers"):
        if name == "layers":
            _layers(arguments.model, arguments.out)
        else:
            _run(name, EXPERIMENTS[name], arguments)


def _run(name: str, experiment: Experiment, arguments: argparse.Namespace) -> None:
    console, out = Console(), arguments.out / name
    settings = Settings(
        find_suites(experiment.suites), experiment.policies, experiment.lengths, experiment.segments,
        experiment.patterns, arguments.items or experiment.items, arguments.seed,
    )  # fmt: skip
    with (
        _open(experiment.host, arguments.model) as host,
        progress_bar(Console(stderr=True), name) as on_progress,
    ):
        rows = runner.run(settings, host, out, on_progress)
    command = f"python benchmarks/quality.py {name}"
    command += f" --items {arguments.items}" if arguments.items else ""
    results.write_tables(
        rows, out, command if arguments.seed == HELD_BACK_SEED else f"{command} --seed {arguments.seed}"
    )
    plots.write_plots(rows, out)
    if name == "main":
        (out.parent / "papers.md").write_text(_paper_tables(rows))
    console.rule(name)
    console.print(results.render(rows))


def _paper_tables(rows: Sequence[Row]) -> str:
    """Tables 1 to 3 of SparseX, its figures beside ours (SparseX, section 5)."""
    suites = {(s.policy, s.group): s for s in results.summarise(rows, "suite")}
    tasks = {(s.policy, s.group): s for s in results.summarise(rows, "task")}

    def ours(policy: str, task: str) -> str:
        found = tasks[policy, task]
        return f"{found.score:.2f} ± {(found.high - found.low) / 2:.2f}"

    chat, ruler, agents = [], [], []
    for policy, name in PAPER_METHODS.items():
        summary, paper = suites[policy, "chat"], TABLE_1.get(policy)
        theirs = f"{paper[0]:.2f} | {TABLE_1['full'][1] / paper[1]:.1f}" if paper else "- | -"
        interval = (summary.high - summary.low) / 2
        chat.append(f"| {name} | {summary.score:.2f} ± {interval:.2f} | {summary.speedup:.1f} | {theirs} |")
        columns = ("needles", "variable", "common", "frequent")
        marks = TABLE_2.get(policy)
        mean = sum(tasks[policy, f"ruler/{task}"].score for task in columns) / len(columns)
        cells = [f"{ours(policy, f'ruler/{task}')} ({marks[i]:.2f})" if marks else ours(policy, f"ruler/{task}")
                 for i, task in enumerate(columns)]  # fmt: skip
        cells.append(f"{mean:.2f} ({sum(marks) / 4:.2f})" if marks else f"{mean:.2f}")
        ruler.append(f"| {name} | {' | '.join(cells)} |")
        if policy in TABLE_3 or policy == "transitive":
            autogen, mad = TABLE_3.get(policy, (None, None))
            theirs = f"{autogen:.1f} | {mad:.1f}" if autogen else "- | -"
            agents.append(f"| {name} | {ours(policy, 'agents/judge')} | {ours(policy, 'agents/debate')} | {theirs} |")
    return "\n".join([
        "# SparseX's tables on the testbed", "",
        "`python benchmarks/quality.py main`; the paper's figures beside ours.", "",
        "## Table 1: long chats (ours: suite chat; paper: LOCOMO, Qwen3-32B)", "",
        "| method | score | faster | paper's score | faster |", "|---|---|---|---|---|", *chat, "",
        "## Table 2: RULER (in brackets the paper's, Qwen3-8B)", "",
        "| method | MQ-NIAH | VT | CWE | FWE | average |", "|---|---|---|---|---|---|", *ruler, "",
        "## Table 3: agents (paper: mean of eight tasks, Qwen2.5-7B)", "",
        "| method | judge | debate | paper's AutoGen | paper's MAD |", "|---|---|---|---|---|", *agents, "",
    ])  # fmt: skip


def _open(host: str, model: Path) -> AbstractContextManager[Host]:
    return open_host(host, model, dtype="float32", device="cpu", kv_gib=2.0)


def _layers(model: Path, out: Path) -> None:
    """Figures 5 and 6: in which layer each signal finds the needle, over many texts, and one of them drawn."""
    with _open("native", model) as host, progress_bar(Console(stderr=True), "layers") as on_progress:
        engine = host.engine  # type: ignore[attr-defined]
        found = layers.survey(engine, range(HELD_BACK_SEED, HELD_BACK_SEED + 40), on_progress)
        layers.draw(engine, HELD_BACK_SEED, out)
    Console().print(layers.render(found))


if __name__ == "__main__":
    main()
