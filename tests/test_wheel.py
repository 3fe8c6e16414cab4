"""What operators install is the product: neither laboratory, research, nor a model."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"": "src/kvgraft", "lab": "kvgraft_lab"}  # by the folder of their pyproject.toml
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
