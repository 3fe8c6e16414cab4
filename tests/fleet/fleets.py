"""A fleet in processes of its own, started as users start it, and what is asked of it."""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvgraft.fleet.ingress import SHOWN_S
from kvgraft.server.process import running
from kvgraft_lab.testbed import tasks
from kvgraft_lab.testbed.documents import Facts, make_documents

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-admin"
START_S = 600.0  # some forty, unless the machine is busy
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass
class RunningFleet:
    """Where it listens, its process, and what it has said."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    looked: float = 0.0  # when its metrics were asked for last

    def http(self, key: str | None = ALICE) -> httpx.Client:
        """A client that shows this key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120.0)

    def replicas(self) -> list[dict[str, Any]]:
        """What the servers say of themselves."""
        with self.http(ADMIN) as client:
            return client.get("/v1/kvgraft/fleet").raise_for_status().json()["replicas"]

    def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Of a metric, those with these labels, as they are now: a fleet shows the same for a
        while."""
        time.sleep(max(self.looked + SHOWN_S - time.monotonic(), 0.0))
        with self.http(None) as client:
            text = client.get("/metrics").raise_for_status().text
        self.looked = time.monotonic()
        found = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        return [
            (sample.labels, sample.value)
            for sample in found
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def total(self, name: str, **labels: str) -> float:
        """Their sum."""
        return sum(value for _, value in self.samples(name, **labels))

    def wait_for(self, num_replicas: int, but: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Until so many servers are there, none of them of these names."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                found = self.replicas()
                if len(found) == num_replicas and not {replica["name"] for replica in found} & set(
                    but
                ):
                    return found
            time.sleep(0.5)
        raise TimeoutError(self.log.read_text(errors="replace")[-3000:])


@contextmanager
def running_fleet(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[RunningFleet]:
    """`kvgraft fleet` with these arguments and two tenants, once it answers; gone afterwards."""
    arguments = [*arguments, "--api-key", ALICE, BOB]
    environment = {**SETTINGS, "KVGRAFT_ADMIN_KEY": ADMIN, **environment}
    with running(arguments, environment, log, command="fleet", start_timeout_s=START_S) as server:
        yield RunningFleet(server.url, server.process, log)


@dataclass
class Asked:
    """An answer, the right one, and what the server says of the prompt."""

    status: int
    text: str
    right: str
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def reused(self) -> int:
        """Tokens that were known."""
        return (
            self.report["prefix_tokens"]
            + self.report["continued_tokens"]
            + self.report["grafted_tokens"]
        )


class Corpus:
    """Pairs of documents that no other corpus has, and questions about them."""

    def __init__(self, seed: int, count: int, tokens: int = 600) -> None:
        rng = Random(seed)
        facts = Facts(needle=6)
        self.pairs = [
            make_documents(rng, facts, orders=[(0, 1)], num_tokens=tokens) for _ in range(count)
        ]

    def prompt(self, number: int, *, turned: bool = False, question: int = 0) -> tuple[str, str]:
        """A pair of documents, in either order, and a question about them; and its answer."""
        pair = self.pairs[number][::-1] if turned else self.pairs[number]
        questions = [asked for asked in tasks.read(pair) if asked.task == "needle"]
        asked = questions[question % len(questions)]
        return f"{' '.join(pair)} {asked.text}", asked.answer


def ask(client: httpx.Client, prompt: tuple[str, str], **more: Any) -> Asked:
    """Send a prompt, and have it answered with one word."""
    text, right = prompt
    sent = {"model": "bundled", "prompt": text, "max_tokens": 1, "temperature": 0, **more}
    answer = client.post("/v1/completions", json=sent)
    found = answer.json() if answer.status_code == 200 else {}
    said = found["choices"][0]["text"].strip() if found else answer.text
    return Asked(
        answer.status_code, said, right, (found.get("kv_transfer_params") or {}).get("kvgraft", {})
    )
