"""Two servers, a tier that they share on Redis, ten thousand requests, and servers that are killed
meanwhile."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fleets import Asked, Corpus, RunningFleet, ask, running_fleet

from redis_server import needs_redis, redis_server

pytestmark = [pytest.mark.slow, pytest.mark.soak, needs_redis]
REQUESTS, THREADS, PAIRS, TOKENS = 10_000, 6, 64, 160
KILLS = (2_500, "server_pid"), (6_000, "pid")  # after so many answers, and which process
KINDS = ("prefix", "continued", "grafted")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RunningFleet]:
    with redis_server(tmp_path) as redis:
        arguments = ["--replicas", "2", "--sketch-s", "1", "--kvgraft-store-shared", redis.url]
        # of 32 tokens: the corpus does not fit into one
        arguments += ["--num-gpu-blocks-override", "400"]
        with running_fleet(
            arguments, tmp_path / "log", {"KVGRAFT_CACHE_SECRET": "17" * 32}
        ) as started:
            started.wait_for(2)
            yield started


def test_ten_thousand_requests_and_two_killed_servers(fleet: RunningFleet):
    corpus, answered, kills = Corpus(0, PAIRS, TOKENS), Counter[str](), dict(KILLS)
    lock, started = threading.Lock(), time.monotonic()

    def send(number: int) -> Asked:
        found = ask(
            client, corpus.prompt(number * 7919 % PAIRS, turned=number % 3 == 0, question=number)
        )
        with lock:
            answered["all"] += 1
            kill = kills.pop(answered["all"], None)
        if kill is not None:
            os.kill(fleet.replicas()[0][kill], signal.SIGKILL)
        return found

    with fleet.http() as client, ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(send, range(REQUESTS)))
    took = time.monotonic() - started
    fleet.wait_for(2)

    statuses = Counter(answer.status for answer in found)
    right = sum(answer.text == answer.right for answer in found)
    reused = [sum(answer.report.get(f"{kind}_tokens", 0) for kind in KINDS) for answer in found]
    whole = [answer.report.get("prompt_tokens", 0) for answer in found]
    shares = [
        sum(reused[at : at + 500]) / max(sum(whole[at : at + 500]), 1)
        for at in range(0, REQUESTS, 500)
    ]
    failed = {at: fleet.total("kvgraft:fleet_failed_total", at=at) for at in ("1", "2", "stream")}
    shared = fleet.total("kvgraft:store_total", event="shared_hits")
    print(f"\n{REQUESTS} requests in {took:.0f} s, {dict(statuses)}, {right} right")
    print(f"failed {failed}, {shared:.0f} shared hits")
    print("reused by 500 requests:", " ".join(f"{share:.2f}" for share in shares))
    assert statuses == {200: REQUESTS}
    assert failed["2"] == failed["stream"] == 0
    assert 1 <= failed["1"] <= 2 * THREADS
    assert right >= 0.97 * REQUESTS
    assert shared > 0
    assert min(shares[6:]) > 0.7 * max(shares[:5])  # also while one server was new
