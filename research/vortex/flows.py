"""All flows: how well they answer (bundled model, 4K tokens, in stages), and how fast they decode (see decode.py, 32K).

python benchmarks/flows.py [--k 13,29] [--flows "quest;block_topk"] [--out docs/results/flows] [--json]
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from decode import SHAPE
from kvgraft import Engine
from kvgraft.decode.flows import DENSE, FLOWS
from kvgraft.evaluate import flows as judging
from kvgraft.evaluate.decoding import speedups
from kvgraft.evaluate.plots import write_pareto
from kvgraft.evaluate.progress import progress_bar
from kvgraft.testbed import MODEL_DIR
from scenarios import make_random_model

SPEED = "speed.json"
NAMED = ";".join(name for name in FLOWS if not name.startswith("channel_"))


def main(
    k: Annotated[str, typer.Option(help="Blocks that flows choose, by commas.")] = "29",
    flows: Annotated[str, typer.Option(help="By semicolons.", show_default="all that mask nothing")] = NAMED,
    out: Path = Path("docs/results/flows"),
    seed: int = 1000,
    context: Annotated[int, typer.Option(help="Tokens at which decode steps are timed; 0 for no timing.")] = 32768,
    scale: Annotated[int, typer.Option(help="Times as many texts.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge them; what the directory holds is not asked or timed again."""
    sides = [f"{flow}{',' if ':' in flow else ':'}k=" for flow in flows.split(";")]
    named = [f"{side}{count}" for count in k.split(",") for side in sides]
    with progress_bar(Console(stderr=True), "answering") as on_progress:
        engine = Engine(MODEL_DIR, dtype="float32")
        rows = judging.evaluate(engine, named, out, seed=seed, scale=scale, on_progress=on_progress)
    speed = time_steps([DENSE, *named], context, out / SPEED) if context else {}
    found = judging.summarise(rows, speed)
    write_pareto(found, judging.frontier(found), out)
    (out / "flows.json").write_text(judging.as_json(found))
    if as_json:
        print(judging.as_json(found), end="")
    else:
        Console().print(judging.render(found))


def time_steps(flows: list[str], context: int, path: Path) -> dict[str, tuple[float, float]]:
    """Of each flow, in all layers, tokens a second and how many times faster than dense."""
    known = json.loads(path.read_text()) if path.exists() else {}
    with TemporaryDirectory() as folder, progress_bar(Console(stderr=True), "timing") as on_progress:
        make_random_model(Path(folder), 2, context + 64, SHAPE)
        for number, flow in enumerate(flows):
            if flow not in known:
                everywhere = flow if flow == DENSE else f"{flow},layers_skip=none"
                [known[flow]] = speedups(Engine(folder, kv_gib=1.0), [everywhere], context).values()
                path.write_text(json.dumps(known, indent=1) + "\n")
            on_progress(number + 1, len(flows))
    return known


if __name__ == "__main__":
    typer.run(main)
