"""What operators install is the product: neither laboratory, research, nor a model."""

import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kvgraft.cli import app
from kvgraft.cli.laboratory import COMMANDS, CommandGroup
from kvgraft.models import LABORATORY
from kvgraft_lab.testbed import MODEL_DIR

ROOT = Path(__file__).parent.parent
PACKAGES = {"": "src/kvgraft", "lab": "kvgraft_lab"}  # by the folder of their pyproject.toml
ABSENT = (
    "kvgraft_lab",
    "scipy",
    "matplotlib",
    "accelerate",
    "bm25s",
)  # where the product alone is installed
PLAIN = {".py", ".json", ".jinja", ".j2", ".html", ".typed", ""}


def files(folder: str) -> list[Path]:
    """All files of a wheel, from the directory that holds its package."""
    package = ROOT / folder / PACKAGES[folder]
    found = (
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return [path.relative_to(package.parent) for path in found]


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_wheel_is_its_package_and_nothing_else(folder: str):
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": [PACKAGES[folder]]}
    package = ROOT / folder / PACKAGES[folder]
    assert {
        path.name
        for path in package.parent.iterdir()
        if path.is_dir() and path.name != "__pycache__"
    } == {package.name}


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_research_in_a_wheel(folder: str):
    names = {part for path in files(folder) for part in path.with_suffix("").parts}
    assert not names & {
        "research", "agents", "proposed", "training", "trainer", "curriculum", "search",
        "model_by_head",
    }  # fmt: skip
    assert not names & {path.name for path in (ROOT / "research").iterdir() if path.is_dir()} - {
        "redknot", "samkv", "sparsex", "testbed", "__pycache__"
    }, "methods of these names are the product"  # fmt: skip


def test_the_product_has_no_model_and_the_laboratory_has_one():
    assert {path.suffix for path in files("")} <= PLAIN
    assert sum((ROOT / "src" / path).stat().st_size for path in files("")) < 3 * 2**20
    weights = [path for path in files("lab") if path.suffix not in PLAIN]
    assert [str(path) for path in weights] == ["kvgraft_lab/testbed/model/model.safetensors"]


def test_both_have_one_version():
    product, lab = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in PACKAGES
    )
    assert f"kvgraft[gguf]=={product['version']}" in lab["dependencies"]
    assert lab["version"] == product["version"]


Product = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Product:
    """Run Python in an environment of the product alone: all packages that are here but ABSENT."""
    packages = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(ABSENT):
            (packages / path.name).symlink_to(path)
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{packages}",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }

    def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run_python


def test_the_product_alone_says_what_needs_the_laboratory(product: Product):
    without_model = ["serve", "serve --check", "fleet", "generate hi"]
    lines = [*COMMANDS, "analyze x", "fleet simulate --generated rag", *without_model]
    ended = product(
        "-c",
        "import sys\nfrom importlib.util import find_spec\nfrom kvgraft.cli import app, run\n"
        f"print(*map(find_spec, {ABSENT}), *[run(app, line.split()) for line in {lines}])",
    )
    assert ended.stdout.split() == ["None"] * len(ABSENT) + ["2"] * len(lines), ended.stderr
    for line, said in zip(lines, ended.stderr.splitlines(), strict=True):
        assert said.endswith(f"is part of {LABORATORY}")
        about = "name a model; " if line in without_model else f"`kvgraft {line[:4]}"
        assert said.startswith(f"kvgraft: {about}")


def test_the_product_alone_answers_from_a_model(product: Product):
    asked = "the code of lamp is 42 . question : code of lamp ? answer :"
    options = ["--model", str(MODEL_DIR), "--max-tokens", "1"]
    ended = product("-m", "kvgraft", "generate", asked, *options)
    assert (ended.returncode, ended.stdout[:3]) == (0, "42\n"), ended.stderr


def test_the_product_alone_reads_no_gguf_file_and_says_so_before_a_download(product: Product):
    ended = product("-m", "kvgraft", "models", "get", "smollm2")
    said = "kvgraft: reading GGUF files needs accelerate: pip install 'kvgraft[gguf]'\n"
    assert (ended.returncode, ended.stderr[-len(said) :]) == (2, said)


@pytest.mark.slow
def test_all_of_the_product_is_there_without_the_laboratory(product: Product):
    ended = product(
        "-c",
        "import importlib, pkgutil, sys, kvgraft\n"
        "for found in pkgutil.walk_packages(kvgraft.__path__, 'kvgraft.'):\n"
        "    if found.name != 'kvgraft.__main__': importlib.import_module(found.name)\n"
        "from kvgraft.cli import app, run\n"
        f"sys.exit(run(app, ['serve', {str(MODEL_DIR)!r}, '--check', '--json'])"
        " or run(app, ['fleet', 'run', '--help']))",
    )
    assert ended.returncode == 0, ended.stderr


def test_commands_of_the_product_come_first_and_the_laboratory_is_named(product: Product):
    group = typer.main.get_command(app)
    assert isinstance(group, CommandGroup)
    names = group.list_commands(typer.Context(group))
    assert names[:5] == ["generate", "serve", "fleet", "models", "store"]
    assert {*names[5:], "fleet simulate"} == {*COMMANDS}

    alone = product("-m", "kvgraft", "--help").stdout
    assert f"{', '.join(COMMANDS)} are part of {LABORATORY}" in " ".join(alone.split())
    assert "store" in alone
