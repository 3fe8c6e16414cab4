import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvgraft.kv.heads import HEAD_MAP_FILE
from models import make_head_map, make_model

sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

from hosts import Host
from processes import HostProcess


def _has_vllm() -> bool:
    """A folder of that name lies here too, and is importable: ask for a module of the real one."""
    try:
        return find_spec("vllm.config") is not None
    except ImportError:
        return False


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Skip everything below this folder where there is no vLLM."""
    if not _has_vllm():
        pytest.skip("vLLM is not installed", allow_module_level=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3, with a head map."""
    found = make_model(tmp_path_factory.mktemp("qwen3"), "qwen3", max_position_embeddings=4096)
    make_head_map(found).save(found / HEAD_MAP_FILE)
    return found


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    """The truth: vLLM without our connector, in a process of its own."""
    process = HostProcess(model, tmp_path_factory.mktemp("plain") / "log", with_kvgraft=False)
    yield process
    process.close()


@pytest.fixture(scope="session")
def engine_with_connector(model: Path, plain: HostProcess) -> Host:
    """The one engine with our connector that can live in this process; starts while the plain one
    does."""
    return Host(model)


@pytest.fixture
def host(engine_with_connector: Host) -> Iterator[Host]:
    """Knows nothing at the start of a test, and must be in order at its end."""
    engine_with_connector.forget()
    yield engine_with_connector
    engine_with_connector.abandon()
    assert engine_with_connector.problems() == []


@pytest.fixture(autouse=True)
def _own_environment() -> None:
    """Variables that a test sets are read: where an engine has run, vLLM keeps those that it has
    seen."""
    if (envs := sys.modules.get("vllm.envs")) is not None:
        envs.disable_envs_cache()
