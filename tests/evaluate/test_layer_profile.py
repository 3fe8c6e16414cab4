"""Which layers agree on what is important (SamKV, Appendix A.2)."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvgraft import Engine
from kvgraft.cli import app, run
from kvgraft.kv.profiles import LayerProfile, last_layers
from kvgraft_lab.evaluate import layer_profile
from kvgraft_lab.testbed import MODEL_DIR


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32", kv_gib=0.01)


def test_layers_in_which_the_best_block_stands_out_agree():
    flat = torch.linspace(0.9, 1.1, 24)
    outstanding, other = flat.clone(), flat.clone()
    outstanding[5] = other[7] = 9.0
    other[5] = flat[5] = 1.15  # good, but not outstanding
    assert layer_profile.agreement(
        torch.stack((outstanding, outstanding, other, flat))
    ).tolist() == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("scores", "threshold", "stable"),
    [
        ([0.9, 0.9, 0.1, 0.4, 0.2, 0.3], 0.5, (3, 4, 5)),  # the lower half never counts
        ([0.9, 0.9, 0.1, 0.4, 0.2, 0.3], 1.0, (3,)),
        ([0.9, 0.0, 0.0, 0.0], 0.5, (3,)),  # none: the last eighth
    ],
)
def test_stable_layers_are_those_of_the_upper_half_with_most_agreement(
    scores: list[float], threshold: float, stable: tuple[int, ...]
):
    found = {"one": np.array(scores), "same": np.array(scores)}
    assert layer_profile.profile("m", found, threshold).stable == stable


def test_the_last_layers_stand_in_for_a_profile():
    assert (last_layers(36), last_layers(8), last_layers(3)) == ((32, 33, 34, 35), (7,), (2,))


@pytest.mark.parametrize("length", [256, 1024])
def test_models_that_read_english_read_both_suites(length: int):
    by_bytes: Any = SimpleNamespace(encode=lambda text: list(text.encode()))
    found = layer_profile.generated_texts(by_bytes, seed=0, count=2, length=length, block=16)
    assert list(found) == ["docs", "alike"]
    texts = [bytes(tokens).decode() for suite in found.values() for tokens in suite]
    assert len(texts) == 4
    assert all(text.startswith("Answer the question from the following text.") for text in texts)


def test_texts_must_be_long_enough(engine: Engine):
    with pytest.raises(ValueError, match="texts must be at least 1, got 0"):
        layer_profile.generated_texts(engine, seed=0, count=0, length=512, block=16)
    with pytest.raises(ValueError, match=r"a\.txt has 2 tokens: texts of 512 are wanted"):
        layer_profile.user_texts(engine, {"a.txt": "the code"}, count=1, length=512, block=16)
    with pytest.raises(
        ValueError, match="give 11 blocks of 8 tokens between the first and the last two, got 5"
    ):
        layer_profile.user_texts(engine, {"a.txt": "the code " * 99}, count=1, length=64, block=8)
    with pytest.raises(ValueError, match=r"threshold must be in \(0, 1\], got 2"):
        layer_profile.profile("m", {"a": np.ones(4)}, 2)


def test_profile_layers_writes_what_the_engine_loads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    out, plot, text = tmp_path / "layers.json", tmp_path / "layers.png", tmp_path / "own.txt"
    arguments = [
        "profile-layers",
        str(MODEL_DIR),
        "--texts",
        "1",
        "--length",
        "512",
        "--out",
        str(out),
    ]
    assert run(app, [*arguments, "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    profile = LayerProfile.load(out)
    assert list(profile.stable) == found["profile"]["stable"]
    assert {len(scores) for scores in found["texts"].values()} == {8}
    assert plot.stat().st_size > 1000
    assert (
        Engine(MODEL_DIR, kv_gib=0.01, stable_layers=profile.stable).library.stable_layers
        == profile.stable
    )
    text.write_text("the code of lamp is 42 . " * 120)
    assert run(app, [*arguments, "--text", str(text)]) == 0
    table = capsys.readouterr().out
    assert "own.txt" in table
    assert [line.split()[1] for line in table.splitlines() if line.endswith("% │")] == [
        str(n) for n in range(8)
    ]
    assert run(app, [*arguments, "--length", "50", "--text", str(text)]) == 2
    assert "length must give 11 blocks" in capsys.readouterr().err


def test_the_bundled_profile_is_used():
    profile = LayerProfile.load(MODEL_DIR / "layers.json")
    engine = Engine(MODEL_DIR, kv_gib=0.01)
    assert profile.model == engine.config.identity
    assert engine.library.stable_layers == profile.stable


def test_a_profile_of_another_model_is_not_used(
    model_dirs: dict[str, Path], caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    directory = tmp_path / "model"
    shutil.copytree(model_dirs["llama"], directory)
    LayerProfile("another", (0,)).save(directory / "layers.json")
    assert Engine(directory).library.stable_layers == (2,)
    assert "was made for model another" in caplog.text
    (directory / "layers.json").write_text("{}")
    assert Engine(directory).library.stable_layers == (2,)
    assert "is no layer profile" in caplog.text
