"""Questions about a corpus in a pool that is full, against an ideal cache."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from pool import OPENING, QUESTION, Query, ideally_found, make_corpus, make_queries
from pool import main as run_pool

APP = typer.Typer()
APP.command()(run_pool)


def query(*documents: int) -> Query:
    return Query([], list(documents))


def test_an_ideal_cache_holds_whole_documents_the_least_recently_used_go_first():
    sizes = [10, 20, 30]
    asked = [query(0), query(1), query(0), query(2), query(0, 1), query(1)]
    assert ideally_found(asked, sizes, 60) == [0, 0, 10, 0, 30, 20]
    assert ideally_found(asked, sizes, 40) == [0, 0, 10, 0, 10, 20]
    assert ideally_found(asked, sizes, 0) == [0] * 6


def test_queries_hold_their_documents_in_order_and_no_text_twice():
    rng = np.random.default_rng(0)
    corpus = make_corpus(12, rng)
    asked = list(make_queries(corpus, 40, 3, 0.9, rng))
    for one in asked:
        assert one.tokens[OPENING:-QUESTION] == [
            token for number in one.documents for token in corpus[number]
        ]
        assert len(set(one.documents)) == 3
    assert len({tuple(one.tokens[:OPENING]) for one in asked}) == 40
    counts = np.bincount([number for one in asked for number in one.documents], minlength=12)
    assert counts[:4].sum() > counts[4:].sum(), "the first are asked for most"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool", "0.01"], "needs a larger --pool"),
        (["--documents", "3"], "--drawn must be at most --documents, 3, got 4"),
        (["--beside", "none.json"], "none.json is no output of this benchmark's --json"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: list[str], message: str):
    done = CliRunner().invoke(APP, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.soak
def test_a_pool_that_holds_all_gives_all_back(tmp_path: Path):
    told = []
    for name in ("one", "two"):
        options = [
            "--queries",
            "16",
            "--documents",
            "8",
            "--pool",
            "6",
            "--ours",
            "--kvgraft-costs=tokens",
            "--json",
        ]
        beside = ["--beside", str(tmp_path / "one.json")] if told else []
        done = CliRunner().invoke(APP, [*options, *beside, "--plot", str(tmp_path / f"{name}.png")])
        assert done.exit_code == 0, done.output
        (tmp_path / f"{name}.json").write_text(
            next(x for x in done.output.splitlines() if x.startswith("{"))
        )
        told.append(json.loads((tmp_path / f"{name}.json").read_text())["curve"])
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert told[0]["ideal"] == told[1]["ideal"]
    for curve in told:
        assert sum(curve["grafted"]) > 0.8 * sum(curve["ideal"]) > 0
