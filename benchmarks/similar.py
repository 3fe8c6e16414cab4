"""Near-duplicate matching: precision and recall against labelled edits, and the cost of a lookup
among many segments.

python benchmarks/similar.py accuracy [--seed 1000] [--plot docs/results/similar.png]
OMP_NUM_THREADS=1 python benchmarks/similar.py lookup --segments 1000000
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from edits import KINDS, Edited, edit, texts
from kvgraft.core.block_index import VirtualBlockIndex
from kvgraft.core.keys import scope_digest
from kvgraft.core.matches import MatchQuery
from kvgraft.core.segmentation import Similarity
from kvgraft.core.similar import SimilarIndex
from tables import line_of_settings

app = typer.Typer(add_completion=False, help=__doc__)
SCOPE = scope_digest("benchmark", "similar")
BLOCK = 16
RATES = (0.005, 0.01, 0.05, 0.1)
TAUS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CHUNK = 256  # tokens, as of caches that match whole chunks
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
console = Console()


@dataclass(frozen=True)
class Accuracy:
    """How well edited copies were matched.

    Attributes:
        proposed: pairs of segments that LSH, tau and length let through.
        right: those of them that are the same text, edited; `precision` is their share.
        recall: share of the edited copies of which a segment was proposed rightly.
        chunks, exact, similar: share of the unedited tokens that were found by whole chunks of 256
            tokens, by identical runs at any offset, and with near-duplicates besides.
    """

    tau: float
    rate: float
    kind: str
    proposed: int
    right: int
    recall: float
    chunks: float
    exact: float
    similar: float

    @property
    def precision(self) -> str:
        return f"{self.right / self.proposed:.3f}" if self.proposed else "-"


class Library:
    """Texts that are known, each a source of its own."""

    def __init__(self, known: list[np.ndarray], options: Similarity) -> None:
        self.known = known
        self.blocks = VirtualBlockIndex(
            BLOCK, lambda pages, versions: np.ones(len(pages), bool), max_sources=64
        )
        self.index = SimilarIndex(self.blocks, options)
        for source, tokens in enumerate(known):
            self.read(source, tokens)

    def read(self, source: int, tokens: np.ndarray) -> None:
        count = len(tokens) // BLOCK
        pages, whole = source * count + np.arange(count), tokens[: count * BLOCK]
        ids = self.blocks.insert(
            whole, pages, np.ones(count), source=source, source_start=0, scope=SCOPE
        )
        self.index.insert(ids, SCOPE)

    def judge(self, copies: dict[int, Edited]) -> dict[str, float]:
        """Figures of `Accuracy` over copies of the sources."""
        right = proposed = found = unedited = chunks = exact = similar = 0
        for source, copy in copies.items():
            verdicts = list(self._verdicts(source, copy))
            right, proposed, found = (
                right + sum(verdicts),
                proposed + len(verdicts),
                found + any(verdicts),
            )
            unedited += int((copy.origin >= 0).sum())
            exact += sum(
                match.length for match in self.blocks.match(MatchQuery(copy.tokens, (SCOPE,)))
            )
            similar += sum(
                match.length for match in self.index.match(MatchQuery(copy.tokens, (SCOPE,)))
            )
            chunks += sum(
                CHUNK
                for at in range(0, len(copy.tokens) - CHUNK + 1, CHUNK)
                if self._is_chunk(copy, at)
            )
        return {
            "proposed": proposed,
            "right": right,
            "recall": found / len(copies),
            "chunks": chunks / unedited,
            "exact": exact / unedited,
            "similar": similar / unedited,
        }

    def _verdicts(self, source: int, copy: Edited) -> Iterator[bool]:
        """Whether each proposal shares most of its unedited tokens with what it was made from."""
        for here, where, there in self.index.propose(copy.tokens, SCOPE):
            origin = copy.origin[here.start : here.stop]
            inside = (origin >= there.start) & (origin < there.stop)
            yield where == source and int(inside.sum()) >= len(here) // 2

    def _is_chunk(self, copy: Edited, at: int) -> bool:
        """Whether a chunk of the copy is one of the source: the same tokens on the same grid."""
        origin = copy.origin[at : at + CHUNK]
        return bool(origin[0] % CHUNK == 0 and origin[0] >= 0 and (np.diff(origin) == 1).all())


@app.command()
def accuracy(
    seed: Annotated[
        int, typer.Option(help="Of texts and edits; 1000 and above is for evaluation.")
    ] = 0,
    num_texts: Annotated[
        int, typer.Option("--texts", min=2, help="Known texts; half of them are edited.")
    ] = 80,
    tokens: Annotated[int, typer.Option(min=CHUNK, help="Of a text.")] = 2 * CHUNK,
    window: Annotated[
        int, typer.Option(min=16, help="Of the overlapping windows.")
    ] = Similarity.window_tokens,
    plot: Annotated[Path | None, typer.Option(help="Where precision and recall are drawn.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Precision and recall against labelled edits."""
    known, rows = texts(seed, num_texts, tokens), []
    for tau in track(TAUS, "matching", console=Console(stderr=True), transient=True):
        library = Library(known, Similarity(tau=tau, window_tokens=window))
        for rate, kind in product(RATES, KINDS):
            copies = {
                source: edit(known[source], rate, kind, seed * 1_000_003 + source)
                for source in range(num_texts // 2)
            }
            rows.append(Accuracy(tau, rate, kind, **library.judge(copies)))  # type: ignore[arg-type]
    if plot is not None:
        draw(rows, plot)
    configuration = {
        "seed": seed,
        "texts": num_texts,
        "tokens": tokens,
        "window": window,
        "block": BLOCK,
    }
    if as_json:
        print(
            json.dumps(
                {"configuration": configuration, "results": [asdict(row) for row in rows]}, indent=1
            )
        )
        return
    console.print(line_of_settings(configuration))
    table = Table(
        "tau", "edited", "kind", "proposed", "precision", "recall", "chunks", "exact", "similar"
    )
    for row in rows:
        shown = (f"{value:.3f}" for value in (row.recall, row.chunks, row.exact, row.similar))
        table.add_row(
            f"{row.tau}", f"{row.rate:.1%}", row.kind, f"{row.proposed}", row.precision, *shown
        )
    console.print(table)


def draw(rows: list[Accuracy], path: Path) -> None:
    """Precision and recall over tau, and what is found of the unedited tokens, for each share of
    edits."""
    from matplotlib import pyplot as plt

    from kvgraft_lab.evaluate.plots import COLOURS, STYLE

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
        for number, rate in enumerate(RATES):
            at = [[row for row in rows if (row.tau, row.rate) == (tau, rate)] for tau in TAUS]
            curves = (
                [
                    sum(row.right for row in group) / (sum(row.proposed for row in group) or np.nan)
                    for group in at
                ],
                [np.mean([row.recall for row in group]) for group in at],
                [np.mean([row.similar for row in group]) for group in at],
            )
            for axis, values in zip(axes, curves, strict=True):
                axis.plot(
                    TAUS, values, marker="o", color=COLOURS[number], label=f"{rate:.1%} edited"
                )
            exact = np.mean([row.exact for group in at for row in group])
            axes[2].axhline(exact, color=COLOURS[number], linestyle=":", linewidth=1)
        for axis, title in zip(
            axes,
            ("precision of proposals", "copies proposed", "unedited tokens found (dotted: exact)"),
            strict=True,
        ):
            axis.set_xlabel("tau")
            axis.set_title(title, fontsize=10)
        axes[0].axhline(0.7, color="grey", linewidth=1)
        axes[0].legend(loc="center left")
        figure.savefig(path)


@app.command()
def field(
    seed: Annotated[
        int, typer.Option(help="Of texts and edits; 1000 and above is for evaluation.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts.")] = 20,
    rate: Annotated[float, typer.Option(help="Share of the tokens that is edited.")] = 0.005,
    as_json: JsonOption = False,
) -> None:
    """Eight chunks of 256 tokens in another order, seven tokens off, slightly edited: of how many
    is most found?"""
    found: dict[str, list[int]] = {"whole chunks": [], "exact": [], "similar": []}
    for number in track(range(rounds), "matching", console=Console(stderr=True), transient=True):
        known = texts(1000 * seed + number, 8, CHUNK)
        library = Library(known, Similarity())
        order = np.random.default_rng(number).permutation(8)
        copies = [edit(known[at], rate, "replace", 100 * number + int(at)) for at in order]
        prompt = np.concatenate([known[0][:7], *(copy.tokens for copy in copies)])
        found["whole chunks"].append(sum(bool((copy.origin >= 0).all()) for copy in copies))
        for name, match in (("exact", library.blocks.match), ("similar", library.index.match)):
            covered = np.zeros(len(prompt), bool)
            for span in match(MatchQuery(prompt, (SCOPE,))):
                covered[span.start : span.start + span.length] = True
            parts = np.split(covered[7:], np.cumsum([len(copy.tokens) for copy in copies])[:-1])
            found[name].append(sum(int(part.mean() >= 0.9) for part in parts))
    means = {name: float(np.mean(counts)) for name, counts in found.items()}
    if as_json:
        print(
            json.dumps(
                {"configuration": {"seed": seed, "rounds": rounds, "edited": rate}, "found": found},
                indent=1,
            )
        )
        return
    console.print(
        f"seed {seed}, {rounds} prompts, {rate:.1%} edited: chunks of 8 of which nine tenths are "
        "found"
    )
    table = Table("matching", "mean", "least")
    for name, mean in means.items():
        table.add_row(name, f"{mean:.2f}", f"{min(found[name])}")
    console.print(table)


@dataclass(frozen=True)
class Lookup:
    segments: int
    inserted_per_s: float
    bytes_per_segment: float
    block_bytes_per_segment: float  # of the block index, which holds the tokens
    lookups: int  # segments of a prompt
    ms_per_lookup: float
    ms_per_prompt: float
    ms_per_prompt_exact: float
    found: float  # share of the prompts' tokens


def _time_lookups(
    library: Library, prompts: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Milliseconds [n, 3] to propose, to match, to match identical text; segments of each prompt
    [n]; tokens found."""
    works: tuple[Callable[..., object], ...] = (
        library.index.propose,
        library.index.match,
        library.blocks.match,
    )
    times, counts, found = np.empty((len(prompts), len(works))), np.empty(len(prompts)), 0
    for work in works:
        work(prompts[0], SCOPE)
    for row, prompt in enumerate(prompts):
        for column, work in enumerate(works):
            begin = time.perf_counter()
            work(prompt, SCOPE)
            times[row, column] = 1e3 * (time.perf_counter() - begin)
        counts[row] = len(library.index.segmenter.cut(prompt, SCOPE).starts)
        found += sum(match.length for match in library.index.match(MatchQuery(prompt, (SCOPE,))))
    return times, counts, found


@app.command()
def lookup(
    segments: Annotated[int, typer.Option(min=100, help="Stored segments, about.")] = 1_000_000,
    tokens: Annotated[int, typer.Option(min=256, help="Prompt length.")] = 2048,
    prompts: Annotated[int, typer.Option(min=5, help="Prompts timed.")] = 40,
    rate: Annotated[float, typer.Option(help="Share of the known text that is edited.")] = 0.01,
    tau: Annotated[float, typer.Option(help="Least similarity.")] = Similarity.tau,
    as_json: JsonOption = False,
) -> None:
    """Cost of a lookup among many stored segments: half of a prompt's text is known but for
    edits."""
    rng, vocabulary, length = np.random.default_rng(0), 150_000, 16_384
    library, seconds = Library([], Similarity(tau=tau)), 0.0
    sources: list[np.ndarray] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("inserting segments", total=segments)
        while len(library.index) < segments:
            sources.append(rng.integers(0, vocabulary, length).astype(np.int32))
            begin = time.perf_counter()
            library.read(len(sources) - 1, sources[-1])
            seconds += time.perf_counter() - begin
            progress.update(task, completed=len(library.index))
    asked = []
    for number in range(prompts):
        source, start = (
            sources[int(rng.integers(len(sources)))],
            int(rng.integers(length - tokens // 2)),
        )
        copy = edit(source[start : start + tokens // 2], rate, "replace", number).tokens
        asked.append(
            np.concatenate((rng.integers(0, vocabulary, tokens - len(copy)).astype(np.int32), copy))
        )
    times, counts, found = _time_lookups(library, asked)
    result = Lookup(
        segments=len(library.index),
        inserted_per_s=len(library.index) / seconds,
        bytes_per_segment=library.index.nbytes() / len(library.index),
        block_bytes_per_segment=library.blocks.nbytes() / len(library.index),
        lookups=int(np.median(counts)),
        ms_per_lookup=float(np.median(times[:, 0] / counts)),
        ms_per_prompt=float(np.median(times[:, 1])),
        ms_per_prompt_exact=float(np.median(times[:, 2])),
        found=found / sum(map(len, asked)),
    )
    setup: dict[str, object] = {
        "tau": tau,
        "tokens": tokens,
        "prompts": prompts,
        "edited": rate,
    }
    machine = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
    }
    if as_json:
        print(
            json.dumps({"configuration": {**setup, **machine}, "result": asdict(result)}, indent=1)
        )
        return
    console.print(line_of_settings({**setup, **machine}))
    table = Table("", "")
    for name, value in asdict(result).items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.3f}")
    console.print(table)


if __name__ == "__main__":
    app()
