"""The experiments behind docs/results/{quality,samkv,redknot}.md: answers of every method on the
testbed's task suites.

    python -m research.quality                    all of them (two hours)
    python -m research.quality main lengths       some

Each writes rows, tables and pictures to results/quality/NAME and goes on where it was stopped.
Choices were made on seed 1 (`--seed 1 --out elsewhere`); docs/results/quality.md says which seed
its figures are of, and what that means."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from kvgraft.cli.progress import progress_bar
from kvgraft_lab.evaluate import layers, plots, results, runner
from kvgraft_lab.evaluate.hosts import Host, open_host
from kvgraft_lab.evaluate.needles import fact_needle
from kvgraft_lab.evaluate.runner import EvalRow, EvalSettings
from kvgraft_lab.evaluate.tasks import PATTERNS, Pattern, find_suites
from kvgraft_lab.testbed import MODEL_DIR
from research import redknot
from research.sparsex.curves import write_curves
from research.sparsex.paper_tables import paper_tables

HELD_BACK_SEED = 3000
NUM_LAYERS = 8
SEGMENTS = 8
SEGMENT = 118  # tokens of a segment of the suites at 1024 tokens
NEEDLE_TEXTS = 40
METHODS = (
    "naive",
    "epic",
    "cacheblend",
    "prophet",
    "sparsex:boundary_layers=0",
    "sparsex",
    "transitive",
    "spread",
)
REDKNOT = (  # the default; without each of its parts; without any; with less in FFNs
    "redknot", "redknot:edge_mass_share=1.0", "redknot:windows=off", "redknot:reuse=off",
    "redknot:mass_share=1.0",
    "redknot:mass_share=1.0,windows=off,reuse=off",
    "redknot:dense_layers=1,mass_share=0.2,recent_tokens=32,min_ffn_tokens=16",
)  # fmt: skip
# what reused heads keep, of the same prompts
REPAIR = ("redknot", "redknot:repair=off", "redknot:reuse=off")
SUITES = "ruler,multihop,instruction,chat,agents,stress"
# 15 % at most, a limit that the paper does not have; with `top_p=off` always 15 %
SAMKV_AT_15 = (
    "samkv:block_tokens=8,kept_share=0.15",
    "samkv:block_tokens=8,kept_share=0.15,top_p=off",
)
DOCUMENTS = (
    "naive", "epic", "cacheblend", "sparsex", "transitive", "redknot", *SAMKV_AT_15, "condense",
)  # fmt: skip
# SamKV Table 4, at 15 % kept: selection, personalised bias, recomputation; then overwriting
SAMKV = tuple(
    f"{SAMKV_AT_15[1]}{options}"
    for options in (
        ",selection=off,recomputed=none", ",selection=off", ",bias=off,recomputed=none",
        ",recomputed=none",
        ",bias=off", "", ",update=overwrite",
    )
)  # fmt: skip
CONDENSE = (  # each of its parts changed
    "condense", "condense:rounds=1", "condense:rounds=2", "condense:hop_tokens=0",
    "condense:skipped_share=0.0",
    "condense:halo_blocks=0", "condense:recomputed=anchors", "condense:recomputed=none",
    "condense:update=fusion",
    "condense:kept_share=0.1", "condense:kept_share=0.14", "condense:kept_share=0.2",
)  # fmt: skip
IN_HOSTS = ("transitive", *SAMKV_AT_15, "condense")
LONG = (
    "naive",
    "samkv:kept_share=0.15",
    "samkv:kept_share=0.15,recomputed=none",
    "samkv:kept_share=0.3",
    SAMKV_AT_15[0],
    "condense",
)
SHORTER = ("naive", "sparsex", "transitive", "redknot")
CHOICES = ("rows=all_fresh", "reduction=max", "rows=all_fresh,reduction=max", "unit=block")
WORK = (0.05, 0.10, 0.20, 0.35)
TOPK = (0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Experiment:
    """One directory of results; the policies of a family are drawn as one curve. `head_paging`:
    local heads of the model's map hold sinks and a window only. `segments` and `patterns` are those
    of the suites."""

    methods: tuple[str, ...] = ()
    families: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1024,)
    items: int = 12
    host: str = "native"
    model: Path = MODEL_DIR
    head_paging: bool = False
    suites: str = SUITES
    segments: int = SEGMENTS
    patterns: tuple[Pattern, ...] = PATTERNS

    @property
    def policies(self) -> tuple[str, ...]:
        """All of them, `full` first."""
        return ("full", *self.methods, *chain.from_iterable(self.families.values()))


def _documents(
    count: int, length: int, methods: tuple[str, ...] = DOCUMENTS, items: int = 6
) -> Experiment:
    """Questions about documents that were read on their own."""
    return Experiment(
        methods,
        lengths=(length,),
        items=items,
        suites="multidoc",
        segments=count,
        patterns=("alone",),
    )


def _sparsex(work: float, **options: str) -> str:
    """SparseX's rule at this share of the grafted work, with as many dense layers, two at most, as
    that leaves room for."""
    boundary = min(2, int(work / 1.2 * NUM_LAYERS))
    dense = boundary / NUM_LAYERS
    topk = (work - dense) / (1 - dense)
    more = "".join(f",{name}={value}" for name, value in options.items())
    return f"sparsex:boundary_layers={boundary},recompute_share={topk:.4f},overflow_blocks=0{more}"


def _cacheblend(work: float, layer: int) -> str:
    """CacheBlend at this share, or nothing if that is less than what the layers up to the checked
    one take."""
    before = layer / NUM_LAYERS
    return (
        f"cacheblend:check_layer={layer},recompute_share={(work - before) / (1 - before):.4f}"
        if work > before
        else ""
    )


def _rules(work: float) -> dict[str, str]:
    """Ways to choose tokens, at equal work, by the name of the way."""
    rules = {
        "sparsex: all fresh, sum, tokens": _sparsex(work),
        "sparsex: question": _sparsex(work, rows="question"),
        "sparsex: max": _sparsex(work, reduction="max"),
        "sparsex: blocks": _sparsex(work, unit="block"),
        "cacheblend at layer 1": _cacheblend(work, 1),
        "cacheblend at layer 2": _cacheblend(work, 2),
        "epic": f"epic:start_tokens={round(work * SEGMENT)}",
        "prophet": f"prophet:recompute_share={work:.2f}",
        "transitive without hops": f"transitive:hops=0,recompute_share={work:.2f}",
        "transitive": f"transitive:recompute_share={work:.2f}",
    }
    return {name: policy for name, policy in rules.items() if policy}


def _families(*named: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """For each name the policies that carry it."""
    return {name: tuple(found[name] for found in named if name in found) for name in named[-1]}


EXPERIMENTS: Mapping[str, Experiment] = {
    "main": Experiment(METHODS),
    "lengths": Experiment(("naive", "sparsex", "transitive", "spread"), lengths=(512, 2048, 4096),
    items=3),
    "boundary": Experiment(
        families={
            **{
                f"boundary {b}": tuple(
                    f"sparsex:boundary_layers={b},recompute_share={k}" for k in TOPK
                )
                for b in range(5)
            },
            "boundary 2, no overflow": tuple(
                f"sparsex:boundary_layers=2,recompute_share={k},overflow_blocks=0" for k in TOPK
            ),
        },
        items=4,
    ),
    "rules": Experiment(families=_families(*map(_rules, WORK)), items=3),
    "transitive": Experiment(
        families={
            **{
                f"probe {p}, 0 to 3 hops": tuple(
                    f"transitive:probe_layers={p},hops={h}" for h in range(4)
                )
                for p in range(4)
            },
            "questions choose .2, .6, .8": tuple(
                f"transitive:first_share={first}" for first in (0.2, 0.6, 0.8)
            ),
            "1, 2, 10, 20 %": tuple(f"transitive:recompute_share={k}" for k in (0.01, 0.02, 0.1,
            0.2)),
            **{choice.replace(",", ", "): (f"transitive:{choice}",) for choice in CHOICES},
        },
        items=3,
    ),
    "redknot": Experiment((*METHODS, *REDKNOT), items=6),
    "by_head": Experiment((*METHODS, *REDKNOT), items=6, model=redknot.MODEL_DIR),
    "by_head_long": Experiment((*SHORTER, *REDKNOT[1:3]), lengths=(4096,), items=2,
    model=redknot.MODEL_DIR),
    "repair": Experiment(REPAIR, items=6),
    "repair_by_head": Experiment(REPAIR, items=6, model=redknot.MODEL_DIR),
    "head_paging": Experiment(SHORTER, lengths=(1024, 4096), items=3, model=redknot.MODEL_DIR,
    head_paging=True),
    "documents_4": _documents(4, 2150),
    "documents_6": _documents(6, 3200),
    "documents_8": _documents(8, 4250, items=12),
    "documents_10": _documents(10, 4500),  # the model has 4608 positions
    "documents_long": _documents(4, 4250, LONG),
    "documents_ablation": _documents(8, 4250, (*SAMKV, *CONDENSE)),
    "documents_native": _documents(8, 4250, IN_HOSTS, items=3),
    # the same prompts
    "documents_vllm": replace(_documents(8, 4250, IN_HOSTS, items=3), host="vllm"),
    "native": Experiment(METHODS, items=3),
    "vllm": Experiment(METHODS, items=3, host="vllm"),  # the same prompts
}  # fmt: skip
# experiments, those of the same prompts in the native engine, and the table of both
THROUGH_VLLM = {
    "vllm": ("native", "hosts.md"), "documents_vllm": ("documents_native", "documents_hosts.md"),
}  # fmt: skip


def main() -> None:
    """Run the chosen experiments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"{', '.join(EXPERIMENTS)}, layers"
    )
    parser.add_argument("--seed", type=int, default=HELD_BACK_SEED)
    parser.add_argument(
        "--items", type=int, help="texts a task, instead of the experiment's own number"
    )
    parser.add_argument("--out", type=Path, default=Path("results/quality"))
    parser.add_argument("--model", type=Path, help="instead of the experiment's own")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in (*EXPERIMENTS, "layers"):
            parser.error(
                f"unknown experiment {name!r}: choose from {', '.join(EXPERIMENTS)}, layers"
            )
    names = arguments.names or [*EXPERIMENTS, "layers"]
    natively = [THROUGH_VLLM[name][0] for name in names if name in THROUGH_VLLM]
    for name in dict.fromkeys([*natively, *names]):
        if name == "layers":
            _layers(arguments)
        else:
            _run(name, EXPERIMENTS[name], arguments)


def _run(name: str, experiment: Experiment, arguments: argparse.Namespace) -> None:
    console, out = Console(), arguments.out / name
    settings = EvalSettings(
        find_suites(experiment.suites), experiment.policies, experiment.lengths,
        experiment.segments,
        experiment.patterns, arguments.items or experiment.items, arguments.seed,
    )  # fmt: skip
    with (
        _open(experiment.host, arguments.model or experiment.model, experiment.head_paging) as host,
        progress_bar(Console(stderr=True), name) as on_progress,
    ):
        rows = runner.run(settings, host, out, on_progress)
    command = f"python -m research.quality {name}"
    command += f" --items {arguments.items}" if arguments.items else ""
    results.write_tables(rows, out, f"{command} --seed {arguments.seed}")
    if experiment.families:
        write_curves(rows, out, experiment.families)
    else:
        plots.write_plots(rows, out)
    if name == "main":
        (out.parent / "papers.md").write_text(paper_tables(rows))
    if name in THROUGH_VLLM:
        native, table = THROUGH_VLLM[name]
        (out.parent / table).write_text(
            _compare_hosts(name, runner.read_rows(out.parent / native), rows)
        )
    console.rule(name)
    console.print(results.render(rows))


def _compare_hosts(name: str, native: Sequence[EvalRow], vllm: Sequence[EvalRow]) -> str:
    """A table of both hosts' scores on the same prompts, and of how many answers are equal word for
    word."""
    here = {(row.cluster, row.number, row.policy): row.answer.text.split() for row in native}
    lines = []
    for a, b in zip(results.summarise(native, "all"), results.summarise(vllm, "all"), strict=True):
        theirs = [row for row in vllm if row.policy == b.policy]
        same = sum(
            row.answer.text.split() == here[row.cluster, row.number, row.policy] for row in theirs
        )
        lines.append(
            f"| {a.policy} | {results.with_spread(a)} | {results.with_spread(b)} | "
            f"{same} of {len(theirs)} | {a.work:.1%} | {b.work:.1%} |"
        )
    return "\n".join([
        "# The same prompts in both hosts", "", f"`python -m research.quality {name}`", "",
        "| policy | native | vllm | same answer | work, native | work, vllm |",
        "|---|---|---|---|---|---|", *lines, "",
    ])  # fmt: skip


def _open(host: str, model: Path, head_paging: bool = False) -> AbstractContextManager[Host]:
    return open_host(
        host, model, dtype="float32", device="cpu", kv_gib=2.0, head_paging=head_paging
    )


def _layers(arguments: argparse.Namespace) -> None:
    """Figures 5 and 6: in which layer each signal finds the needle, over many texts, and one of
    them drawn."""
    seeds = range(arguments.seed, arguments.seed + (arguments.items or NEEDLE_TEXTS))
    with (
        _open("native", arguments.model or MODEL_DIR) as host,
        progress_bar(Console(stderr=True), "layers") as on_progress,
    ):
        engine = host.engine  # type: ignore[attr-defined]
        found = layers.survey(engine, fact_needle, seeds, on_progress)
        layers.draw(engine, fact_needle(arguments.seed), arguments.out)
    Console().print(layers.render(found))


if __name__ == "__main__":
    main()
