"""What users install is the product: one model, and neither research nor how the model is made."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]


def files() -> list[Path]:
    """All files of the wheel, from the directory that holds the package."""
    [package] = WHEEL["packages"]
    found = (
        path
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return [path.relative_to((ROOT / package).parent) for path in found]


def test_the_wheel_is_the_package_and_nothing_else():
    assert WHEEL == {"packages": ["src/kvgraft"]}, (
        "what is included by other rules would not be seen here"
    )
    assert [path.name for path in (ROOT / "src").iterdir() if path.name != "__pycache__"] == [
        "kvgraft"
    ]


def test_no_research_in_the_wheel():
    names = {part for path in files() for part in path.with_suffix("").parts}
    assert not names & {
        "research",
        "agents",
        "proposed",
        "training",
        "trainer",
        "curriculum",
        "search",
        "model_by_head",
    }
    assert not names & {path.name for path in (ROOT / "research").iterdir() if path.is_dir()} - {
        "redknot", "samkv", "sparsex", "testbed", "__pycache__"
    }, "methods of these names are the product"  # fmt: skip


def test_one_model_in_the_wheel():
    weights = [path for path in files() if path.suffix == ".safetensors"]
    assert [str(path) for path in weights] == ["kvgraft/testbed/model/model.safetensors"]
    kinds = {path.suffix for path in files()} - {
        ".py",
        ".json",
        ".safetensors",
        ".jinja",
        ".j2",
        ".html",
        ".typed",
        "",
    }
    assert not kinds, f"nobody expects {kinds} in a package"
    assert sum((ROOT / "src" / path).stat().st_size for path in files()) < 12 * 2**20
