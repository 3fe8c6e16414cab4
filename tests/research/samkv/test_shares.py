"""Shares are those that the policy computes, differences are of the same prompts."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvgraft_lab.evaluate.hosts import Answer
from kvgraft_lab.evaluate.runner import ROWS, EvalRow
from research.samkv.shares import app


def write(directory: Path, policy: str, scores: list[float], score: float = 0.0) -> str:
    answer = Answer("42", 0.1, 100, 0, 80, 8, 20, 0.4)
    rows = [
        EvalRow(
            f"text {n}",
            0,
            "multidoc",
            "chain",
            "alone",
            1024,
            True,
            policy,
            ("42",),
            score,
            f1,
            f1,
            answer,
        )
        for n, f1 in enumerate(scores)
    ]
    directory.mkdir()
    (directory / ROWS).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return str(directory)


def test_differences_are_paired(tmp_path: Path):
    old = write(tmp_path / "old", "samkv", [0.0, 1.0, 0.0, 1.0])
    new = write(tmp_path / "new", "samkv:block_tokens=8", [1.0, 1.0, 1.0, 1.0])
    found = CliRunner().invoke(app, ["paired", old, "samkv", new, "samkv:block_tokens=8"])
    assert (
        "samkv 0.500, samkv:block_tokens=8 1.000, 4 prompts: +0.500 [+0.000, +1.000]"
        in found.output.replace("\n", " ")
    )
    assert CliRunner().invoke(app, ["paired", old, "samkv", new, "samkv"]).exit_code == 2


def test_differences_are_paired_by_the_metrics_of_the_tasks(tmp_path: Path):
    old = write(tmp_path / "old", "samkv", [0.0, 1.0], score=0.25)
    new = write(tmp_path / "new", "samkv", [0.0, 1.0], score=0.75)
    found = CliRunner().invoke(app, ["paired", old, "samkv", new, "samkv", "--score"])
    assert "samkv 0.250, samkv 0.750, 2 prompts: +0.500" in found.output.replace("\n", " ")


@pytest.mark.slow
def test_shares_are_printed():
    found = CliRunner().invoke(
        app, ["shares", "--segments", "3", "--length", "800", "--items", "1", "--block", "8"]
    )
    assert "blocks of 8: " in found.output
    assert "have 0 in all layers of N*" in found.output.replace("\n", " ")
