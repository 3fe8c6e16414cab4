"""What SamKV's shares P are (Eq. 2), and how policies differ prompt by prompt: behind
docs/results/samkv.md.

python -m research.samkv.shares shares [--segments 8] [--block 8,32,64] [--seed 2000]
# of two evaluations of the same prompts
python -m research.samkv.shares paired DIR POLICY OTHER_DIR OTHER_POLICY
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, ClassVar

import torch
import typer
from rich.console import Console
from torch import Tensor

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.kv.documents import Document
from kvgraft.policies import SamKV
from kvgraft_lab.evaluate.prompts import as_parts
from kvgraft_lab.evaluate.runner import read_rows
from kvgraft_lab.evaluate.statistics import paired_difference
from kvgraft_lab.evaluate.tasks import Shape, find_suites
from kvgraft_lab.testbed import MODEL_DIR

app = typer.Typer(help=__doc__)
NEAR_ONE = 0.9


@dataclass(frozen=True)
class Watched(SamKV):
    """Notes the shares of every document, [L] each."""

    seen: ClassVar[list[Tensor]] = []

    def shares(self, document: Document, scores: Tensor, middle: Tensor) -> Tensor:
        found = super().shares(document, scores, middle)
        self.seen.append(found)
        return found


@app.command()
def shares(
    segments: Annotated[int, typer.Option(help="Documents of a prompt.")] = 8,
    block: Annotated[str, typer.Option(help="Tokens of a block, by commas.")] = "8,32,64",
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 4250,
    items: Annotated[int, typer.Option(help="Texts a task.")] = 6,
    seed: int = 2000,
) -> None:
    """How P is distributed over documents, questions and layers of N*."""
    engine, [suite] = Engine(MODEL_DIR, dtype="float32", kv_gib=0.5), find_suites("multidoc")
    texts = suite.items(seed, items, Shape(length, segments, ("alone",)))
    for size in map(int, block.split(",")):
        Watched.seen.clear()
        with progress_bar(Console(stderr=True), f"blocks of {size}") as on_progress:
            for number, item in enumerate(texts):
                reused = {segment for read in item.phase_1 for segment in read}
                prompts = [as_parts(ask.segments, reused) for ask in item.phase_2]
                engine.clear_cache()
                engine.generate(
                    [
                        Request(p, Watched(block_tokens=size, kept_share=1.0), SamplingParams(1))
                        for p in prompts
                    ]
                )
                on_progress(number + 1, len(texts))
        found = torch.stack(Watched.seen)[:, list(engine.library.stable_layers)]  # [documents, N*]
        Console().print(
            f"blocks of {size}: {found.numel()} shares, {float((found == 0).float().mean()):.1%} "
            "are 0, "
            f"{float((found > NEAR_ONE).float().mean()):.1%} above {NEAR_ONE}, mean "
            f"{float(found.mean()):.3f}; "
            f"{float((found == 0).all(1).float().mean()):.1%} of the documents have 0 in all "
            "layers of N*"
        )


@app.command()
def paired(
    directory: Path,
    policy: str,
    other_directory: Path,
    other_policy: str,
    score: Annotated[
        bool, typer.Option("--score", help="By the tasks' own metrics instead of F1.")
    ] = False,
) -> None:
    """Mean difference of F1, the second less the first, with a bootstrap interval by text."""
    one, other = (
        {
            (row.cluster, row.number): row.score if score else row.f1
            for row in read_rows(where)
            if row.policy == name
        }
        for where, name in ((directory, policy), (other_directory, other_policy))
    )
    if not one or one.keys() != other.keys():
        raise typer.BadParameter(
            f"{policy} has {len(one)} answers, {other_policy} {len(other)}: they must be of the "
            "same prompts"
        )
    keys = list(one)
    found = paired_difference(
        [other[key] for key in keys], [one[key] for key in keys], [text for text, _ in keys]
    )
    Console().print(
        f"{policy} {fmean(one.values()):.3f}, {other_policy} {fmean(other.values()):.3f}, "
        f"{len(one)} prompts: "
        f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    )


if __name__ == "__main__":
    app()
