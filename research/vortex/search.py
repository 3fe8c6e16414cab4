"""A search for flows: random ones first, then children of the best, each a file that anyone can
read and run.

Candidates are written from motifs that recur in what people and models propose (Vortex, section
14): what stands for a block, how heads agree, what values say, what neighbours and earlier steps
add. All are judged on the same texts, in stages. Whatever was tried stays in the directory, so that
a search can go on after any end.

    python -m research.vortex.search [--candidates 60] [--minutes 90]
        [--out results/flow-search] [--json]
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import mean
from typing import Annotated

import msgspec
import typer

from kvgraft.cli import run
from kvgraft.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    console,
    load,
    print_json,
    progress_console,
)
from kvgraft.cli.progress import progress_bar
from kvgraft.decode.flow import Program, trace
from kvgraft.decode.graph import Value
from kvgraft.engine.engine import Engine
from kvgraft.flows import DENSE, parse_flow
from kvgraft_lab.evaluate import flows as judging
from kvgraft_lab.evaluate.flows import FlowScore
from kvgraft_lab.testbed import MODEL_DIR

POPULATION = 12  # of the best, that have children
GENERATION = 6  # candidates that are judged together
RANDOM_SHARE = 0.25  # of new candidates, after the first population
CANDIDATES = "candidates"
FOUND = "found.json"

# what a block is scored by: lines of forward_cache, caches, and the score by each query head, [1,
# B, g]
BASES = {
    "mean": ({"mean": "(head_dim,)"}, {"mean": 'Mean(c["k"], dim=2)'}, 'GeMM(c["mean"], q.T)'),
    "quest": (
        {"low": "(head_dim,)", "high": "(head_dim,)"},
        {"low": 'Min(c["k"], dim=2)', "high": 'Max(c["k"], dim=2)'},
        'Add(GeMM(c["high"], Relu(q).T), GeMM(c["low"], Minimum(q, 0.0).T))',
    ),
    "halves": ({"halves": "(2, head_dim)"},
    {"halves": 'MeanInterleave(c["k"], dim=2, size=c["k"].size(2) // 2)'},
               'squeeze(Max(GeMM(c["halves"], q.T), dim=2))'),
    "quarters": ({"parts": "(4, head_dim)"},
    {"parts": 'MeanInterleave(c["k"], dim=2, size=c["k"].size(2) // 4)'},
                 'squeeze(Max(GeMM(c["parts"], q.T), dim=2))'),
    "tokens": ({}, {}, 'squeeze(Max(GeMM(c["k"], q.T), dim=2))'),
    "mean and width": (
        {"mean": "(head_dim,)", "width": "(head_dim,)"},
        {"mean": 'Mean(c["k"], dim=2)',
        "width": 'Add(Max(c["k"], dim=2), Multiply(Min(c["k"], dim=2), -1.0))'},
        'Add(GeMM(c["mean"], q.T), Multiply(GeMM(c["width"], Abs(q).T), 0.25))',
    ),
}  # fmt: skip
HEADS = {
    "best": "Max({}, dim=2)",
    "mean": "Mean({}, dim=2)",
    "least": "Min({}, dim=2)",
    "share": "Sum(Softmax(Multiply({}, q.size(2) ** -0.5), dim=1), dim=2)",
}
GATES = {
    "none": ({}, {}, "{}"),
    "value norm": ({"v_norm": "(1,)"}, {"v_norm": 'Mean(L2Norm(c["v"], dim=3), dim=2)'},
    'Multiply({}, c["v_norm"])'),
    "value sigmoid": (
        {"v_norm": "(1,)"}, {"v_norm": 'Mean(L2Norm(c["v"], dim=3), dim=2)'},
        'Multiply({}, Sigmoid(c["v_norm"]))',
    ),
    "key norm": (
        {"k_norm": "(1,)"}, {"k_norm": 'Mean(L2Norm(c["k"], dim=3), dim=2)'},
        'Add({}, Multiply(c["k_norm"], 0.1))',
    ),
}  # fmt: skip
NEIGHBOURS = {
    "none": "{}",
    "smooth": "Conv1d({}, (0.25, 0.5, 0.25))",
    "spread": "Maximum({0}, Multiply(Conv1d({0}, (0.5, 0.0, 0.5)), 0.9))",
    "sharpen": "Conv1d({}, (-0.25, 1.5, -0.25))",
}
TIME = {
    "none": "{}",
    "average": 'Save(c["past"], Add(Multiply(Load(c["past"]), 0.7), Multiply({}, 0.3)))',
    "decaying peak": 'Save(c["past"], Maximum(Multiply(Load(c["past"]), 0.8), {}))',
}
CHOICES: dict[str, tuple[str, ...]] = {
    "base": tuple(BASES),
    "heads": tuple(HEADS),
    "gate": tuple(GATES),
    "neighbours": tuple(NEIGHBOURS),
    "time": tuple(TIME),
    "top": ("topK", "approxTopK"),
    "k": ("5", "9", "13", "21", "29"),
    "layers_skip": ("none", "0", "0+1"),
}
Genes = dict[str, str]


class Candidate(msgspec.Struct, frozen=True):
    """One flow of a search.

    Attributes:
        genes: what was chosen of CHOICES.
        parents: numbers of the candidates that it comes from; none for random ones.
        flow: what names it, with its options.
    """

    number: int
    genes: Genes
    parents: tuple[int, ...]
    flow: str


def search(
    engine: Engine,
    out: Path,
    *,
    candidates: int,
    seconds: float = math.inf,
    seed: int = 0,
    length: int = 4096,
    stages: Sequence[judging.FlowStage] = judging.STAGES,
    on_generation: Callable[[list[FlowScore]], None] | None = None,
) -> list[FlowScore]:
    """Judge candidates, a generation at a time, until there are so many or the time is over; those
    that `out` holds count. Equal arguments give equal candidates, also if the search was
    interrupted.

    Raises:
        ValueError: there is nothing to search for.
    """
    if candidates < 1 or seconds <= 0:
        raise ValueError(f"candidates and time must be positive, got {candidates} and {seconds}")
    folder, start = out / CANDIDATES, time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    tried: list[Candidate] = []
    found: list[FlowScore] = []
    while len(tried) < candidates and time.perf_counter() - start < seconds:
        # which share the reading of the texts
        for _ in range(min(GENERATION, candidates - len(tried))):
            tried.append(propose(tried, found, folder, seed))
        flows = [one.flow for one in tried]
        found = judging.summarise(
            judging.evaluate(engine, flows, out, seed=seed, length=length, stages=stages)
        )
        (out / f"{CANDIDATES}.json").write_bytes(msgspec.json.format(msgspec.json.encode(tried)))
        if on_generation is not None:
            on_generation(found)
    return found


def propose(
    tried: Sequence[Candidate], found: Sequence[FlowScore], folder: Path, seed: int
) -> Candidate:
    """The next candidate, written to a file: random, or a changed child of two of the best, and
    none of before."""
    number = len(tried)
    rng = Random(f"flow {seed} {number}")  # noqa: S311
    judged = {one.flow: one for one in found}
    best = sorted((one for one in tried if one.flow in judged), key=lambda one: _rank(one, judged))[
        :POPULATION
    ]
    known = [one.genes for one in tried]
    while True:
        parents: tuple[Candidate, ...] = ()
        if len(best) == POPULATION and rng.random() > RANDOM_SHARE:
            parents = tuple(min(rng.sample(best, 3), key=best.index) for _ in range(2))
        genes = _cross(rng, *(parent.genes for parent in parents)) if parents else _random(rng)
        if genes not in known:
            break
    name = f"c{number:04d}"
    path = folder / f"{name}.py"
    path.write_text(write(genes, name))
    flow = f"{path}:topk_blocks={genes['k']},layers_skip={genes['layers_skip']}"
    return Candidate(number, genes, tuple(parent.number for parent in parents), flow)


def _rank(candidate: Candidate, judged: Mapping[str, FlowScore]) -> tuple[int, float, int]:
    """Less is better: by stages, by score to a hundredth, by how little is read."""
    own = judged[candidate.flow]
    return -len(own.passed), -round(own.score, 2), int(candidate.genes["k"])


def _random(rng: Random) -> Genes:
    return {name: rng.choice(choices) for name, choices in CHOICES.items()}


def _cross(rng: Random, one: Genes, other: Genes) -> Genes:
    """Of each parent some, and something new."""
    genes = {name: rng.choice((one[name], other[name])) for name in CHOICES}
    for name in rng.sample(list(CHOICES), rng.choice((1, 1, 2))):
        genes[name] = rng.choice(CHOICES[name])
    return genes


def write(genes: Genes, name: str) -> str:
    """A candidate as a Python file."""
    base_caches, base_lines, by_head = BASES[genes["base"]]
    gate_caches, gate_lines, gate = GATES[genes["gate"]]
    caches, lines = base_caches | gate_caches, base_lines | gate_lines
    if genes["time"] != "none":
        caches, lines = caches | {"past": "(1,)"}, lines | {"past": 'CFill(c["past"])'}
    steps = [by_head, *(part.format("score") for part in (HEADS[genes["heads"]], gate)),
             NEIGHBOURS[genes["neighbours"]].format("score"),
             TIME[genes["time"]].format("score")]  # fmt: skip
    text = ", ".join(f"{gene} {choice}" for gene, choice in genes.items())
    return "\n".join(
        [
            f'"""A candidate of a search: {text}."""', "",
            "from kvgraft.decode import *  # noqa: F403", "", "",
            "def squeeze(x):", "    return Reshape(x, (1, x.shape[1], x.size(3)))", "", "",
            "class Candidate(Flow):", f'    name = "{name}"', "",
            "    def create_cache(self, block_size, head_dim):",
            f"        return {{{', '.join(f'{key!r}: {shape}' for key, shape in caches.items())}}}",
            "",
            "    def forward_cache(self, c):",
            *([f'        c["{key}"] = {line}' for key, line in lines.items()] or ["        pass"]),
            "",
            "    def forward_indexer(self, q, c):",
            *(f"        score = {step}" for step in steps if step != "score"),
            f"        return {genes['top']}(score, self.topk_blocks)", "",
        ]
    )  # fmt: skip


def distance(one: Program, other: Program) -> float:
    """How differently two flows are built, 0 to 1: the mean Jaccard distance of their caches (names
    with shapes), of their operators, and of their calls (operators with what they are applied to)
    (Vortex, section 6.1.1)."""
    return mean(1 - _jaccard(a, b) for a, b in zip(_parts(one), _parts(other), strict=True))


def diversity(
    flows: Sequence[str], block_size: int = 16, head_dim: int = 64, group: int = 4
) -> float:
    """The mean distance of all pairs; 0 for fewer than two flows."""
    programs = [
        trace(flow, block_size, head_dim, group)
        for flow in map(parse_flow, flows)
        if flow is not None
    ]
    pairs = list(combinations(programs, 2))
    return mean(distance(*pair) for pair in pairs) if pairs else 0.0


def _parts(program: Program) -> tuple[set[object], set[object], set[object]]:
    values = [*program.cache, *program.indexer]
    calls = {(v.made_by.name, *_sources(v), *sorted(v.options.items(), key=str)) for v in values}
    return (
        set(program.caches.items()),
        {v.made_by.name for v in values},
        {str(call) for call in calls},
    )


def _sources(value: Value) -> list[str]:
    """What a value is made of, by operator or name."""
    given = [x for x in value.inputs if isinstance(x, Value)]
    return [x.operator.name if x.operator else x.name for x in given]


def _jaccard(one: set[object], other: set[object]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: ModelOption = MODEL_DIR,
    out: Annotated[
        Path, typer.Option(help="Directory of candidates and answers; a search there goes on.")
    ] = Path("results/flow-search"),
    candidates: Annotated[
        int, typer.Option(help="Flows to try, those of earlier runs included.")
    ] = 60,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so many.", show_default="no limit")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of candidates, texts and questions.")] = 0,
    block: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Try flows made of known motifs: random ones, then children of the best; each is kept as a
    file."""
    engine = load(model, dtype=dtype, device=device, block_size=block)
    with progress_bar(progress_console, "searching") as on_progress:
        found = search(
            engine, out, candidates=candidates,
            seconds=60 * minutes if minutes is not None else math.inf, seed=seed,
            length=length, on_generation=lambda judged: on_progress(len(judged) - 1, candidates),
        )  # fmt: skip
    (out / FOUND).write_text(judging.as_json(found))
    best = [
        one.flow for one in found if one.flow != DENSE and len(one.passed) == len(found[0].passed)
    ]
    spread = diversity([one.flow for one in found], block)
    if as_json:
        print_json({"found": found, "diversity": spread})
        return
    console.print(judging.render(found[:20]))
    console.print(
        f"{len(found) - 1} candidates, {len(best)} passed all stages; mean structural distance of "
        f"all {spread:.2f}"
    )
    console.print(f"[dim]{out}: {CANDIDATES}/, {judging.ROWS}, {FOUND}[/dim]", soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(run(app))
