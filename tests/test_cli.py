import errno
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.console import Console
from rich.text import Text

import kvgraft
from chunks import SIZE, make_chunk, put
from kvgraft import Engine
from kvgraft.cli import app, run
from kvgraft.core.cost_model import WORK
from kvgraft.core.costs import Costs
from kvgraft.engine.request import Report
from kvgraft.store import SegmentStore
from kvgraft_lab.evaluate.compare import PolicyOutcome, render
from kvgraft_lab.evaluate.scoring import ORDER_NOISE
from kvgraft_lab.testbed import MODEL_DIR

DOCUMENT = (
    "the paint of bell is grey . the code of lamp is 42 . the old river slept . x5 = 66 . the home "
    "of greta is turin . "
    "now dina came . the quiet road waited near the hill . the warm house opened ."
)
CASE = {
    "read": [DOCUMENT],
    "prompt": f"note grey means 51 . {DOCUMENT} question : note of bell ? answer :",
    "policies": ["naive", "sparsex", "sparsex:recompute_share=1.0"],
    "max_tokens": 2,
    "repeats": 1,
}


@pytest.fixture
def case(tmp_path: Path) -> Path:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASE))
    return path


def test_generate_prints_the_answer_and_where_its_tokens_came_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT)
    question = f"question : {DOCUMENT} question : code of lamp ? answer :"
    arguments = ["generate", question, "--read", str(document), "--max-tokens", "1", "--json"]
    assert run(app, arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "42"
    assert answer["report"]["grafted_tokens"] >= 16
    assert run(app, arguments[:-1]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("42")
    assert "grafted" in printed


QUESTION = "question : code of lamp ? answer :"


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    """Options that make the model read two texts; only the second one answers the question."""
    other = DOCUMENT.replace("lamp", "clock").replace("42", "77").replace("bell", "ring")
    for name, text in (("first", other), ("second", DOCUMENT)):
        (tmp_path / name).write_text(text)
    return ["--read", str(tmp_path / "first"), "--read", str(tmp_path / "second")]


def test_generate_puts_what_it_has_read_before_the_question(
    capsys: pytest.CaptureFixture[str], documents: list[str]
):
    assert run(app, ["generate", QUESTION, *documents, "--max-tokens", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    report, words = answer["report"], len(DOCUMENT.split())
    assert answer["text"] == "42"
    assert report["prompt_tokens"] >= 2 * words + len(QUESTION.split())
    assert report["prefix_tokens"] >= words - 16, "the first one stands where it was read"
    assert report["grafted_tokens"] >= words - 16, "the second one does not"
    inside = f"{DOCUMENT} {QUESTION}"
    assert run(app, ["generate", inside, *documents, "--max-tokens", "1", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["text"], again["report"]["prompt_tokens"]) == ("42", report["prompt_tokens"])


def test_generate_puts_what_it_has_read_into_the_message(
    capsys: pytest.CaptureFixture[str], documents: list[str], tmp_path: Path
):
    model = shutil.copytree(MODEL_DIR, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "note grey means 51 . {% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    ask = [
        "generate",
        QUESTION,
        *documents,
        "--chat",
        "--model",
        str(model),
        "--max-tokens",
        "1",
        "--json",
    ]
    assert run(app, ask) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "42"
    assert answer["report"]["prefix_tokens"] == 0
    assert answer["report"]["grafted_tokens"] >= 2 * (len(DOCUMENT.split()) - 16)


def test_generate_refuses_an_empty_document(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "empty").write_text(" \n")
    assert run(app, ["generate", QUESTION, "--read", str(tmp_path / "empty")]) == 2
    assert f"{tmp_path / 'empty'} has no text" in capsys.readouterr().err


def test_flow_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert run(app, ["flow", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 6
    assert run(app, ["flow", "explain", "quest", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["flow"], told["selects"], told["caches"]) == (
        "quest",
        32,
        {"low": [32], "high": [32]},
    )
    assert run(app, ["flow", "explain", "h2o"]) == 0
    assert "keeps state: requests share no pages" in " ".join(capsys.readouterr().out.split())
    assert run(app, ["flow", "explain", "quest", "--triton"]) == 0
    assert capsys.readouterr().out.count("def fused(") == len(told["sources"]) == 3
    assert (
        run(app, ["flow", "bench", "quest", "--context", "9000", "--out", str(tmp_path / "none")])
        == 2
    )
    assert (
        "--context must be from 3 to 4608, the positions of this model, got 9000"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "none").exists()
    mine = tmp_path / "mine.py"
    for text, error in (
        ("x = 1 +", "mine.py cannot be run: SyntaxError"),
        ("x = 1", "mine.py has no flow: a class that inherits from Flow and has a name"),
    ):
        mine.write_text(text)
        assert run(app, ["flow", "explain", str(mine)]) == 2
        assert error in capsys.readouterr().err


@pytest.mark.soak
def test_flow_bench_writes_tables_and_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    where = ["--out", str(tmp_path), "--length", "512", "--context", "600"]
    assert run(app, ["flow", "bench", "quest:topk_blocks=9", *where, "--json"]) == 0
    assert {one["flow"] for one in json.loads(capsys.readouterr().out)} == {
        "dense",
        "quest:topk_blocks=9",
    }
    assert {path.name for path in tmp_path.iterdir()} == {"flows.jsonl", "flows.json", "flows.png"}


def imported_by(tmp_path: Path, *command_lines: list[str]) -> set[str]:
    """Heavy libraries that a process has imported after these command lines, which must succeed."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\nfrom kvgraft.cli import app, run\n"
        f"codes = [run(app, arguments) for arguments in {list(command_lines)!r}]\n"
        "print(json.dumps([codes, sorted({'torch', 'transformers', 'vllm', 'matplotlib'} & "
        "sys.modules.keys())]))\n"
    )
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True
    )
    codes, found = json.loads(ended.stdout.splitlines()[-1])
    assert codes == [0] * len(command_lines), ended.stderr
    return set(found)


def command_names(group: typer.core.TyperGroup) -> Iterator[list[str]]:
    yield []
    for name, command in group.commands.items():
        deeper = command_names(command) if isinstance(command, typer.core.TyperGroup) else [[]]
        yield from ([name, *rest] for rest in deeper)


def test_help_loads_no_heavy_library(tmp_path: Path):
    names = [name for name in command_names(typer.main.get_command(app)) if name != ["serve"]]
    assert len(names) > 20
    assert ["flow", "list"] in names
    assert imported_by(tmp_path, *([*name, "--help"] for name in names)) == set()


def test_the_help_of_a_fleet_has_its_flags(capsys: pytest.CaptureFixture[str]):
    texts = []
    for line in (["fleet", "--help"], ["fleet", "run", "-h"], ["fleet", "smollm2", "--help"]):
        assert run(app, line) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    for flag in ("--replicas", "--autoscaling", "kvgraft serve --help", "fleet simulate --help"):
        assert flag in texts[0]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]):
    assert run(app, ["--version"]) == 0
    assert capsys.readouterr().out == f"kvgraft {kvgraft.__version__}\n"


def test_a_stores_directory_is_looked_at_without_torch(tmp_path: Path):
    with SegmentStore(
        block_size=SIZE, ram_bytes=0, directory=tmp_path / "store", disk_bytes=1 << 24
    ) as store:
        put(store, make_chunk(1))
    where = ["--dir", str(tmp_path / "store")]
    key = make_chunk(1).key.hex()
    lines = [
        ["list", *where],
        ["show", key, *where],
        ["pin", key, *where],
        ["gc", *where],
        ["drop", key, *where],
    ]
    assert imported_by(tmp_path, *(["store", *line] for line in lines)) == set()


def test_what_a_program_imports_is_there_when_it_is_asked_for(tmp_path: Path):
    program = (
        "import sys, kvgraft; assert 'torch' not in sys.modules; from kvgraft import *; Engine, "
        "Segment, Policy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert set(kvgraft.__all__) == set(dir(kvgraft))
    for name in kvgraft.__all__:
        assert getattr(kvgraft, name) is not None
    with pytest.raises(AttributeError, match="module 'kvgraft' has no attribute 'Enigne'"):
        kvgraft.Enigne  # noqa: B018


def test_compare_measures_every_policy_against_full(capsys: pytest.CaptureFixture[str], case: Path):
    assert run(app, ["compare", str(case), "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)
    assert [o["policy"] for o in outcomes] == ["full", *CASE["policies"]]
    full, naive, _, everything = outcomes
    assert (full["first_kl"], full["agreement"], full["speedup"]) == (0.0, 1.0, 1.0)
    assert everything["first_kl"] < 1e-6
    assert naive["first_kl"] > everything["first_kl"]
    assert naive["report"]["grafted_tokens"] > 0
    assert run(app, ["compare", str(case)]) == 0
    assert "sparsex:recompute_share=1.0" in capsys.readouterr().out


def test_the_example_of_compare_is_grafted(capsys: pytest.CaptureFixture[str]):
    example = Path(__file__).parent.parent / "docs" / "examples" / "compare.json"
    assert run(app, ["compare", str(example), "--json"]) == 0
    _, naive, spread = json.loads(capsys.readouterr().out)
    assert naive["report"]["grafted_tokens"] == spread["report"]["grafted_tokens"] > 500


@pytest.mark.parametrize("noise", [False, True])
def test_what_compare_prints_fits_80_columns(noise: bool):
    report = Report(
        prefix_tokens=12345, grafted_tokens=12346, recomputed_tokens=12347, fresh_tokens=12348
    )
    one = PolicyOutcome(
        "", 12.3456, 10.25, 0.1, True, 0.1234, 0.25, 0.0, 0.75, "the code " * 40, report, 0.31
    )
    policies = [
        "full",
        "sparsex:boundary_layers=2,recompute_share=0.15",
        *([ORDER_NOISE] if noise else []),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render([msgspec.structs.replace(one, policy=policy) for policy in policies]))
    printed = console.export_text()
    assert max(map(len, printed.splitlines())) <= 80
    assert "\u2026" not in printed, "nothing is cut off"
    rows = [line.split() for line in printed.splitlines()]
    unit = ["0.31"] if noise else []
    assert ["full", "12345.6", "10.25", "0.1234", *unit, "25%", "75%"] in rows
    assert ["full", "12345", "12346", "12347", "12348"] in rows
    assert [
        "policy",
        "TTFT",
        "ms",
        "faster",
        "KL",
        *(["/", "noise"] if noise else []),
        "flips",
        "same",
    ] in rows
    firsts = "".join(row[0] for row in rows if row)
    assert firsts.count("sparsex:") == 3, "of each table, and the text"


def _commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for key, command in getattr(group, "commands", {}).items():
        yield f"{name}{key}", command
        yield from _commands(command, f"{name}{key} ")


@pytest.mark.parametrize(("name", "command"), _commands(typer.main.get_command(app)))
def test_no_help_text_is_taken_for_markup(name: str, command: Any):
    for text in [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]:
        if text:
            assert Text.from_markup(text).plain == text.replace("\\[", "["), name


FAILING = [
    (["calibrate", "--out"], "--out"),
    (["profile-heads", "--out"], "--out"),
    (["profile-heads", "--plot"], "--plot"),
    (["profile-layers", "--out"], "--out"),
    (["profile-layers", "--plot"], "--plot"),
    (["profile-costs", "--out"], "--out"),
    (["analyze", "case.json", "--html"], "--html"),
    (["inspect", "case.json", "--html"], "--html"),
]


@pytest.mark.parametrize(("arguments", "option"), FAILING, ids=lambda value: " ".join(value))
def test_what_cannot_be_written_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    option: str,
):
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    for name in ("answers", "calibrate", "studies"):
        monkeypatch.setattr(f"kvgraft_lab.commands.{name}.load", load)
    path = "/proc/kvgraft.file"  # where nobody can write, root included
    assert run(app, [*arguments, path]) == 2
    assert f"{path} cannot be written" in (said := capsys.readouterr().err)
    assert f"name another file with {option}" in said


def test_a_model_directory_that_cannot_be_written_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("kvgraft.cli.options.TemporaryFile", refuse)
    monkeypatch.setattr("kvgraft_lab.commands.calibrate.find", lambda _: tmp_path)
    assert run(app, ["calibrate"]) == 2
    expected = (
        f"{tmp_path / 'policy.json'} cannot be written (Read-only file system): name another file "
        "with --out"
    )
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "give either a prompt or --file"),
        (["generate", "x", "--file", "nowhere.txt"], "give either a prompt or --file"),
        (["generate", "--file", "nowhere.txt"], "no such file: nowhere.txt"),
        (
            ["generate", "the code", "--policy", "magic"],
            "unknown policy 'magic': choose from auto, cacheblend, condense, epic",
        ),
        (
            ["generate", "the code", "--policy", "sparsex:recompute_share=3"],
            "recompute_share must be a share from 0 to 1, got 3",
        ),
        (["generate", ""], "the prompt has no tokens"),
        (["generate", "the code", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["generate", "the code", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["generate", "the <|reuse|> code"], "has no '<|/reuse|>'"),
        (["generate", "the " * 5000], "exceed the limit of 4608"),
        (["generate", "the code", "--model", "nowhere"], "nowhere is not a model directory"),
        (["generate", "the code", "--dtype", "int4"], "dtype 'int4' is not one of"),
        (["generate", "the code", "--device", "tpu"], "device 'tpu' is not available"),
        (["demo", "--policy", "magic"], "unknown policy 'magic'"),
        (["compare", "nowhere.json"], "no such file: nowhere.json"),
        (["demo", "--model", "nowhere"], "nowhere is not a model directory"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert run(app, arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("kvgraft: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"prompt": "x", "policy": "naive"}', "unknown field `policy`"),
        ("{}", "missing required field `prompt`"),
        ('{"prompt": "x", "policies": ["magic"]}', "unknown policy 'magic'"),
        ('{"prompt": "x", "repeats": 0}', "repeats must be at least 1, got 0"),
    ],
)
def test_bad_case_files_say_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
):
    path = tmp_path / "case.json"
    path.write_text(content)
    assert run(app, ["compare", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_the_installed_command_answers_without_a_traceback():
    command = [sys.executable, "-m", "kvgraft", "generate", "--model", "nowhere", "x"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert finished.stderr.startswith("kvgraft: ")
    assert "Traceback" not in finished.stderr


def test_eval_writes_tables_and_pictures_and_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    out = tmp_path / "results"
    arguments = [
        "eval",
        "--suite",
        "multihop",
        "--policies",
        "full,naive",
        "--items",
        "1",
        "--lengths",
        "300",
    ]
    assert run(app, [*arguments, "--patterns", "alone", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in found["all"]] == ["full", "naive"]
    assert {"rows.jsonl", "config.json", "tables.md", "by_task.csv", "quality_work.png"} <= {
        path.name for path in out.iterdir()
    }
    before = (out / "rows.jsonl").read_text()
    assert run(app, [*arguments, "--patterns", "alone", "--out", str(out)]) == 0
    assert (out / "rows.jsonl").read_text() == before
    assert "multihop/hop" in capsys.readouterr().out


def test_inspect_writes_a_page(capsys: pytest.CaptureFixture[str], case: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    assert run(app, ["inspect", str(case), "--html", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert "4 policies" in capsys.readouterr().out


def test_layers_tells_the_probe(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert run(app, ["layers", "--texts", "2", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["texts"] == 2
    assert {len(line["found"]) for line in found["layers"]} == {8}
    assert (tmp_path / "figure6_attention.png").exists()
    assert run(app, ["layers", "--texts", "1"]) == 0
    table = capsys.readouterr().out
    assert f"transitive:probe_layers={found['probe']}" in table
    assert [line.split()[1] for line in table.splitlines() if line.endswith("% │")] == [
        str(n) for n in range(8)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers", "--texts", "0"], "texts must be at least 1, got 0"),
        (["eval", "--suite", "rules"], "unknown suite 'rules': choose from all, ruler"),
        (["eval", "--suite", "missing.jsonl"], "no such file: missing.jsonl"),
        (["eval", "--suite", "ruler", "--policies", "full,magic"], "unknown policy 'magic'"),
        (["eval", "--suite", "ruler", "--policies", "naive"], "policies must begin with full"),
        (["eval", "--suite", "ruler", "--host", "moon"], "unknown host 'moon'"),
        (["eval", "--suite", "ruler", "--lengths", "long"], "lengths must be numbers of tokens"),
        (
            ["eval", "--suite", "ruler", "--lengths", "9"],
            "length must be at least 256 tokens, got 9",
        ),
        (["eval", "--suite", "ruler", "--patterns", "sideways"], "unknown pattern 'sideways'"),
        (["eval", "--suite", "ruler", "--items", "0"], "items must be at least 1, got 0"),
        (
            ["eval", "--suite", "ruler", "--split", "dev"],
            "split dev: what is generated has none, as ruler",
        ),
        (
            ["eval", "--suite", "docs", "--split", "train"],
            "unknown split 'train': choose from all, dev, test",
        ),
        (
            ["eval", "--suite", "all", "--no-chat"],
            "chat templates are for suites of real text (docs, files)",
        ),
        (["eval", "--suite", "ruler", "--model", "nowhere"], "nowhere"),
        (["inspect", "missing.json", "--html", "page.html"], "no such file: missing.json"),
    ],
)
def test_what_eval_and_inspect_refuse_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    assert run(app, arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_profile_costs_writes_what_an_engine_and_analyze_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    out = tmp_path / "costs.json"
    assert run(app, ["profile-costs", "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    costs = Costs.load(out)
    assert found["costs"] == json.loads(out.read_text()) == asdict(costs)
    assert (found["measured_tokens"], found["recomputed_share"]) == (1024, WORK)
    assert [prompt["tokens"] for prompt in found["prompts"]] == [1024, 4096, 16384]
    assert all(
        prompt["full_s"] > 0 < prompt["copied_s"] <= prompt["grafted_s"]
        for prompt in found["prompts"]
    )
    assert Engine(MODEL_DIR, num_pages=64, costs=out).memory.admission.cost_model.costs == costs  # type: ignore[union-attr]
    assert run(app, ["profile-costs", "--out", str(out), "--recomputed-share", "0"]) == 0
    assert "0% is computed again" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a model directory"),
        (["-o", "nowhere/costs.json"], "nowhere/costs.json: there is no directory nowhere"),
        (["-o", "."], ". is a directory: name a file"),
        (["--recomputed-share", "2"], "--recomputed-share must be a share from 0 to 1, got 2.0"),
        (["--device", "tpu"], "device 'tpu' is not available"),
    ],
)
def test_what_profile_costs_refuses_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    assert run(app, ["profile-costs", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_kvgraft_alone_prints_its_help_and_no_error(capsys: pytest.CaptureFixture[str]):
    assert run(app, []) == 2
    printed = capsys.readouterr()
    assert "Commands" in printed.out
    assert printed.err == ""


def test_a_command_that_is_interrupted_says_so_once(capsys: pytest.CaptureFixture[str]):
    interrupted = typer.Typer()

    @interrupted.command()
    def wait() -> None:
        raise KeyboardInterrupt

    assert run(interrupted, []) == 130
    assert capsys.readouterr().err == "aborted\n"
