"""What is grafted, and gone on with, where local heads have lost a part of it: facts on one line of
JSON.

Run as a script it reads {"model": directory, "engine": {arguments of vLLM's LLM}}.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from engines import EVERYTHING, NAIVE, OFF, Ask, words  # noqa: E402
from family_engine import WITH_WINDOWS  # noqa: E402
from hosts import Host  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_group_id  # noqa: E402

SOURCE = words(900, 11)
PROMPT = words(50, 12) + SOURCE[64:800] + words(30, 13)
AGAIN = words(81, 16) + SOURCE[64:800] + words(9, 17)
OPENING, DOCUMENT = words(70, 14), words(300, 15)
BEHIND = SOURCE[:700] + DOCUMENT + words(20, 18)
POLICIES = {
    "redknot": WITH_WINDOWS,
    "naive": NAIVE,
    "sparsex": {"policy": "sparsex:recompute_share=1.0"},
}


def pages_of(host: Host, text: list[int]) -> list[int]:
    """Pages of the main group with the full blocks of a text that was read, from its beginning."""
    name = host.add(Ask(text, OFF))
    found = host.known.pool.find(host.request(name).block_hashes)
    host.abort(name)
    host.settle()
    return found


def lose(host: Host, text: list[int], share: float) -> list[bool]:
    """Random traffic until so many of the pages of a text have lost a counterpart; which ones have
    all of them."""
    pages, pool = pages_of(host, text), host.known.pool
    versions, number = pool.versions_of(pages), 0
    while pool.complete(pages).mean() > 1 - share:
        host.read(words(40, 1000 + (number := number + 1)))
    assert (pool.versions_of(pages) == versions).all(), "heads that see everything have it still"
    pool.acquire(pages)  # as if somebody grafted it just now: what is left of it is reclaimed last
    pool.release(pages)
    return pool.complete(pages).tolist()


def reclaimed(host: Host) -> dict[str, Any]:
    """A prompt with a text of which local heads have lost a part, by policy."""
    facts = {}
    for name, options in POLICIES.items():
        host.forget()
        host.poison([0], float("nan"))
        host.read(SOURCE)
        complete = lose(host, SOURCE, 0.3)
        [answer] = host.ask(Ask(PROMPT, options))
        [again] = host.ask(Ask(AGAIN, options))
        facts[name] = asdict(answer) | {
            "complete": complete,
            "again": again.grafted,
            "problems": host.problems(),
        }
    return facts


def turns(host: Host, options: dict[str, Any], lost: Sequence[int] = ()) -> list[Any]:
    """A conversation of three turns, whose first one grafts a document: (prompt, answer) of each.
    Before the turns in `lost` local heads lose all that they have."""
    host.forget()
    host.poison([0], float("nan"))
    host.read(DOCUMENT)
    prompt, said = OPENING + DOCUMENT, []
    for number in range(3):
        if number in lost:
            lose_local(host)
        [answer] = host.ask(Ask(prompt, options, max_tokens=60))
        said.append((prompt, asdict(answer)))
        prompt = prompt + answer.tokens + words(40, 20 + number)
    return said


def lose_local(host: Host) -> None:
    """Reclaim all that local heads have, of whatever text."""
    blocks, local = host.manager.block_pool.blocks, host.known.pool.groups.local
    host.evict(
        b.block_id
        for b in blocks
        if b.block_hash is not None and get_group_id(b.block_hash) in local
    )


def conversations(host: Host) -> dict[str, Any]:
    """Turns by policy, and where something is lost in between; the second turn in another
    namespace."""
    facts: dict[str, Any] = {"everything": turns(host, EVERYTHING)}
    [answer] = host.ask(Ask(facts["everything"][1][0], EVERYTHING, "another"))
    facts["elsewhere"] = asdict(answer)
    facts |= {"naive": turns(host, NAIVE), "redknot": turns(host, WITH_WINDOWS)}
    facts |= {"lost": turns(host, EVERYTHING, [1, 2]), "lost once": turns(host, NAIVE, [1])}
    facts["redknot lost"] = turns(host, WITH_WINDOWS, [1])
    facts["problems"] = host.problems()
    return facts


def behind_prefix(host: Host) -> dict[str, Any]:
    """A document behind a long exact prefix, of which local heads keep sinks and a window; by
    policy, and by what lies in vLLM's null block."""
    facts = {}
    for policy in ("spread", "redknot:windows=off,reuse=off,mass_share=1.0"):
        facts[policy] = []
        for value in (0.0, 3.0, float("nan")):
            host.forget()
            host.poison([0], value)
            host.read(SOURCE, DOCUMENT)
            [answer] = host.ask(Ask(BEHIND, {"policy": policy}))
            facts[policy].append(asdict(answer))
    return facts


def waiting(host: Host, options: dict[str, Any]) -> tuple[int, int, bool]:
    """Tokens that a waiting request is to graft, before and after local heads have lost a part of
    its source; and whether that is the same plan."""
    host.forget()
    host.read(SOURCE)
    name = host.add(Ask(PROMPT, options, max_tokens=1))
    state, known = host.state(name), host.known
    state.candidate = first = known.decide(state, {})
    assert known.decide(state, {}, first) is first
    host.evict(known.pool.groups.counterparts(first.sources[0])[:1])
    second = known.decide(state, {}, first)
    state.candidate = None
    host.finish(name)
    return int(first.plan.grafted.sum()), int(second.plan.grafted.sum()), second is first


def main(answers: IO[str]) -> None:
    job = json.load(sys.stdin)
    host = Host(Path(job["model"]), **job["engine"])
    facts = {
        "reclaimed": reclaimed(host),
        "conversations": conversations(host),
        "prefix": behind_prefix(host),
    }
    facts["waiting"] = {name: waiting(host, options) for name, options in POLICIES.items()}
    print(json.dumps(facts), file=answers, flush=True)


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    main(output)
