from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvgraft import Engine
from kvgraft.cli.progress import progress_bar
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.evaluate.demo import (
    POLICIES,
    DemoReport,
    PolicyRow,
    ScenarioTable,
    _first_word,
    render,
    run_demo,
)
from kvgraft_lab.testbed import MODEL_DIR, scenarios
from models import make_model


@pytest.fixture(scope="module", autouse=True)
def short_scenarios() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenarios, "NUM_TOKENS", 700)
        patch.setattr(scenarios, "QUESTIONS_PER_READING", 1)
        yield


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32")


@pytest.fixture(scope="module")
def progress() -> list[tuple[int, ...]]:
    return []


@pytest.fixture(scope="module")
def report(engine: Engine, progress: list[tuple[int, ...]]) -> DemoReport:
    policies = (*POLICIES, "sparsex:boundary_layers=0,recompute_share=1.0")
    return run_demo(
        engine,
        seed=1,
        items=2,
        policies=policies,
        on_progress=lambda *counts: progress.append(counts),
    )


def test_every_scenario_reuses_under_every_policy(report: DemoReport):
    assert [table.name for table in report.tables] == ["rag", "chat", "agents"]
    for table in report.tables:
        full, naive, sparsex, transitive, _ = table.rows
        assert (
            tuple(row.policy for row in table.rows[:4])
            == POLICIES
            == ("full", "naive", "sparsex", DEFAULT_POLICY)
        )
        assert (full.reused, full.recomputed, full.speedup, full.same_as_full) == (0, 0, 1, 4)
        assert naive.reused == sparsex.reused == transitive.reused > 0.9
        assert naive.recomputed == 0 < transitive.recomputed < 0.1 < sparsex.recomputed < 0.5
        assert min(sparsex.right, transitive.right) >= naive.right
        assert all(
            row.num_prompts == 4 and row.fallbacks == 0 and row.ttft_ms > 0 for row in table.rows
        )


def test_full_answers_and_naive_does_not(report: DemoReport):
    full, naive, *_ = report.overall
    assert full.num_prompts == 12
    assert full.right >= 11
    assert naive.right <= 8


def test_progress_counts_prompts(report: DemoReport, progress: list[tuple[int, ...]]):
    assert progress == [(done, 12) for done in range(1, 13)]


def test_report_becomes_json(report: DemoReport):
    decoded = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(report)))
    assert decoded["tables"][2]["rows"][1]["policy"] == "naive"
    assert decoded["overall"][0]["right"] == report.overall[0].right


def test_recomputing_everything_is_full(report: DemoReport):
    everything = report.overall[4]
    assert everything.reused > 0.9
    assert everything.recomputed == 1
    assert everything.same_as_full == everything.num_prompts


def test_a_model_with_another_vocabulary(tmp_path: Path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({token: number + 3 for number, token in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make_model(tmp_path, "llama", vocab_size=300, max_position_embeddings=8192, num_hidden_layers=2)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    full, *others = run_demo(Engine(tmp_path), items=1).overall
    assert all(row.reused == others[0].reused > 0.9 for row in others)
    assert full.same_as_full == full.num_prompts


def test_a_model_with_too_few_positions(model_dirs: dict[str, Path]):
    with pytest.raises(ValueError, match="exceed the limit of 512"):
        run_demo(Engine(model_dirs["llama"]), items=1)


def test_an_engine_with_too_few_pages():
    with pytest.raises(ValueError, match=r"cannot answer a prompt of the demo: \d+ pages needed"):
        run_demo(Engine(MODEL_DIR, num_pages=8), items=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"items": 0}, "num_items must be at least 1"),
        ({"policies": ("naive", "full")}, "must begin with full"),
        ({"policies": ()}, "must begin with full"),
        ({"policies": ("full", "sparsey")}, "sparsey"),
    ],
)
def test_refusals(engine: Engine, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        run_demo(engine, **{"items": 1, **arguments})


@pytest.mark.parametrize(
    ("text", "word"),
    [("66 . x5", "66"), (" Dina.", "dina"), ("\n**lamp**", "lamp"), (" .", ""), ("", "")],
)
def test_first_word(text: str, word: str):
    assert _first_word(text) == word


def test_render_shows_gaps_fallbacks_and_ends_with_the_summary():
    full = PolicyRow("full", 40, 250.0, 1.0, 0.0, 0.0, 1.0, 39, 40, 0)
    naive = PolicyRow("naive", 40, 25.0, 10.0, 0.98, 0.0, 0.02, 20, 21, 3)
    table = ScenarioTable("rag", "documents in another order", (full, naive))
    console = Console(width=120, record=True, file=StringIO())
    console.print(render(DemoReport("a setup", (table,), (full, naive), "What you saw.")))
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert lines[0] == "rag: documents in another order"
    assert "│ naive  │    25.0 │    10.00 │  98.0% │   0.0% │   2.0% │ 20/40 │ 21/40 │" in lines
    assert (
        "right answers against full: naive -19; prompts that fell back to full: naive 3"
        in " ".join(lines)
    )
    assert lines[-1] == "What you saw."
    assert any(line.startswith("a setup. reused: ") for line in lines)


def test_progress_bar():
    output = StringIO()
    with progress_bar(Console(file=output, force_terminal=True), "demo") as on_progress:
        on_progress(3, 7)
    assert "3/7" in output.getvalue()
