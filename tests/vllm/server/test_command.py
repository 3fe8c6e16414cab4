"""The command itself, and the same API server inside plain vLLM."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import ADMIN, RunningServer, running
from test_pin_routes import PATH
from test_server import complete, elsewhere

from kvgraft.server import serve
from kvgraft.server.keys import ADMIN_KEY, API_KEY
from kvgraft.server.serve import PLUGINS
from kvgraft.vllm.compat import CONNECTOR, CONNECTOR_MODULE, WORKER_CLASS
from kvgraft.vllm.options import CONTROL_TOKEN
from kvgraft_lab.testbed import MODEL_DIR

SERVE = """
import sys
{first}
from kvgraft.cli import app, run
raise SystemExit(run(app, ["serve"]))
"""


def run_command(*command: str) -> tuple[int, list[str]]:
    """Exit code, and the lines that are ours."""
    finished = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in finished.stderr
    return finished.returncode, [
        line for line in finished.stderr.splitlines() if line.startswith("kvgraft: ")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "10.0.0.1"], "loopback only, got host '10.0.0.1'"),
        pytest.param(
            ["--enable-auto-tool-choice"],
            "--enable-auto-tool-choice requires",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(arguments: list[str], message: str):
    code, lines = run_command("-m", "kvgraft", "serve", *arguments)
    assert code == 2
    assert len(lines) == 1
    assert message in lines[0]


def test_without_vllm_the_command_says_so_and_the_others_work():
    code, [line] = run_command("-c", SERVE.format(first="sys.modules['vllm'] = None"))
    assert code == 2
    assert line == "kvgraft: vLLM is not installed: pip install 'kvgraft[vllm]'"


def test_a_vllm_in_which_names_have_moved_is_told_from_none(tmp_path: Path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    code, [line] = run_command("-c", SERVE.format(first=f"sys.path.insert(0, {str(tmp_path)!r})"))
    assert code == 2
    assert line.startswith(
        "kvgraft: this version of vLLM is none that KVGraft knows: No module named 'vllm."
    )


def test_the_environment_of_the_server_has_the_plugin_and_a_secret_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(PLUGINS, "other")
    monkeypatch.setenv(CONTROL_TOKEN, "from outside")
    serve.prepare_environment(Namespace(no_kvgraft=True))
    assert (os.environ[PLUGINS], os.environ[CONTROL_TOKEN]) == ("other", "from outside")
    secrets = set()
    for _ in range(2):
        serve.prepare_environment(Namespace(no_kvgraft=False))
        secrets.add(os.environ[CONTROL_TOKEN])
    assert os.environ[PLUGINS] == "kvgraft,other"
    assert len(secrets | {"from outside"}) == 3
    monkeypatch.setattr(serve, "entry_points", lambda **_: ())
    with pytest.raises(ValueError, match="install kvgraft again"):
        serve.prepare_environment(Namespace(no_kvgraft=False))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """vLLM's own server, told to use our connector, worker and endpoint plugin; it has no API
    key."""
    connector = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
    }
    connector["kv_load_failure_policy"] = "recompute"
    arguments = [
        "--model",
        str(MODEL_DIR),
        "--served-model-name",
        "bundled",
        "--host",
        "127.0.0.1",
        "--enforce-eager",
    ]
    arguments += [
        "--block-size",
        "32",
        "--enable-prompt-tokens-details",
        "--worker-cls",
        WORKER_CLASS,
    ]
    arguments += ["--kv-transfer-config", json.dumps(connector)]
    environment = {
        name: value for name, value in os.environ.items() if name not in (API_KEY, CONTROL_TOKEN)
    }
    environment |= {PLUGINS: "kvgraft", ADMIN_KEY: ADMIN}
    log = tmp_path_factory.mktemp("plain") / "log"
    with running(
        ["-m", "vllm.entrypoints.launchers.api_server.entry", *arguments], log, environment
    ) as server:
        yield server


@pytest.mark.slow
def test_in_plain_vllm_all_callers_of_a_server_without_keys_are_one_tenant(
    plain: RunningServer, texts: Any
):
    document = texts.document()
    complete(plain, "any", document)
    cached, report = complete(plain, "other", elsewhere(document))
    assert cached == report["grafted_tokens"] + report["prefix_tokens"] >= 500
    with plain.http(None) as client:
        status = client.get("/v1/kvgraft/status").json()
        assert status["view"] == {"tenant": "local", "is_admin": False}
        assert status["totals"]["requests"] == {"miss": 1, "grafted": 1}
        assert client.get("/kvgraft").status_code == 200
        assert client.get(PATH).status_code == 403


@pytest.mark.slow
def test_in_plain_vllm_pinning_takes_a_secret_from_the_environment(plain: RunningServer):
    with plain.http(ADMIN) as client:
        answer = client.post(PATH, json={"name": "x", "text": "the " * 100})
    assert answer.status_code == 503
    assert CONTROL_TOKEN in answer.json()["error"]["message"]
