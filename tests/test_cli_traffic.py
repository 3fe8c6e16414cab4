"""`kvgraft analyze` as a user calls it."""

import json
from pathlib import Path

import pytest

from kvgraft.cli import app, run
from kvgraft.testbed import MODEL_DIR

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
PAIR = [str(EXAMPLES / "read.json"), str(EXAMPLES / "ask.json")]


def test_the_examples_of_the_pages_are_analysed(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    outputs = ["--html", str(tmp_path / "a.html"), "--plot", str(tmp_path / "a.png")]
    assert run(app, ["analyze", *PAIR, "--tokenizer", str(MODEL_DIR), "--block-size", "32", "--json", *outputs]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["unknown_tokens"], found["order"]) == (2, 0, "sessions take turns")
    [_, ours] = (session["sides"]["kvgraft"] for session in found["sessions"])
    answer = json.loads((EXAMPLES / "answer.json").read_text())["kv_transfer_params"]["kvgraft"]
    kinds = [answer[f"{kind}_tokens"] for kind in ("prompt", "prefix", "grafted", "fresh")]
    assert [ours["prompt"], ours["prefix"], sum(ours["grafted"]), ours["new"]] == kinds, (
        "what a server of vLLM has said"
    )
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert run(app, ["analyze", *PAIR]) == 0
    assert "kvgraft" in capsys.readouterr().out


ERRORS = {
    "no such file": ["missing.jsonl"],
    "line 1: is not JSON": ["bad.jsonl"],
    "--pool 'many': must be tokens": [*PAIR, "--pool", "1M,many"],
    "a pool of 160 tokens: the longest request": [*PAIR, "--pool", "160"],
    "unknown match 'alike'": [*PAIR, "--match", "alike"],
    "block_size must be an integer of at least 1": [*PAIR, "--block-size", "0"],
    "max_depth must be an integer of at least 0": [*PAIR, "--max-depth", "-1"],
    "missing is not a directory": [*PAIR, "--tokenizer", "missing"],
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
    assert run(app, ["analyze", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
