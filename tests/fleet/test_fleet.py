"""Two servers behind one address, as users start them: `kvgraft fleet` on the bundled model."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from fleets import ADMIN, ALICE, BOB, Asked, Corpus, RunningFleet, ask, running_fleet

pytestmark = pytest.mark.slow
SKETCH_S = 0.5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    arguments = [
        "--replicas",
        "2",
        "--sketch-s",
        str(SKETCH_S),
        "--kvgraft-store-dir",
        str(folder / "store"),
    ]
    # By measured costs, a server that was disturbed while it measured them may refuse to graft.
    arguments += ["--kvgraft-costs", "tokens"]
    with running_fleet(arguments, folder / "log", {}) as started:
        started.wait_for(2)
        yield started


def by_replica(fleet: RunningFleet, kind: str) -> dict[str, float]:
    """Tokens of a kind by server."""
    return {
        labels["replica"]: value
        for labels, value in fleet.samples("kvgraft:tokens_total", kind=kind)
    }


def test_a_prompt_goes_to_where_its_text_is(fleet: RunningFleet):
    corpus = Corpus(0, 8)
    with fleet.http() as client:
        first = [ask(client, corpus.prompt(number)) for number in range(8)]
        read = by_replica(fleet, "fresh")
        time.sleep(4 * SKETCH_S)
        second = [
            ask(client, corpus.prompt(number, turned=True, question=1)) for number in range(8)
        ]
    assert len(read) == 2
    assert min(read.values()) > 0.2 * sum(read.values())  # both had their share
    assert [answer.status for answer in first + second] == [200] * 16
    assert all(answer.text == answer.right for answer in first)
    assert all(answer.report["grafted_tokens"] > 400 for answer in second)
    assert sum(answer.text == answer.right for answer in second) >= 7  # grafts are approximate


def test_text_is_known_before_its_server_says_so(fleet: RunningFleet):
    corpus = Corpus(1, 6)
    with fleet.http() as client:
        for number in range(6):
            assert not ask(client, corpus.prompt(number)).reused
            assert ask(client, corpus.prompt(number)).report["prefix_tokens"] > 400


def test_conversations_go_on_where_they_began(fleet: RunningFleet):
    """Each brings a text of all in every turn, so that there is something to graft elsewhere,
    too."""
    corpus, turns = Corpus(21, 4, tokens=300), 4
    said = [Corpus(30 + talk, 1, tokens=300).prompt(0)[0] for talk in range(4)]
    told = [0] * 4  # tokens of the prompt before
    with fleet.http() as client:
        for turn in range(turns):
            for talk in (0, 1, 2, 3) if turn % 2 else (3, 1, 0, 2):
                said[talk] += f" {corpus.prompt((turn + talk) % 4)[0]}"
                answer = ask(client, (said[talk], ""), max_tokens=20, ignore_eos=True)
                exact = answer.report["prefix_tokens"] + answer.report["continued_tokens"]
                assert exact > told[talk] - 64, "to the last block, as on one server"
                said[talk] += f" {answer.text}"
                told[talk] = answer.report["prompt_tokens"]


def test_tenants_share_nothing(fleet: RunningFleet):
    corpus = Corpus(2, 4)
    with fleet.http(ALICE) as alice, fleet.http(BOB) as bob:
        for number in range(4):
            ask(alice, corpus.prompt(number))
        time.sleep(4 * SKETCH_S)
        assert not any(ask(bob, corpus.prompt(number)).reused for number in range(4))
        namespace = {"kv_transfer_params": {"kvgraft": {"namespace": "other"}}}
        assert not any(ask(alice, corpus.prompt(number), **namespace).reused for number in range(4))
        assert all(ask(alice, corpus.prompt(number)).reused > 400 for number in range(4))


def test_who_may_ask(fleet: RunningFleet):
    with fleet.http(None) as nobody, fleet.http(ALICE) as alice, fleet.http(ADMIN) as admin:
        assert nobody.get("/health").status_code == 200
        assert nobody.post("/v1/completions", json={"prompt": "the"}).status_code == 401
        # nothing of it was read
        assert nobody.post("/metrics", content=bytes((32 << 20) + 1)).status_code == 200
        assert nobody.get("/v1/kvgraft/fleet").status_code == 401
        assert alice.get("/v1/kvgraft/fleet").status_code == 403
        assert len(admin.get("/v1/kvgraft/fleet").json()["replicas"]) == 2
        assert alice.get("/v1/models").json()["data"][0]["id"] == "bundled"
        assert alice.post("/v1/kvgraft/pins", json={"name": "a", "text": "the"}).status_code == 403


def test_what_servers_refuse_the_client_is_told(fleet: RunningFleet):
    with fleet.http() as client:
        assert (
            client.post("/v1/completions", json={"model": "other", "prompt": "the"}).status_code
            == 404
        )
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.post(
            "/v1/completions", json={"model": "bundled", "prompt": ""}
        ).status_code in (200, 400)
        assert client.get("/nothing").status_code == 404
        assert client.get("/nothing/%2e%2e/v1/models").status_code == 404  # as a server sees it
        assert client.get("/v1/models%3Fa").status_code == 404
        assert client.post("/v1/completions", content=bytes((32 << 20) + 1)).status_code == 413
        too_long = ask(client, ("the " * 40_000, ""))
        assert too_long.status == 400
        assert "maximum context length" in too_long.text
        assert ask(client, Corpus(3, 1).prompt(0)).status == 200


def test_what_is_refused_changes_nothing_that_is_known(fleet: RunningFleet):
    """Paired: what is answered is counted."""

    def known(name: str) -> float:
        return sum(replica[name] for replica in fleet.replicas())

    with fleet.http(ALICE) as alice, fleet.http(BOB) as bob:
        asked = Corpus(8, 1).prompt(0)
        before = known("prompt_bytes")
        assert ask(alice, asked).status == 200
        length = len(asked[0])
        assert known("prompt_bytes") == before + length
        fingerprints = known("fingerprints")
        assert ask(bob, ("the " * 40_000, "")).status == 400
        assert (
            bob.post("/tokenize", json={"model": "bundled", "prompt": asked[0]}).status_code == 200
        )
        assert bob.post("/reset_prefix_cache").status_code in (403, 404)
        odd = {
            "model": {},
            "prompt": asked[0],
            "cache_salt": [1],
            "kv_transfer_params": {"kvgraft": {"namespace": 1}},
        }
        assert bob.post("/v1/completions", json=odd).status_code in (400, 404)
        assert bob.post(
            "/v1/completions", json={"model": ["bundled"], "prompt": asked[0]}
        ).status_code in (400, 404)
        assert known("prompt_bytes") == before + length
        assert known("fingerprints") == fingerprints > 0


def test_streams_come_as_they_are_written(fleet: RunningFleet):
    prompt, _ = Corpus(4, 1).prompt(0)
    sent = {
        "model": "bundled",
        "prompt": prompt,
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }
    with fleet.http() as client, client.stream("POST", "/v1/completions", json=sent) as stream:
        times = [(time.monotonic(), chunk) for chunk in stream.iter_text()]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert "".join(chunk for _, chunk in times).endswith("data: [DONE]\n\n")
    assert len(times) > 5
    assert times[-1][0] > times[0][0]
    assert {replica["pace"] for replica in fleet.replicas()} > {1.0}, (
        "the one that was asked knows its own"
    )


def test_headers_of_the_connection_to_the_fleet_stay_there(fleet: RunningFleet):
    """Paired: others are passed on."""
    sent = {"model": "bundled", "prompt": "the", "max_tokens": 1}
    with fleet.http() as client:
        named = client.post("/v1/completions", json=sent, headers={"X-Request-Id": "named"})
        hop = {"X-Request-Id": "named", "Connection": "keep-alive, x-request-id"}
        assert "named" in named.json()["id"]
        assert "named" not in client.post("/v1/completions", json=sent, headers=hop).json()["id"]


def test_metrics_are_asked_for_once_for_all(fleet: RunningFleet):
    """Paired: a second later they are others."""

    def look(_: int) -> str:
        with fleet.http(None) as client:
            return client.get("/metrics").text

    with ThreadPoolExecutor(8) as threads:
        [shown] = set(threads.map(look, range(8)))
    time.sleep(1.1)
    assert look(0) != shown


def test_only_the_fleet_uses_its_ray(fleet: RunningFleet):
    """Paired: who has the token that its processes have."""
    [store] = [
        one
        for one in psutil.Process(fleet.process.pid).children(recursive=True)
        if one.name() == "gcs_server"
    ]
    address = f"127.0.0.1:{next(one.laddr.port for one in store.net_connections() if one.status == 'LISTEN')}"
    token = psutil.Process(fleet.replicas()[0]["pid"]).environ()["RAY_AUTH_TOKEN"]
    read = (
        "import sys; from ray._raylet import GcsClient as C; C(sys.argv[1]).internal_kv_keys(b'', "
        "None, timeout=60)"
    )
    for shown, code in (
        ({"RAY_AUTH_MODE": "disabled"}, 1),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}, 0),
    ):
        said = subprocess.run(
            [sys.executable, "-c", read, address], env=os.environ | shown, capture_output=True
        )
        assert said.returncode == code, said.stderr
    assert len(token) == 64


def test_who_leaves_is_computed_no_longer(fleet: RunningFleet):
    prompt, _ = Corpus(5, 1).prompt(0)
    sent = {
        "model": "bundled",
        "prompt": prompt,
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        "n": 8,
    }
    with fleet.http() as client, client.stream("POST", "/v1/completions", json=sent) as stream:
        texts = stream.iter_text()  # which ends the request when it is gone
        begun = next(texts)
        assert stream.status_code == 200, begun
        assert wait_until(lambda: fleet.total("vllm:num_requests_running") == 8)
    assert wait_until(lambda: fleet.total("vllm:num_requests_running") == 0)
    assert fleet.total("vllm:generation_tokens_total") < 7 * 3000


def wait_until(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.1)
    return happened()


def test_a_pinned_text_is_pinned_everywhere(fleet: RunningFleet):
    text, _ = Corpus(6, 1).prompt(0)
    with fleet.http(ALICE) as alice, fleet.http(ADMIN) as admin:
        tenant = alice.get("/v1/kvgraft/status").json()["view"]["tenant"]
        pinned = admin.post(
            "/v1/kvgraft/pins", json={"name": "law", "text": text, "tenant": tenant}
        )
        assert pinned.status_code < 300, pinned.text
        assert [value for _, value in fleet.samples("kvgraft:pinned_documents")] == [1, 1]
        deleted = admin.delete(f"/v1/kvgraft/pins/law?tenant={tenant}")
        assert deleted.status_code < 300, deleted.text
        ask(alice, ("the", ""))
        assert [value for _, value in fleet.samples("kvgraft:pinned_documents")] == [0, 0]


@pytest.mark.parametrize("what", [pytest.param("server_pid", marks=pytest.mark.soak), "pid"])
def test_a_killed_server_loses_only_what_it_has_in_flight(fleet: RunningFleet, what: str):
    """And the one that starts in its place has what all servers were told to pin."""
    corpus = Corpus(7 + len(what), 12)
    with fleet.http() as client, fleet.http(ADMIN) as admin:
        tenant = client.get("/v1/kvgraft/status").json()["view"]["tenant"]
        segment = {"name": what, "text": corpus.prompt(0)[0], "tenant": tenant}
        assert admin.post("/v1/kvgraft/pins", json=segment).status_code == 200
        for number in range(12):
            assert ask(client, corpus.prompt(number)).status == 200
    time.sleep(2.0)  # for the store
    before = fleet.wait_for(2)
    engine = [
        process.pid for process in psutil.Process(before[0]["server_pid"]).children(recursive=True)
    ]
    failed_before = fleet.total("kvgraft:fleet_failed_total", at="2")

    def send(number: int) -> Asked:
        with fleet.http() as own:
            return ask(own, corpus.prompt(number % 12, question=number // 12))

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(send, number) for number in range(60)]
        time.sleep(0.3)
        os.kill(before[0][what], signal.SIGKILL)
        found = [answer.result() for answer in answers]
    # what had sent nothing on was tried again
    assert [answer.status for answer in found] == [200] * 60
    assert fleet.total("kvgraft:fleet_failed_total", at="2") == failed_before
    assert sum(answer.text == answer.right for answer in found) >= 58
    assert all(answer.reused for answer in found)  # what the dead one knew lies in the store

    after = fleet.wait_for(2, but=[before[0]["name"]])
    assert {replica["name"] for replica in after} > {before[1]["name"]}
    assert not is_alive(before[0]["server_pid"])
    assert not is_alive(before[0]["pid"])
    assert engine
    assert wait_until(lambda: not any(map(is_alive, engine)))
    [new] = {replica["name"] for replica in after} - {before[1]["name"]}
    assert (
        fleet.total("kvgraft:pinned_documents", replica=new)
        == fleet.total("kvgraft:pinned_documents") / 2
        > 0
    )
    assert fleet.total("kvgraft:fleet_taken_over_total", outcome="failed") == 0


def test_a_server_that_hangs_is_not_waited_for(fleet: RunningFleet):
    """Paired: when it goes on."""
    [hung, _] = fleet.wait_for(2)
    os.kill(hung["pid"], signal.SIGSTOP)
    try:
        [(labels, _)] = fleet.samples("kvgraft:pinned_documents")
        assert labels["replica"] != hung["name"]
    finally:
        os.kill(hung["pid"], signal.SIGCONT)
    assert wait_until(lambda: len(fleet.samples("kvgraft:pinned_documents")) == 2)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_fleet_ends_what_it_has_begun(fleet: RunningFleet):
    prompt, _ = Corpus(20, 1).prompt(0)
    pids = [replica[what] for replica in fleet.replicas() for what in ("pid", "server_pid")]
    sent = {
        "model": "bundled",
        "prompt": prompt,
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
    }
    sent["stream_options"] = {"include_usage": True}
    with fleet.http() as client, client.stream("POST", "/v1/completions", json=sent) as stream:
        texts = stream.iter_text()
        begun = next(texts)
        fleet.process.send_signal(signal.SIGTERM)
        whole = begun + "".join(texts)
    assert whole.endswith("data: [DONE]\n\n")
    assert '"completion_tokens":200' in whole
    assert fleet.process.wait(90) == 0
    assert not any(map(is_alive, pids))
