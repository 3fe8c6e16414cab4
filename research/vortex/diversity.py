"""How differently flows are built (Vortex, Figure 9): those that three models proposed, and those
of a search.

The distance of two flows is the mean Jaccard distance of their caches, operators and calls
(`search.distance`). Only programs are compared, so that nothing runs. With a search its result is
written beside them.

    python -m research.vortex.search --out results/flow-search
    python -m research.vortex.diversity --search results/flow-search --out docs/results/flows
"""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import msgspec
import typer
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from kvgraft.decode.flow import trace
from kvgraft.flows import parse_flow
from kvgraft_lab.evaluate.plots import save
from research.vortex.proposed import FILES, PROPOSED, ROOT
from research.vortex.search import CANDIDATES, FOUND, Candidate, distance

SHAPE = (16, 64, 4)  # block, head and group that flows are traced for


def distances(flows: Sequence[str]) -> list[float]:
    """Of all pairs; dense attention is no flow.

    Raises:
        ValueError: fewer than two flows.
    """
    programs = [trace(flow, *SHAPE) for flow in map(parse_flow, flows) if flow is not None]
    if len(programs) < 2:
        raise ValueError(f"distances are of pairs, got {len(programs)} flows")
    return [distance(*pair) for pair in combinations(programs, 2)]


def groups(search: Path | None) -> dict[str, list[str]]:
    """Flows by who wrote them."""
    found = {
        path.stem: [
            f"{ROOT}/{named}" for named in PROPOSED.values() if named.startswith(f"{path}:")
        ]
        for path in FILES
    }
    if search is not None:
        tried = msgspec.json.decode(
            (search / f"{CANDIDATES}.json").read_bytes(), type=list[Candidate]
        )
        found["search"] = [one.flow for one in tried]
    return found


def picture(found: Mapping[str, Sequence[float]], path: Path) -> Path:
    """Distances of pairs by who wrote the flows, their mean marked."""
    figure, axes = plt.subplots(figsize=(1.5 + 1.4 * len(found), 3.6))
    axes.boxplot([*found.values()], tick_labels=[*found], showmeans=True, whis=(0, 100))
    axes.set_ylabel("structural distance of two flows")
    axes.set_ylim(0, 1)
    return save(figure, path)


def main(
    search: Annotated[Path | None, typer.Option(help="What a search has left.")] = None,
    out: Annotated[Path, typer.Option(help="Where picture and figures go.")] = Path(
        "docs/results/flows"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write diversity.json and diversity.png, and search.json with a search."""
    by_author = {name: distances(flows) for name, flows in groups(search).items()}
    figures = {
        name: {
            "pairs": len(own),
            "mean": mean(own),
            "median": median(own),
            "least": min(own),
            "most": max(own),
        }
        for name, own in by_author.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "diversity.json").write_text(json.dumps(figures, indent=1) + "\n")
    picture(by_author, out / "diversity.png")
    if search is not None:
        (out / "search.json").write_text((search / FOUND).read_text())
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("", "pairs", "mean", "median", "least", "most")
    for name, own in figures.items():
        table.add_row(
            name,
            str(own["pairs"]),
            *(f"{own[key]:.3f}" for key in ("mean", "median", "least", "most")),
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
