"""Near-duplicates of real text."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from gguf_files import make_gguf
from kvgraft.models.convert import convert
from kvgraft_lab.evaluate.tasks.texts import edit_words
from research.cross_query import real_text


def test_near_duplicates_are_reused_and_compared_with_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make_gguf(tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "made")
    monkeypatch.setattr(real_text, "LENGTH", 640)
    monkeypatch.setattr(real_text, "SEGMENTS", 3)
    out = tmp_path / "found.json"
    real_text.main(tmp_path / "made", 1, 0.02, 0, out)
    rows = msgspec.json.decode(out.read_bytes(), type=list[real_text.Outcome])
    assert [row.policy for row in rows] == list(real_text.POLICIES)
    assert all(0.5 < row.reused < 1 and row.kl >= 0 for row in rows)
    similar, unprobed, transitive, _ = rows
    assert transitive.flops < unprobed.flops < similar.flops
    assert len(unprobed.edges) > 1
    assert "near-duplicates, 1 prompts" in capsys.readouterr().out


def test_an_edit_replaces_words_by_others_of_the_text():
    text = " ".join(f"w{n}" for n in range(200))
    edited = edit_words(Random(0), text, 0.05).split()
    assert 5 <= sum(a != b for a, b in zip(edited, text.split(), strict=True)) <= 10
    assert set(edited) <= set(text.split())
