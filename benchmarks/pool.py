"""Does reuse last in a pool that is full? New questions about a corpus of which some documents are
asked for more than others, against an ideal cache: whole documents, the least recently used
reclaimed first.

    python benchmarks/pool.py --plot pool.png  # 500 queries, a pool of 1.5 corpora
    python benchmarks/pool.py --pool 0.5 --json > small.json
    python benchmarks/pool.py --beside small.json --plot both.png  # with another run in the picture

Documents come in a new order and behind other text each time, so prefix caching finds nothing of
them. The model is random and small: what counts is whose pages are reclaimed."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvgraft.cli.progress import progress_bar
from replay import TINY, TINY_LAYERS
from scenarios import make_random_model
from servers import ServerOptions, start
from tables import configuration, line_of_settings, markdown_table

BLOCK, MAX_MODEL_LEN = 32, 8192
OPENING, QUESTION = 40, 30  # tokens that no other query has
LENGTHS = 256, 768  # tokens of documents
VOCABULARY = 4096  # of the random model
WINDOW = 25  # queries of which the picture shows the mean
LAST = 100
errors = Console(stderr=True)


@dataclass(frozen=True)
class Query:
    """A prompt and the numbers of its documents."""

    tokens: list[int]
    documents: list[int]


@dataclass(frozen=True)
class Curve:
    """What was found of each prompt, in tokens of its documents.

    Attributes:
        known: tokens of documents that each prompt holds.
        grafted: what the server has grafted of it.
        ideal: what an ideal cache would have had.
    """

    known: list[int]
    grafted: list[int]
    ideal: list[int]

    def share(self, found: Sequence[int], last: int = 0) -> float:
        """Of the document tokens of the last prompts, by default of all."""
        return sum(found[-last:]) / sum(self.known[-last:])


Lines = dict[str, tuple[Curve, list[int]]]  # what was found, by name


def make_corpus(documents: int, rng: np.random.Generator) -> list[list[int]]:
    """Texts of random tokens."""
    return [
        rng.integers(1, VOCABULARY, length).tolist() for length in rng.integers(*LENGTHS, documents)
    ]


def make_queries(
    corpus: Sequence[list[int]], count: int, drawn: int, zipf: float, rng: np.random.Generator
) -> Iterator[Query]:
    """Each about `drawn` documents, the n-th drawn 1 / n**zipf as often as the first."""
    weights = 1 / np.arange(1, len(corpus) + 1) ** zipf
    for _ in range(count):
        numbers = rng.choice(len(corpus), drawn, replace=False, p=weights / weights.sum()).tolist()
        fresh = rng.integers(1, VOCABULARY, OPENING + QUESTION).tolist()
        documents = [token for number in numbers for token in corpus[number]]
        yield Query(fresh[:OPENING] + documents + fresh[OPENING:], numbers)


def ideally_found(queries: Sequence[Query], sizes: Sequence[int], room: int) -> list[int]:
    """Tokens that an LRU cache of `room` tokens, which holds whole documents and nothing else, has
    of each prompt."""
    held: OrderedDict[int, int] = OrderedDict()
    found = []
    for query in queries:
        found.append(sum(held.get(number, 0) for number in query.documents))
        for number in query.documents:
            held.pop(number, None)
            held[number] = sizes[number]
        while sum(held.values()) > room:
            held.popitem(last=False)
    return found


def main(
    queries: Annotated[int, typer.Option(min=2, help="Prompts, one after another.")] = 500,
    documents: Annotated[int, typer.Option(min=1, help="In the corpus.")] = 100,
    drawn: Annotated[int, typer.Option(min=1, help="Documents of a prompt.")] = 4,
    zipf: Annotated[
        float, typer.Option(min=0, help="The n-th document is drawn 1 / n**zipf as often.")
    ] = 0.9,
    pool: Annotated[float, typer.Option(help="Size of the KV pool, in corpora.")] = 1.5,
    seed: Annotated[int, typer.Option(help="Of texts and queries.")] = 0,
    ours: Annotated[
        list[str] | None, typer.Option(help="A flag of the server (repeatable).")
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="JSON of another run to show, by its name (repeatable)."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to write.")] = None,
    json_out: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """Ask 500 new questions about a corpus and count what is reused."""
    rng = np.random.default_rng(seed)
    corpus = make_corpus(documents, rng)
    if drawn > documents:
        raise typer.BadParameter(f"--drawn must be at most --documents, {documents}, got {drawn}")
    asked = list(make_queries(corpus, queries, drawn, zipf, rng))
    sizes = [len(text) for text in corpus]
    num_blocks, longest = (
        round(pool * sum(sizes) / BLOCK),
        max(len(query.tokens) for query in asked),
    )
    if longest + 1 > min(MAX_MODEL_LEN, num_blocks * BLOCK):
        raise typer.BadParameter(
            f"a prompt of {longest} tokens needs a larger --pool, of {num_blocks} blocks now"
        )
    others = {path.stem: _read(path) for path in beside or []}
    console = Console(quiet=json_out)
    with TemporaryDirectory() as folder:
        make_random_model(Path(folder), TINY_LAYERS, MAX_MODEL_LEN, TINY)
        flags = ("--num-gpu-blocks-override", str(num_blocks + 1))  # vLLM keeps one for itself
        settings = ServerOptions(Path(folder), max_model_len=MAX_MODEL_LEN, flags=flags)
        head = configuration(settings, f"random, {TINY_LAYERS} layers") | {
            "documents": documents, "a prompt's": drawn, "zipf": zipf, "pool in corpora": pool,
            "blocks": num_blocks, "queries": queries, "seed": seed,
        }  # fmt: skip
        console.print(line_of_settings(head), soft_wrap=True)
        with start(settings, *(ours or [])) as server:
            grafted = _ask(f"{server.url}/v1/completions", asked)
    ideal = ideally_found(asked, sizes, num_blocks * BLOCK - longest)
    curve = Curve([len(query.tokens) - OPENING - QUESTION for query in asked], grafted, ideal)
    lines = {"ideal cache of documents": (curve, curve.ideal), "grafted": (curve, curve.grafted)}
    lines |= {f"grafted ({name})": (other, other.grafted) for name, other in others.items()}
    console.print(_table(lines))
    if plot:
        draw(lines, plot)
        errors.print(f"wrote {plot}")
    if json_out:
        print(json.dumps({"configuration": head, "curve": asdict(curve)}))


def _ask(url: str, queries: Sequence[Query]) -> list[int]:
    """Tokens of documents that the server has grafted for each prompt."""
    found = []
    with httpx.Client(timeout=600) as client, progress_bar(errors, "queries") as on_progress:
        for number, query in enumerate(queries):
            body = {"prompt": query.tokens, "max_tokens": 1, "temperature": 0}
            answer = client.post(url, json=body).raise_for_status().json()
            report = (answer.get("kv_transfer_params") or {})["kvgraft"]
            found.append(int(report["grafted_tokens"]))
            on_progress(number + 1, len(queries))
    return found


def _table(lines: Lines) -> Table:
    table = markdown_table(
        ["", "of all document tokens", f"of the last {LAST} prompts'", "of the ideal"]
    )
    ideal = next(curve.share(found, LAST) for curve, found in lines.values())
    for name, (curve, found) in lines.items():
        last = curve.share(found, LAST)
        table.add_row(name, f"{curve.share(found):.3f}", f"{last:.3f}", f"{last / ideal:.3f}")
    return table


def draw(lines: Lines, path: Path) -> None:
    """Running means, from the first query to the last; the first line is the ideal."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    from kvgraft_lab.evaluate.plots import STYLE, save

    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.8))
        for number, (name, (curve, found)) in enumerate(lines.items()):
            window = min(WINDOW, len(found))
            shares = np.convolve(np.array(found) / curve.known, np.ones(window) / window, "valid")
            colour = "#a9b2c0" if number == 0 else f"C{number - 1}"
            axes.plot(range(window, window + len(shares)), shares, color=colour, label=name)
        axes.set_xlabel(f"query (mean of {WINDOW})")
        axes.set_ylabel("share of document tokens")
        axes.set_ylim(0, 1.02)
        axes.legend(loc="lower right")
        save(figure, path)


def _read(path: Path) -> Curve:
    try:
        return Curve(**json.loads(path.read_text())["curve"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(
            f"{path} is no output of this benchmark's --json: {error}"
        ) from error


if __name__ == "__main__":
    typer.run(main)
