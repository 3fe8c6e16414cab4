"""`kvgraft analyze` as a user calls it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from kvgraft.cli import app, run
from kvgraft.core.costs import Costs
from kvgraft_lab.testbed import MODEL_DIR

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
PAIR = [str(EXAMPLES / "read.json"), str(EXAMPLES / "ask.json")]


def test_the_examples_of_the_pages_are_analysed(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    outputs = ["--html", str(tmp_path / "a.html"), "--plot", str(tmp_path / "a.png")]
    assert (
        run(
            app,
            [
                "analyze",
                *PAIR,
                "--tokenizer",
                str(MODEL_DIR),
                "--block-size",
                "32",
                "--json",
                *outputs,
            ],
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["unknown_tokens"], found["order"]) == (
        2,
        0,
        "sessions take turns",
    )
    [_, ours] = (session["sides"]["kvgraft"] for session in found["sessions"])
    answer = json.loads((EXAMPLES / "answer.json").read_text())["kv_transfer_params"]["kvgraft"]
    kinds = [answer[f"{kind}_tokens"] for kind in ("prompt", "prefix", "grafted", "fresh")]
    assert [ours["prompt"], ours["prefix"], sum(ours["grafted"]), ours["new"]] == kinds, (
        "what a server of vLLM has said"
    )
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert (found["costs"], found["pools"][0]["seconds"]) == (None, None)
    assert run(app, ["analyze", *PAIR]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "kvgraft" in printed
    assert (
        "seconds, too: kvgraft profile-costs MODEL -o costs.json, then analyze --costs costs.json"
        in printed
    )
    assert "seconds of prefill" not in printed


def test_measured_costs_make_seconds_of_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    costs = Costs(pass_s=0.01, token_s=1e-3, pair_s=0.0, copy_s=1e-5)
    costs.save(tmp_path / "costs.json")
    priced = [
        "analyze",
        *PAIR,
        "--tokenizer",
        str(MODEL_DIR),
        "--costs",
        str(tmp_path / "costs.json"),
    ]
    assert run(app, [*priced, "--html", str(tmp_path / "a.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs"] == asdict(costs)
    [pool] = found["pools"]
    assert pool["seconds"]["full"] == pytest.approx(2 * 0.01 + 1e-3 * found["tokens"])
    prefix, ours = (pool["sides"][side] for side in ("prefix caching", "kvgraft"))
    grafted = sum(ours["grafted"])
    assert grafted > 0
    expected = 3 * 0.01 + 1e-3 * (ours["new"] + 0.15 * grafted) + 1e-5 * grafted
    assert pool["seconds"]["sides"]["kvgraft"] == pytest.approx(expected), (
        "one more pass, for the one that grafts"
    )
    assert pool["seconds"]["sides"]["prefix caching"] == pytest.approx(
        2 * 0.01 + 1e-3 * prefix["new"]
    )
    assert sum(one["seconds"]["full"] for one in found["sessions"]) == pytest.approx(
        pool["seconds"]["full"]
    )
    assert run(app, priced) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "seconds of prefill" in printed
    assert "of what is grafted 15% is computed again" in printed
    assert "profile-costs" not in printed


ERRORS = {
    "no such file": ["missing.jsonl"],
    "line 1: is not JSON": ["bad.jsonl"],
    "server.log, line 1: this log has no request": ["server.log"],
    "no request in empty.json": ["empty.json"],
    "--pool 'many': must be tokens": [*PAIR, "--pool", "1M,many"],
    "a pool of 160 tokens: the longest request": [*PAIR, "--pool", "160"],
    "unknown match 'alike'": [*PAIR, "--match", "alike"],
    "block_size must be an integer of at least 1": [*PAIR, "--block-size", "0"],
    "max_depth must be an integer of at least 0": [*PAIR, "--max-depth", "-1"],
    "missing is not a model directory": [*PAIR, "--tokenizer", "missing"],
    "missing.json": [*PAIR, "--costs", "missing.json"],
    "holds no costs": [*PAIR, "--costs", "bad.jsonl"],
    "no model runs here": [*PAIR, "--costs", "measured"],
    "there is no directory nowhere": [*PAIR, "--html", "nowhere/a.html"],
    "--plot a.pdf: must end in .png": [*PAIR, "--plot", "a.pdf"],
}


@pytest.mark.parametrize(("message", "arguments"), ERRORS.items(), ids=ERRORS)
def test_errors_say_what_is_wrong(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    message: str,
    arguments: list[str],
):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{\n")
    Path("server.log").write_text("INFO 11-27 15:23:44 [launcher.py:38] Route: /health\n")
    Path("empty.json").write_text("[]")
    assert run(app, ["analyze", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
