"""All flows: how well they answer (bundled model, 4K tokens, in stages), and how fast they decode
(32K tokens, one sequence, as benchmarks/decode.py measures it).

python -m research.vortex.flows [--k 13,29] [--flows "quest;block_topk"] [--out results/flows]
[--json]

Of latent attention (Figure 12), flows that see RoPE and that do not, on a model of `make
testbed-latent`:

python -m research.vortex.flows --model build/testbed-latent/model --context 0 --k 13,29 --out
results/latent \
    --flows "block_topk;quest;research/vortex/channels.py:channel_topk:groups=18,masked=8+17"
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvgraft import Engine
from kvgraft.cli.progress import progress_bar
from kvgraft.flows import DENSE, FLOWS
from kvgraft_lab.evaluate import flows as judging
from kvgraft_lab.evaluate.plots import write_pareto
from kvgraft_lab.testbed import MODEL_DIR
from research.vortex.proposed import PROPOSED

SPEED = "speed.json"
BENCHMARK = Path("benchmarks/decode.py")
NAMED = ";".join((*FLOWS, *PROPOSED.values()))


def main(
    k: Annotated[str, typer.Option(help="Blocks that flows choose, by commas.")] = "29",
    flows: Annotated[str, typer.Option(help="By semicolons.", show_default="all")] = NAMED,
    model: Annotated[
        Path, typer.Option(help="That answers.", show_default="the bundled one")
    ] = MODEL_DIR,
    out: Path = Path("results/flows"),
    seed: int = 1000,
    context: Annotated[
        int, typer.Option(help="Tokens at which decode steps are timed; 0 for no timing.")
    ] = 32768,
    scale: Annotated[int, typer.Option(help="Times as many texts.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge them; what the directory holds is not asked or timed again."""
    named = with_budgets(flows.split(";"), k.split(","))
    with progress_bar(Console(stderr=True), "answering") as on_progress:
        engine = Engine(model, dtype="float32")
        rows = judging.evaluate(engine, named, out, seed=seed, scale=scale, on_progress=on_progress)
    speed = time_steps([DENSE, *named], context, out / SPEED) if context else {}
    found = judging.summarise(rows, speed)
    write_pareto(found, judging.frontier(found), out)
    (out / "flows.json").write_text(judging.as_json(found))
    if as_json:
        print(judging.as_json(found), end="")
    else:
        Console().print(judging.render(found))


def with_budgets(flows: Sequence[str], budgets: Sequence[str]) -> list[str]:
    """Every flow with every number of blocks."""
    named = [(flow, "," if "=" in flow else ":") for flow in flows]
    return [f"{flow}{mark}topk_blocks={count}" for count in budgets for flow, mark in named]


def time_steps(flows: list[str], context: int, path: Path) -> dict[str, tuple[float, float]]:
    """Of each flow, in all layers, tokens a second and how many times faster than dense."""
    known = json.loads(path.read_text()) if path.exists() else {}
    with progress_bar(Console(stderr=True), "timing") as on_progress:
        for number, flow in enumerate(flows):
            if flow not in known:
                known[flow] = time_step(flow, context)
                path.write_text(json.dumps(known, indent=1) + "\n")
            on_progress(number + 1, len(flows))
    return known


def time_step(flow: str, context: int) -> tuple[float, float]:
    """The same of one, by the benchmark of decode steps."""
    everywhere = flow if flow == DENSE else f"{flow},layers_skip=none"
    options = [
        "--contexts",
        str(context),
        "--batches",
        "1",
        "--rounds",
        "15",
        "--flows",
        everywhere,
        "--json",
    ]
    told = subprocess.run(
        [sys.executable, BENCHMARK, *options], stdout=subprocess.PIPE, check=True
    ).stdout
    row = json.loads(told)["rows"][-1]
    return row["tokens_per_s"], row["faster"]


if __name__ == "__main__":
    typer.run(main)
