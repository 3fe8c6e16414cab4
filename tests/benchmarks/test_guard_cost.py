"""What the benchmark of the guard makes of figures; and real servers on a tiny model."""

import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

import guard_cost as command
from guard_cost import PLAIN, Turn, table_of
from load import Outcome, Summary

FAST = Summary.of([Outcome("rag", float(n), n + 0.1, n + 1.0, (), 100, 3) for n in range(10)])


def test_a_row_for_each_server_with_ratios_to_the_unscored_one():
    slower = replace(FAST, requests_per_s=FAST.requests_per_s / 2)
    turns = {
        PLAIN: [Turn(slower, 0.0, 0, 0, 0)],
        "0% scored": [Turn(FAST, 0.0, 0, 0, 0)],
        "5% scored": [Turn(slower, 1.0, 10, 2, 50), Turn(slower, 1.0, 10, 1, 50)],
    }
    turns["0% scored"] *= 2
    turns[PLAIN] *= 2
    table = table_of(turns)
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == list(turns)
    assert columns[5] == ["0.500", "1.000", "0.500"]
    assert columns[7] == ["-", "-", "3 of 20"]
    assert columns[8] == ["-", "-", "5.00%"]
    assert columns[9] == ["1.000", "1.000", f"{1 + 1 / FAST.seconds:.3f}"]


@pytest.mark.soak
def test_real_servers_are_driven_and_answers_scored():
    app = typer.Typer()
    app.command()(command.main)
    arguments = [
        "--share",
        "1",
        "--tokens",
        "512",
        "--requests",
        "4",
        "--rounds",
        "1",
        "--layers",
        "1",
    ]
    result = CliRunner().invoke(app, [*arguments, "--max-tokens", "4", "--json"])
    assert result.exit_code == 0, result.output
    turns = json.loads(result.stdout)["turns"]
    assert list(turns) == [PLAIN, "100% scored"]
    [scored] = turns["100% scored"]
    assert scored["approximate"] == scored["scored"] > 0
    assert 0 < scored["tokens"] <= scored["scored"] * 600
    assert turns[PLAIN][0]["scored"] == 0
