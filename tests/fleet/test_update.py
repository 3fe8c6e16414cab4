"""A fleet on a Ray cluster: started, replaced under load, ended by Ray's own command."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Event

import pytest
from fleets import ADMIN, ALICE, BOB, SETTINGS, START_S, Corpus, RunningFleet, ask

from kvgraft.server.process import reserved_port

pytestmark = [pytest.mark.slow, pytest.mark.soak]
BIN = Path(sys.executable).parent


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a cluster of one machine with room for three servers."""
    folder = mkdtemp(prefix="ray-")  # a short path: there are sockets in it
    with reserved_port() as port:
        pass
    command = [
        BIN / "ray",
        "start",
        "--head",
        "--block",
        "--num-cpus",
        "3",
        "--include-dashboard",
        "false",
    ]
    command += ["--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", folder]
    environment = {
        **os.environ,
        **SETTINGS,
        "KVGRAFT_ADMIN_KEY": ADMIN,
        "RAY_AUTH_MODE": "disabled",
    }
    with (tmp_path / "ray").open("wb") as log:
        cluster = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    time.sleep(10)
    yield f"127.0.0.1:{port}"
    cluster.terminate()
    cluster.wait(60)
    rmtree(folder, ignore_errors=True)


def test_a_fleet_is_replaced_while_it_answers(address: str, tmp_path: Path):
    environment = {
        **os.environ,
        **SETTINGS,
        "KVGRAFT_ADMIN_KEY": ADMIN,
        "RAY_AUTH_MODE": "disabled",
    }
    with reserved_port() as port:
        pass
    fleet = RunningFleet(f"http://127.0.0.1:{port}", None, tmp_path / "log")

    def deploy(*flags: str) -> None:
        command = [
            sys.executable,
            "-m",
            "kvgraft",
            "fleet",
            "--address",
            address,
            "--port",
            str(port),
            *flags,
        ]
        with fleet.log.open("ab") as log:
            subprocess.run(
                [*command, "--api-key", ALICE, BOB],
                check=True, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=START_S,
            )  # fmt: skip

    environment["KVGRAFT_ADMIN_KEY"] = "another one than on the cluster"
    with pytest.raises(subprocess.CalledProcessError):
        deploy("--replicas", "1")
    environment["KVGRAFT_ADMIN_KEY"] = ADMIN
    assert (
        "KVGRAFT_ADMIN_KEY: not the same here as where the fleet was started"
        in fleet.log.read_text()
    )
    deploy("--replicas", "2")
    before = {replica["name"] for replica in fleet.wait_for(2)}
    corpus, ended = Corpus(0, 16), Event()
    with fleet.http() as client, fleet.http(ADMIN) as admin:
        tenant = client.get("/v1/kvgraft/status").json()["view"]["tenant"]
        segment = {"name": "law", "text": corpus.prompt(0)[0], "tenant": tenant}
        assert admin.post("/v1/kvgraft/pins", json=segment).status_code == 200

    def send(first: int) -> list[int]:
        statuses, number = [], first
        with fleet.http() as client:
            while not ended.is_set():
                statuses.append(ask(client, corpus.prompt(number % 16, question=number)).status)
                number += 1
        return statuses

    with ThreadPoolExecutor(3) as threads:
        sent = [threads.submit(send, 5 * number) for number in range(3)]
        deploy("--replicas", "2", "--kvgraft-max-depth", "2")
        after = {replica["name"] for replica in fleet.wait_for(2, but=list(before))}
        time.sleep(2)
        ended.set()
        statuses = [status for one in sent for status in one.result()]
    print(f"\n{len(statuses)} requests while {before} became {after}")
    assert len(statuses) > 30
    assert set(statuses) == {200}
    assert not before & after
    pinned = fleet.samples("kvgraft:pinned_documents")
    assert {labels["replica"]: count for labels, count in pinned} == dict.fromkeys(after, 1)
