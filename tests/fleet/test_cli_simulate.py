"""`kvgraft fleet simulate` as a user calls it."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvgraft.cli import app, run
from kvgraft.core.costs import Costs

ROOT = Path(__file__).parent.parent.parent
PAIR = [str(ROOT / "docs" / "examples" / name) for name in ("read.json", "ask.json")]
FEW = ["--generated", "rag", "--requests", "60", "--documents", "50"]
SIMULATE = ["fleet", "simulate"]


class Rows(HTMLParser):
    """The cells of all tables of a page, by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def test_generated_traffic_as_json_page_and_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    outputs = ["--html", str(tmp_path / "a.html"), "--plot", str(tmp_path / "a.png")]
    assert run(app, [*SIMULATE, *FEW, "--servers", "1,3", "--json", *outputs]) == 0
    found = json.loads(capsys.readouterr().out)
    routers = ["random", "least-loaded", "prefix-aware", "segment-aware"]
    assert [(row["servers"], row["router"]) for row in found["rows"]] == [
        (servers, router) for servers in (1, 3) for router in [*routers, "one server"]
    ]
    for row in found["rows"]:
        assert row.keys() == {
            "servers", "router", "rate", "prefix", "grafted", "of_bound", "ttft_s", "imbalance",
            "sketch_bytes_s",
            "staleness_s", "routing_ms",
        }  # fmt: skip
    alone = [
        (row["prefix"], row["grafted"], row["of_bound"])
        for row in found["rows"]
        if row["servers"] == 1
    ]
    assert len(set(alone)) == 1
    assert found["requests"] == 60
    assert found["settings"]["costs"]["token_s"] == 1 / 8000
    assert "load of 0.7" in found["how_rated"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page, "it loads nothing"
    rows = Rows(page).rows
    assert [row[:2] for row in rows[1:11]] == [
        [str(row["servers"]), row["router"]] for row in found["rows"]
    ]
    assert all(len(row) == len(rows[0]) for row in rows[:11])
    assert all(len(row) == len(rows[11]) for row in rows[11:])
    assert len(rows) == 11 + 9


def test_a_trace_and_measured_costs_in_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    Costs(pass_s=0.01, token_s=1e-3, pair_s=0.0, copy_s=1e-5).save(tmp_path / "costs.json")
    given = ["--servers", "2", "--warm-up", "0", "--costs", str(tmp_path / "costs.json")]
    assert run(app, [*SIMULATE, *PAIR, *given, "--routers", "segment-aware"]) == 0
    out = capsys.readouterr().out
    printed = " ".join(out.split())
    assert "2 requests (recorded, 2 sessions)" in printed
    assert "segment-aware" in printed
    assert "one server" in printed
    assert "…" not in out, "nothing is cut at 80 columns"


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("name files of a trace, or --generated rag, chat or mixed", []),
        ("name files of a trace, or --generated rag, chat or mixed", [*PAIR, "--generated", "rag"]),
        ("no such file or directory: missing.jsonl", ["missing.jsonl"]),
        ("--generated 'talk': must be rag, chat, mixed", ["--generated", "talk"]),
        ("no router 'best': there are random, least-loaded", [*FEW, "--routers", "random,best"]),
        ("--servers '8,many': must be numbers from 1 to 1024", [*FEW, "--servers", "8,many"]),
        ("--servers '2000': must be numbers from 1 to 1024", [*FEW, "--servers", "2000"]),
        ("--pool '5X': must be tokens", [*FEW, "--pool", "5X"]),
        ("--pool unlimited", [*FEW, "--pool", "unlimited"]),
        ("a pool of 1000 tokens: the longest prompt needs", [*FEW, "--pool", "1K"]),
        ("--rate is 0.0, must be more than 0", [*FEW, "--rate", "0"]),
        ("period_s is 0.0, must be more than 0", [*FEW, "--period", "0"]),
        ("delay_s is -1.0, must be at least 0", [*FEW, "--delay", "-1"]),
        ("warm_up is 1.0", [*FEW, "--warm-up", "1"]),
        ("no model runs here", [*FEW, "--costs", "measured"]),
        ("missing.json", [*FEW, "--costs", "missing.json"]),
        ("--per-session is of a trace", [*FEW, "--per-session"]),
        ("--documents is of --generated traffic", [*PAIR, "--documents", "9"]),
        (
            "per_prompt is 6: must be at most half of the 9 documents",
            ["--generated", "rag", "--documents", "9"],
        ),
        ("--plot a.pdf: must end in .png", [*FEW, "--plot", "a.pdf"]),
        ("there is no directory nowhere", [*FEW, "--html", "nowhere/a.html"]),
    ],
)
def test_errors_say_what_is_wrong(
    capsys: pytest.CaptureFixture[str], message: str, arguments: list[str]
):
    assert run(app, [*SIMULATE, *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("kvgraft: ")
    assert said.count("\n") == 1


def test_costs_of_a_file_and_a_speed_contradict_each_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    Costs().save(tmp_path / "costs.json")
    given = ["--costs", str(tmp_path / "costs.json"), "--tokens-per-second", "100"]
    assert run(app, [*SIMULATE, *FEW, *given]) == 2
    assert "says already how long a prefill takes" in capsys.readouterr().err
