"""All that a server can be asked, at once: grafted and plain prompts, streams, aborts, segments,
bad requests."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from kvgraft.server.tenancy import Tenant

TIMEOUT_S = 180.0  # of one answer; a request that takes longer is stuck
DOCUMENTS = 24  # of each tenant
DECIDED = 0.01  # nats between the best and the second token, far above what rounding moves
POLICIES: tuple[dict[str, Any], ...] = (
    {}, {"policy": "sparsex", "boundary_layers": 1, "recompute_share": 0.1}, {"policy": "naive"},
    {"policy": "full"}
)  # fmt: skip
BAD_OPTIONS: tuple[Any, ...] = (
    {"kvgraft": {"polcy": "naive"}},
    {"kvgraft": {"policy": "nothing"}},
    {"kvgraft": {"topk": "much"}},
    {"kvgraft": {"control": {"op": "list", "name": "", "token": ""}}},
    {"kvgraft": []},
    {"do_remote_decode": True},
)


@dataclass
class Findings:
    """What was done, and what should not have been."""

    done: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note it as broken unless it holds."""
        if not holds:
            self.broken[otherwise] += 1


@dataclass(frozen=True)
class Fixed:
    """A plain request and the answer of the fresh server."""

    prompt: str
    answer: str


class Traffic:
    """Random requests of several tenants; equal seeds make equal requests.

    Args:
        http: with the base URL of the server.
        max_words: the longest prompt that the server accepts, in tokens.
    """

    def __init__(
        self, http: httpx.AsyncClient, model: str, keys: Sequence[str], admin_key: str,
        words: Sequence[str],
        max_words: int, seed: int,
    ) -> None:  # fmt: skip
        self.http, self.model, self.keys, self.admin_key, self.words = (
            http,
            model,
            keys,
            admin_key,
            words,
        )
        self.max_words, self.seed = max_words, seed
        self.findings = Findings()
        self.fixed: list[Fixed] = []
        rng = Random(f"documents {seed}")
        self.documents = {key: [self.text(rng, 100, 160) for _ in range(DOCUMENTS)] for key in keys}
        self.actions: dict[Callable[[Random], Awaitable[None]], int] = {
            self.grafted: 30, self.fresh: 14, self.check: 12, self.abort_stream: 10,
            self.abort_prefill: 8,
            self.stranger: 6, self.pin: 4, self.delete: 3, self.too_long: 3, self.bad_options: 5,
            self.bad_http: 5,
        }  # fmt: skip

    async def run(self, workers: int, stop: asyncio.Event, max_requests: int) -> None:
        """Workers that send one request after another, until `stop` is set or the requests are used
        up."""

        async def work(number: int) -> None:
            rng = Random(f"worker {self.seed} {number}")
            actions, weights = list(self.actions), list(self.actions.values())
            for _ in range(-(-max_requests // workers)):
                if stop.is_set():
                    return
                [action] = rng.choices(actions, weights)
                self.findings.done[action.__name__] += 1
                try:
                    await action(rng)
                except httpx.TimeoutException:
                    self.findings.broken[f"{action.__name__}: no answer in {TIMEOUT_S:.0f} s"] += 1
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.findings.broken[
                        f"{action.__name__}: {type(error).__name__} {str(error)[:200]}"
                    ] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(work(number))

    async def choose_fixed(self, count: int) -> None:
        """Ask the fresh server plain questions, and keep those whose every token is decided by more
        than rounding.

        Raises:
            RuntimeError: hardly any question is.
        """
        rng = Random(f"fixed {self.seed}")
        for _ in range(10 * count):
            prompt = self.text(rng, 40, 500)
            body = self.body(prompt, {"reuse": "off"}, max_tokens=16) | {"logprobs": 2}
            choice = (await self.complete(self.keys[0], body))["choices"][0]
            best = [sorted(top.values())[-2:] for top in choice["logprobs"]["top_logprobs"]]
            if all(second + DECIDED < first for second, first in best):
                self.fixed.append(Fixed(prompt, choice["text"]))
            if len(self.fixed) == count:
                return
        raise RuntimeError(f"only {len(self.fixed)} of {10 * count} plain answers are decided")

    async def check_all_fixed(self, rng: Random) -> None:
        """Every plain request once more."""
        for fixed in self.fixed:
            await self._check(fixed, rng)

    async def grafted(self, rng: Random) -> None:
        """Known documents in another order, behind another instruction."""
        key = rng.choice(self.keys)
        body = self.body(self.known(rng, key), rng.choice(POLICIES), max_tokens=rng.randint(1, 96))
        if rng.random() < 0.5:
            answer = await self.complete(key, body)
        else:
            answer = await self.stream(key, body)
        self.check_report(answer)

    async def fresh(self, rng: Random) -> None:
        """Text that nobody has read."""
        body = self.body(self.text(rng, 50, 1200), {}, max_tokens=rng.randint(1, 64))
        report = self.check_report(await self.complete(rng.choice(self.keys), body))
        self.findings.expect(report["grafted_tokens"] == 0, "new text was found somewhere")

    async def stranger(self, rng: Random) -> None:
        """The documents of a tenant in a namespace where nothing has been read yet."""
        key = rng.choice(self.keys)
        body = self.body(
            self.known(rng, key), {"namespace": f"n{rng.getrandbits(64):x}"}, max_tokens=2
        )
        report = self.check_report(await self.complete(key, body))
        found = report["grafted_tokens"] + report["prefix_tokens"]
        self.findings.expect(found == 0, "text of another namespace was found")

    async def check(self, rng: Random) -> None:
        """A plain request whose answer is known."""
        await self._check(rng.choice(self.fixed), rng)

    async def abort_stream(self, rng: Random) -> None:
        """A client that leaves while its answer is written."""
        key = rng.choice(self.keys)
        body = self.body(self.known(rng, key), rng.choice(POLICIES), max_tokens=200)
        await self.stream(key, body, max_chunks=rng.randint(1, 20))

    async def abort_prefill(self, rng: Random) -> None:
        """A client that leaves before there is an answer, most often while its prompt waits or is
        read."""
        key = rng.choice(self.keys)
        prompt = self.known(rng, key) if rng.random() < 0.7 else self.text(rng, 500, 1200)
        request = asyncio.create_task(
            self.stream(key, self.body(prompt, rng.choice(POLICIES), max_tokens=64), 1)
        )
        await asyncio.wait([request], timeout=rng.uniform(0.005, 0.5))
        if request.cancel():
            self.findings.done["left before the first token"] += 1
        await asyncio.gather(request, return_exceptions=True)

    async def pin(self, rng: Random) -> None:
        """Pin a document of a tenant."""
        key = rng.choice(self.keys)
        number = rng.randrange(DOCUMENTS)
        body = {
            "name": f"document {number % 6}",
            "text": self.documents[key][number],
            "tenant": Tenant.of(key).label,
        }
        answer = await self.http.post("/v1/kvgraft/pins", json=body, headers=bearer(self.admin_key))
        self.findings.expect(
            answer.status_code in (200, 409, 413), f"pin: {answer.status_code} {answer.text[:80]}"
        )
        self.findings.done[f"pin: {answer.status_code}"] += 1

    async def delete(self, rng: Random) -> None:
        """Delete a segment that may exist."""
        status = await self.delete_segment(rng.choice(self.keys), f"document {rng.randrange(6)}")
        self.findings.expect(status in (200, 404), f"delete: {status}")

    async def too_long(self, rng: Random) -> None:
        """A prompt over the limit."""
        body = self.body(self.text(rng, self.max_words + 1, self.max_words + 500), {}, max_tokens=1)
        await self.refused(400, body, rng.choice(self.keys))

    async def bad_options(self, rng: Random) -> None:
        """Options that do not exist."""
        body = self.body("the", {}, max_tokens=1) | {"kv_transfer_params": rng.choice(BAD_OPTIONS)}
        await self.refused(400, body | {"stream": rng.random() < 0.5}, rng.choice(self.keys))

    async def bad_http(self, rng: Random) -> None:
        """Requests that are no requests, or from nobody."""
        good = self.body("the", {}, max_tokens=1)
        key = rng.choice(self.keys)
        wrong: tuple[tuple[int, Any, str], ...] = (
            (400, b'{"prompt": ', key), (400, good | {"max_tokens": -1}, key), (400,
            good | {"prompt": {}}, key),
            (401, good, "nobody"), (401, good, key[:-1]), (404, good | {"model": "another"}, key),
        )  # fmt: skip
        await self.refused(*rng.choice(wrong))

    async def refused(self, status: int, body: Any, key: str) -> None:
        """Send what must be answered with this status."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = bearer(key) | {"Content-Type": "application/json"}
        answer = await self.http.post("/v1/completions", content=content, headers=headers)
        wrong = f"answered {answer.status_code} instead of {status}: {content[-120:]!r}"
        self.findings.expect(answer.status_code == status, wrong)

    async def delete_segment(self, key: str, name: str) -> int:
        """Delete a tenant's segment; returns the status."""
        url = f"/v1/kvgraft/pins/{name}"
        answer = await self.http.delete(
            url, params={"tenant": Tenant.of(key).label}, headers=bearer(self.admin_key)
        )
        return answer.status_code

    async def complete(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One completion.

        Raises:
            httpx.HTTPStatusError: it was refused.
        """
        answer = await self.http.post("/v1/completions", json=body, headers=bearer(key))
        return answer.raise_for_status().json()

    async def stream(
        self, key: str, body: Mapping[str, Any], max_chunks: int = 1 << 30
    ) -> dict[str, Any]:
        """One streamed completion, left after `max_chunks` events; returns the last one, which
        carries the usage."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        last: dict[str, Any] = {}
        async with self.http.stream(
            "POST", "/v1/completions", json=body, headers=bearer(key)
        ) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    max_chunks -= 1
                    if not max_chunks:
                        break
        if "error" in last:
            raise ValueError(f"an error within the stream: {last['error']}")
        return last

    def check_report(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The report of an answer, whose numbers must fit together."""
        report, usage = answer["kv_transfer_params"]["kvgraft"], answer["usage"]
        kinds = [report[f"{kind}_tokens"] for kind in ("prefix", "grafted", "fresh")]
        told = usage["prompt_tokens"]
        self.findings.expect(
            sum(kinds) == report["prompt_tokens"] == told, f"{kinds} of {told} prompt tokens"
        )
        self.findings.done["grafted tokens"] += report["grafted_tokens"]
        return report

    def known(self, rng: Random, key: str) -> str:
        """A prompt of some documents of a tenant, new to every prefix cache."""
        documents = rng.sample(self.documents[key], rng.randint(2, 8))
        return " ".join([self.text(rng, 5, 40), *documents, self.text(rng, 5, 20)])

    def text(self, rng: Random, low: int, high: int) -> str:
        """Between `low` and `high` random words."""
        return " ".join(rng.choices(self.words, k=rng.randint(low, high)))

    def body(self, prompt: str, kvgraft: Mapping[str, Any], *, max_tokens: int) -> dict[str, Any]:
        """A greedy request."""
        options = {"kv_transfer_params": {"kvgraft": dict(kvgraft)}} if kvgraft else {}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
        } | options

    async def _check(self, fixed: Fixed, rng: Random) -> None:
        answer = await self.complete(
            rng.choice(self.keys), self.body(fixed.prompt, {"reuse": "off"}, max_tokens=16)
        )
        same = answer["choices"][0]["text"] == fixed.answer
        self.findings.expect(same, "a plain answer differs from that of the fresh server")


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {key}"}
