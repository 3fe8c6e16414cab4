"""Runs of the experiment: rows, resuming, and the commands from end to end."""

import json
from pathlib import Path

import pytest

from kvgraft.cli import run as command
from kvgraft_lab.testbed import MODEL_DIR
from research.cross_query import Variation
from research.cross_query.__main__ import app
from research.cross_query.conditions import find_conditions
from research.cross_query.runner import PLAIN, ROWS, VARIATIONS, ExperimentSettings, read_rows, run

SHORT = Variation(num_passages=2, passage_words=(40, 60))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIATIONS, PLAIN, SHORT)  # type: ignore[attr-defined]


def settings(conditions: str, **changed: object) -> ExperimentSettings:
    given = {"suites": ("qa",), "seeds": (8,), "episodes": 1, "num_pages": 512, **changed}
    return ExperimentSettings(conditions=find_conditions(conditions), **given)  # type: ignore[arg-type]


def test_an_interrupted_run_goes_on(tmp_path: Path):
    done: list[tuple[int, int]] = []
    rows = run(
        settings("none,similar"),
        MODEL_DIR,
        tmp_path,
        lambda *step: done.append(step),
        dtype="float32",
    )
    assert done == [(1, 1)]
    assert [(row.condition, row.step) for row in rows] == [
        ("none", 0),
        ("none", 1),
        ("similar", 0),
        ("similar", 1),
    ]
    assert all(row.success and row.right for row in rows)
    assert [row.last for row in rows] == [False, True, False, True]
    assert rows[3].grafted > 0 == rows[1].grafted
    assert all(row.prompt == row.prefix + row.grafted + row.fresh for row in rows)
    assert all(0 < row.ttft_s <= row.seconds for row in rows)
    whole = (tmp_path / ROWS).read_bytes()
    run(settings("none,similar"), MODEL_DIR, tmp_path, dtype="float32")
    assert (tmp_path / ROWS).read_bytes() == whole
    (tmp_path / ROWS).write_bytes(whole[:-40])
    again = run(settings("none,similar"), MODEL_DIR, tmp_path, dtype="float32")
    assert [row.key for row in again] == [row.key for row in rows]
    assert [row.answer for row in again] == [row.answer for row in rows]
    assert (tmp_path / ROWS).read_bytes().startswith(whole[: whole[:-40].rfind(b"\n") + 1])
    more = run(settings("none,similar,prefix"), MODEL_DIR, tmp_path, dtype="float32")
    assert len(more) == len(rows) + 2 == len(read_rows(tmp_path))
    with pytest.raises(
        ValueError, match=r"other settings \(num_pages was 512, is 640\): choose another directory"
    ):
        run(settings("none", num_pages=640), MODEL_DIR, tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"suites": ("chess",)}, "unknown suite 'chess': choose from qa, tools"),
        ({"variations": ("odd",)}, "unknown variation 'odd': choose from plain, adversarial"),
        ({"seeds": ()}, "seeds must be one or more"),
        ({"seeds": (1, 1)}, "none of them twice"),
        ({"episodes": 0}, "episodes must be at least 1, got 0"),
        ({"sampling": "hot"}, "unknown sampling 'hot'"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        settings("none", **changed)


def test_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "kvgraft.core.block_index.os.urandom", lambda count: b"d" * count
    )  # what LSH proposes hangs on it
    out, common = (
        tmp_path / "out",
        ["--suite", "qa", "--seeds", "8", "--episodes", "1", "--pages", "512"],
    )
    arguments = ["run", *common, "--conditions", "none,similar", "--out", str(out)]
    assert command(app, [*arguments, "--json"]) == 0
    found = {one["condition"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["none"]["grafted"] == 0 < found["similar"]["grafted"]
    assert found["none"]["faster"] == found["none"]["flops"] == 1
    assert command(app, arguments) == 0
    assert "similar" in capsys.readouterr().out
    assert command(app, ["kl", *common, "--out", str(out)]) == 0
    assert "H2" in capsys.readouterr().out
    pictures = tmp_path / "pictures"
    assert command(app, ["verdicts", str(out), "--plot", str(pictures), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {one["hypothesis"] for one in told["verdicts"]} == {"H1", "H2", "H3", "H4"}
    assert {one["verdict"] for one in told["verdicts"]} <= {"holds", "fails", "undecided"}
    assert len(told["pictures"]) == len(list(pictures.iterdir())) == 2
    assert command(app, ["verdicts", str(out)]) == 0
    assert "undecided" in capsys.readouterr().out


def test_stability(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    arguments = ["stability", "--suite", "qa", "--seeds", "8", "--episodes", "1", "--pages", "512"]
    arguments += ["--conditions", "none,similar", "--reruns", "2", "--out", str(tmp_path)]
    assert command(app, [*arguments, "--json"]) == 0
    none, similar = json.loads(capsys.readouterr().out)
    assert (none["reruns"], none["from_none"], none["condition"]) == (2, 0, "none")
    assert 0 <= similar["distance"] <= 1
    assert command(app, arguments) == 0
    assert "entropy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--suite", "chess"], "unknown suite 'chess': choose from qa, tools"),
        (["run", "--conditions", "magic"], "unknown condition 'magic': choose from main"),
        (
            ["run", "--seeds", "1;2"],
            "seeds must be numbers or ranges (0-4), separated by commas, got '1;2'",
        ),
        (["run", "--sampling", "hot"], "unknown sampling 'hot'"),
        (["kl", "--variation", "odd"], "unknown variation 'odd'"),
        (["stability", "--reruns", "1"], "--reruns must be at least 2, got 1"),
        (["verdicts", "nowhere"], "nowhere holds no experiment"),
    ],
)
def test_wrong_names_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert command(app, [*arguments]) == 2
    assert message in capsys.readouterr().err
