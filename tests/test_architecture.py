"""Imports point one way, and each heavy or foreign library is imported only where it belongs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kvgraft"
LABORATORY = ROOT / "lab" / "kvgraft_lab"
LAYERS = [  # each may import what stands before it, and itself
    {"methods", "models", "setting_schema"},
    {"kernels", "kv"},
    {"core"},
    {"store", "prefill", "decode"},
    {"policies", "flows"},
    {"engine"},
    {"guard"},
    {"vllm"},
    {"server"},
    {"fleet"},
    {"cli", "__main__", "__init__"},
]
LAB_LAYERS = [{"testbed"}, {"evaluate"}, {"traffic"}, {"simulation"}, {"commands"}, {"__init__"}]
STORE = [  # within store/, each may import what stands before it
    {"events"},
    {"budget", "chunk_index", "files", "redis_backend", "writer"},
    {"catalogue", "file_backend", "secret"},
    {"backends", "signer"},
    {"disk", "maintenance", "shared"},
    {"tiers"},
    {"store"},
    {"options"},
    {"__init__"},
]
MOST_ATTRIBUTES = 12
LARGE_CLASSES = {  # that have more; none may grow
    "ModelHost": 22, "PartialPrefill": 22, "Replica": 19, "VllmPrefill": 16,
    "SharedTier": 16, "NativePrefill": 15, "DiskTier": 15, "TenantEngineClient": 14,
    "_Run": 14, "StoreScheduler": 13, "Recording": 13,
}  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
LAB_RANK = {room: rank for rank, rooms in enumerate(LAB_LAYERS) for room in rooms}
FILES = sorted(SOURCE.rglob("*.py"))
LAB = sorted(LABORATORY.rglob("*.py"))
RESEARCH, BENCHMARKS = (sorted((ROOT / name).rglob("*.py")) for name in ("research", "benchmarks"))


def room_of(path: Path) -> str:
    package = SOURCE if SOURCE in path.parents else LABORATORY
    return path.relative_to(package).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path):
    mine = room_of(path)
    for name in imports(path):
        if name.startswith("kvgraft."):
            other = name.split(".")[1]
            assert RANK[other] <= RANK[mine], f"{mine} must not import {other}"
        assert name.split(".")[0] != "kvgraft_lab", "operators do not install the laboratory"


@pytest.mark.parametrize("path", LAB, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way_in_the_laboratory(path: Path):
    mine = room_of(path)
    for name in imports(path):
        if name.startswith("kvgraft_lab."):
            other = name.split(".")[1]
            assert LAB_RANK[other] <= LAB_RANK[mine], f"{mine} must not import {other}"


def test_the_store_knows_its_tiers_and_they_know_nothing_of_it():
    floors = {name: floor for floor, names in enumerate(STORE) for name in names}
    paths = sorted((SOURCE / "store").glob("*.py"))
    assert {path.stem for path in paths} == floors.keys()
    for path in paths:
        for name in imports(path):
            if name.startswith("kvgraft.store"):
                other = name.removeprefix("kvgraft.store").strip(".") or "__init__"
                assert floors[other] < floors[path.stem], f"{path.stem} must not import {other}"


@pytest.mark.parametrize("path", [*FILES, *LAB], ids=lambda path: str(path.relative_to(ROOT)))
def test_foreign_libraries_stay_in_their_rooms(path: Path):
    allowed = {
        "torch": {
            "kernels", "kv", "core", "store", "prefill", "decode", "policies", "flows", "engine",
            "guard", "vllm", "evaluate", "traffic",
        },
        "transformers": {"engine", "models", "core"},
        "matplotlib": {"evaluate", "traffic", "simulation"},
        "scipy": {"evaluate", "traffic"},
        "bm25s": {"evaluate"},
        "typer": {"cli", "commands"},
        "rich": {"cli", "commands", "engine", "evaluate", "traffic", "simulation", "models"},
        "gguf": {"models"},
        "platformdirs": {"models"},
        "ray": {"fleet"},
        "redis": {"store"},
        "fsspec": {"store"},
        "triton": {"kernels"},
        "vllm": {"vllm", "server"},
    }  # fmt: skip
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {"pickle", "marshal", "shelve", "dill"}
    for library, rooms in allowed.items():
        room = room_of(path)
        assert library not in roots or room in rooms, f"{library} does not belong in {room}"


@pytest.mark.parametrize(
    "path", [*FILES, *LAB, *BENCHMARKS], ids=lambda path: str(path.relative_to(ROOT))
)
def test_research_is_imported_by_research_only(path: Path):
    assert not {name for name in imports(path) if name.split(".")[0] == "research"}


@pytest.mark.parametrize("path", RESEARCH, ids=lambda path: str(path.relative_to(ROOT)))
def test_research_stands_on_the_package_alone(path: Path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {found.stem for found in BENCHMARKS}, (
        "a command, not a module, of benchmarks"
    )
    assert not roots & {"pickle", "marshal", "shelve", "dill", "triton", "vllm"}
    assert not [name for name in imports(path) if name.split(".")[0] == "kvgraft" and "._" in name]


def test_every_file_has_a_docstring():
    for path in [*FILES, *LAB, *RESEARCH]:
        text = path.read_text()
        assert not text or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """All classes of both packages, with their files."""
    for path in [*FILES, *LAB]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield str(path.relative_to(ROOT)), node


def test_no_two_public_classes_have_one_name():
    files: dict[str, list[str]] = {}
    for file, node in classes():
        if not node.name.startswith("_"):
            files.setdefault(node.name, []).append(file)
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_classes_have_few_attributes():
    found = {}
    for _, node in classes():
        names = {
            target.attr
            for target in ast.walk(node)
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
            if isinstance(target.value, ast.Name) and target.value.id == "self"
        }
        if len(names) > MOST_ATTRIBUTES:
            found[node.name] = len(names)
    assert found == LARGE_CLASSES, "a class has grown; or one has shrunk: then lower its number"


def walks() -> list[list[str]]:
    """The steps of each walk in docs/architecture.md: `file:function`."""
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    section = page.split("## Two walks through the code")[1].split("\n## ")[0]
    steps = [
        re.findall(r"^\d+\. `([\w/.]+:[\w.]+)`", part, re.MULTILINE)
        for part in section.split("\n\nA request to")
    ]
    assert len(steps) == 2
    return steps


@pytest.mark.parametrize("steps", walks(), ids=["vllm", "native"])
def test_the_walks_are_short_and_their_steps_exist(steps: list[str]):
    assert 8 <= len(steps) <= 12
    for step in steps:
        file, _, name = step.partition(":")
        body: list[ast.stmt] = ast.parse((SOURCE / file).read_text()).body
        for part in name.split("."):
            named = [node for node in body if getattr(node, "name", None) == part]
            assert named, f"{step} does not exist"
            body = named[0].body  # type: ignore[attr-defined]


def test_processes_that_share_the_tests_keep_groups_together(request: pytest.FixtureRequest):
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_architecture.py"), (
            "pytest and pytest-xdist do not fit together"
        )
