"""A fleet on a Ray cluster: started, replaced under load, ended by Ray's own command."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Event

import httpx
import pytest
from fleets import ADMIN, ALICE, BOB, SETTINGS, START_S, Corpus, RunningFleet, ask

from kvgraft.server.process import reserved_port

pytestmark = [pytest.mark.slow, pytest.mark.soak]
BIN = Path(sys.executable).parent


def environment(admin_key: str) -> dict[str, str]:
    """The environment of a cluster and of the command that deploys a fleet there."""
    ours = {"KVGRAFT_ADMIN_KEY": admin_key, "RAY_AUTH_MODE": "disabled"}
    return {**os.environ, **SETTINGS, **ours}


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
    with (tmp_path / "ray").open("wb") as log:
        cluster = subprocess.Popen(
            command, env=environment(ADMIN), stdout=log, stderr=subprocess.STDOUT
        )
    time.sleep(10)
    yield f"127.0.0.1:{port}"
    cluster.terminate()
    cluster.wait(60)
    rmtree(folder, ignore_errors=True)


@dataclass
class Cluster(RunningFleet):
    """A fleet on a cluster, deployed by the command."""

    address: str = ""
    admin_key: str = ADMIN

    def deploy(self, *flags: str) -> None:
        """Start the fleet, or replace it, with these flags."""
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "kvgraft", "fleet", "--address", self.address]
        with self.log.open("ab") as log:
            subprocess.run(
                [*command, "--port", port, *flags, "--api-key", ALICE, BOB],
                check=True,
                env=environment(self.admin_key),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=START_S,
            )

    def wait_until_gone(self, name: str) -> float:
        """The time at which the fleet no longer lists a replica."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if name not in {replica["name"] for replica in self.replicas()}:
                    return time.monotonic()
            time.sleep(0.2)
        raise TimeoutError(self.log.read_text(errors="replace")[-3000:])


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Cluster:
    """A fleet that is not deployed yet."""
    with reserved_port() as port:
        pass
    return Cluster(f"http://127.0.0.1:{port}", None, tmp_path / "log", address=address)


def test_a_fleet_is_replaced_while_it_answers(fleet: Cluster):
    fleet.admin_key = "another one than on the cluster"
    with pytest.raises(subprocess.CalledProcessError):
        fleet.deploy("--replicas", "1")
    fleet.admin_key = ADMIN
    assert (
        "KVGRAFT_ADMIN_KEY: not the same here as where the fleet was started"
        in fleet.log.read_text()
    )
    fleet.deploy("--replicas", "2")
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
        fleet.deploy("--replicas", "2", "--kvgraft-max-depth", "2")
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


def test_a_stream_of_a_replica_that_is_replaced_ends_completely_or_with_an_error(fleet: Cluster):
    """Completely if it ends within `--drain-s`, else with an error event; it is never cut."""
    sent = {"model": "bundled", "prompt": Corpus(20, 1).prompt(0)[0], "ignore_eos": True}
    sent |= {"stream": True, "max_tokens": 3000, "n": 8}

    def replace(*flags: str) -> list[str]:
        """The events of a stream that runs while the fleet is replaced."""
        [old] = fleet.wait_for(1)
        with (
            ThreadPoolExecutor(2) as threads,
            fleet.http() as client,
            client.stream("POST", "/v1/completions", json=sent) as stream,
        ):
            lines = stream.iter_lines()
            events = [next(lines)]
            deployed = threads.submit(fleet.deploy, "--replicas", "1", *flags)
            gone = threads.submit(fleet.wait_until_gone, old["name"])
            events += filter(None, lines)
            ended_at = time.monotonic()
            assert ended_at > gone.result(), "the answer was complete before the replica left"
            deployed.result()
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    fleet.deploy("--replicas", "1", "--drain-s", "3000")
    *events, last = replace("--drain-s", "2")
    assert last == "[DONE]"
    assert sum('"finish_reason":"length"' in event for event in events) == sent["n"]

    *events, last = replace("--drain-s", "2")
    assert json.loads(last)["error"]["code"] == 503
    assert '"finish_reason":"length"' not in "".join(events)
