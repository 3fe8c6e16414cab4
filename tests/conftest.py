import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# each process has one thread, and so has all that it starts
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"], os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "1", "nobind"
    torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported
sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

import properties
import tiers
from models import FAMILIES, make_model

IN_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ
properties.register()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts vLLM and what is for `make test-all` and `make test-soak`, and say what goes
    together."""
    for item in items:
        if tiers.starts_vllm(item):
            item.add_marker("vllm")
    for item in tiers.left_out(items):
        item.add_marker("soak")
    if IN_PARALLEL:
        items.sort(key=tiers.rank_of)
        for item in items:
            item.add_marker(pytest.mark.xdist_group(tiers.group_of(item)))


@pytest.fixture(scope="session", autouse=True)
def _same_hashes() -> Iterator[None]:
    """Indices whose secret is no chance's: which near-duplicates they propose depends on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kvgraft.core.block_index.os", SimpleNamespace(urandom=lambda count: b"s" * count)
        )
        yield


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family name -> directory of a tiny random model with tokenizer."""
    return {family: make_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models that have a name lie; there are none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvgraft" / "models"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A page of a browser; tests that ask for it are skipped where there is none."""
    from chromium import browsing, find_chromium  # needs what vLLM brings

    command = find_chromium()
    if command is None:
        pytest.skip("no Chromium is installed")
    with browsing(command, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
