"""Hosts of an evaluation: the native engine, a KVGraft server started for it, or a running
server.
"""

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, Literal, Protocol

import httpx

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.engine.text import load_tokenizer
from kvgraft.guard.distances import along_logprobs
from kvgraft.policies import parse_policy
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft_lab.evaluate.conditions import WITH, split_condition
from kvgraft_lab.evaluate.prompts import Chat, as_parts, as_text, find_chat
from kvgraft_lab.evaluate.scoring import (
    ANSWER_TOKENS,
    ORDER_NOISE,
    ScoredPlaces,
    distances,
    follows,
    native_distances,
    send,
    send_forced,
)
from kvgraft_lab.evaluate.streaming import stream
from kvgraft_lab.evaluate.tasks import Ask, Item
from kvgraft_lab.testbed import MODEL_DIR

TIMEOUT_S = 600.0
# number of most likely tokens whose log-probabilities a server returns: vLLM's default limit
MOST_LIKELY = 20
# forced answers that are decoded at the same time; the pool holds eight prompts
FORCED_TOGETHER = 4
Match = Literal["exact", "similar"]
# reasons in a server's report that do not count as fallbacks
MISSES = ("no_known_text", "too_short", "too_deep", "too_little_known", "off", "policy_full")


@dataclass(frozen=True)
class Answer:
    """Answer to one prompt under one policy.

    Attributes:
        ttft_s: seconds to the first token.
        prompt, prefix, grafted, recomputed, fresh: tokens, see `PrefillReport`.
        computed: computed (token, layer) pairs, as a share of those of full recomputation without
            any cache.
        fallback: reason why known text was not used; None if it was used, or if no text was known.
        flops: floating-point operations of prefill; 0 over HTTP, where they are not counted.
        kv_bytes: peak memory of the prompt's keys and values; 0 over HTTP.
        distances: distances from `full` along full's own answer, see `along`; over HTTP
            `along_logprobs`.
        ffn_flops: floating-point operations of FFNs, a part of `flops`.
        counts: counters of the policy, such as `promoted_heads` or `kept_tokens` (of documents).
        kl_tokens: number of most likely tokens over which divergences are computed, with all others
            as one token; 0 is the whole vocabulary.
    """

    text: str
    ttft_s: float
    prompt: int
    prefix: int
    grafted: int
    recomputed: int
    fresh: int
    computed: float
    fallback: str | None = None
    flops: int = 0
    kv_bytes: int = 0
    distances: dict[str, float] = field(default_factory=dict)
    ffn_flops: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    kl_tokens: int = 0


# for each prompt of an item, the prompt with its segments in other orders
Orders = Sequence[Sequence[Ask]]


class Host(Protocol):
    """Host that answers the prompts of one item under several policies. No policy may profit from
    another's work.
    """

    @property
    def chat(self) -> Chat | None:
        """Chat template of the model, in which items with `chat` are asked.

        Raises:
            ValueError: the template is unknown or cannot be used; the message says why.
        """

    def describe(self) -> dict[str, Any]:
        """Return the facts about model and machine that a repetition needs."""

    def answers(
        self, item: Item, policies: Sequence[str], orders: Orders = ()
    ) -> Iterator[tuple[int, str, Answer]]:
        """Yield (number of the prompt, policy, answer) in any order. Phase 1 is read before.

        Policies begin with `full`. With `orders`, each prompt also has an answer under
        `ORDER_NOISE`: that of full to the first other order, with the mean distances over all
        orders. Without other orders it is full's own answer.

        Raises:
            ValueError: a prompt or a policy that this host cannot serve; the message says why.
        """


class NativeHost:
    """Native engine. Every item begins with an empty cache, and phase 2 stores nothing.

    Policies that keep a part of documents find those of phase 1, each computed alone.

    Args:
        distances: also measure each answer along full's; this takes one more answer wherever the
            two differ.
        match: `exact` or `similar`; None is the engine's own.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        distances: bool = True,
        match: Match | None = None,
    ) -> None:
        self.engine, self._distances, self._match = engine, distances, match

    @cached_property
    def chat(self) -> Chat | None:
        return find_chat(self.engine.tokenizer)

    def describe(self) -> dict[str, Any]:
        config, decoder = self.engine.config, self.engine.decoder
        return {
            "host": "native", "model": config.identity, "architecture": config.architecture,
            "layers": config.num_layers, "dtype": str(decoder.dtype).removeprefix("torch."),
            "device": str(decoder.device),
            "head map": self.engine.head_map.digest if self.engine.head_map else None,
            "head paging": self.engine.memory.cache.layout.num_local_lists > 0,
        } | ({} if self._distances else {"distances": False}) | (
            {"match": self._match} if self._match else {}
        )  # fmt: skip

    def answers(
        self, item: Item, policies: Sequence[str], orders: Orders = ()
    ) -> Iterator[tuple[int, str, Answer]]:
        self.engine.clear_cache()
        chat = self.chat if item.chat else None
        for segments in item.phase_1:
            reading = as_parts(segments, chat=chat)
            send(
                self.engine, Request(reading, "full", SamplingParams(max_tokens=1, ignore_eos=True))
            )

        reused = {segment for segments in item.phase_1 for segment in segments}

        for number, ask in enumerate(item.phase_2):
            first = number % len(policies)
            turns = (*policies[first:], *policies[:first])
            asked = {name: _request(name, ask, reused, chat, self._match) for name in turns}
            results = {name: send(self.engine, asked[name]) for name in asked}
            truth = results["full"]
            scored = self._scored(asked, results)
            for name, result in results.items():
                yield number, name, self._answer(asked[name], result, truth, scored[name])
            if orders:
                others = [
                    _request("full", other, reused, chat)
                    for other in orders[number][: None if self._distances else 1]
                ]
                noise = [self._answer(other, send(self.engine, other), truth) for other in others]
                yield (
                    number,
                    ORDER_NOISE,
                    _mean(noise or [self._answer(asked["full"], truth, truth)]),
                )

    def _scored(
        self, asked: Mapping[str, Request], results: Mapping[str, Result]
    ) -> dict[str, Result]:
        """Return the results by policy, with full's answer forced on those that differ from it.

        Raises:
            ValueError: see `answers`; or a prompt found other text the second time.
        """
        scored = dict(results)
        if not self._distances:
            return scored

        answer = tuple(results["full"].token_ids[:ANSWER_TOKENS])
        different = [name for name in results if not follows(results[name].token_ids, answer)]

        for start in range(0, len(different), FORCED_TOGETHER):
            names = different[start : start + FORCED_TOGETHER]
            forced = send_forced(self.engine, [asked[name] for name in names], answer)
            scored |= zip(names, forced, strict=True)

        for name in different:
            if scored[name].report.grafted_tokens != results[name].report.grafted_tokens:
                raise ValueError(f"{name} grafted other tokens when its answer was scored")
        return scored

    def _answer(
        self, request: Request, result: Result, truth: Result, scored: Result | None = None
    ) -> Answer:
        report = result.report
        far = (
            native_distances(self.engine, request, scored or result, truth)
            if self._distances
            else {}
        )
        return Answer(
            result.text, report.ttft_s, report.prompt_tokens, report.prefix_tokens,
            report.grafted_tokens,
            report.recomputed_tokens, report.fresh_tokens, report.computed_share, report.fallback,
            report.flops,
            report.kv_bytes, far, report.ffn_flops, dict(report.counts),
        )  # fmt: skip


def _request(
    policy: str, ask: Ask, reused: Collection[str], chat: Chat | None, match: Match | None = None
) -> Request:
    parts, sampling = (
        as_parts(ask.segments, reused, chat, ask.begun),
        SamplingParams(max_tokens=ask.max_tokens, stop=ask.stop),
    )
    name, flow = split_condition(policy)
    return Request(
        parts, name, sampling, remember=False, return_logits=True, match=match, flow=flow
    )


Told = ScoredPlaces[Sequence[Mapping[int, float]]]


class HttpHost:
    """OpenAI-compatible server with KVGraft, greedy and streaming.

    Each prompt is answered under each policy in a new namespace, in which phase 1 has been read. So
    no prompt reuses the work of another. Phase 1 is skipped for `full`, which must not profit from
    exact hits. A policy that keeps a part of documents has also computed them alone.

    Args:
        model_dir: directory of the model's tokenizer, which has the chat template; None is the
            server's model name.
        distances: see `NativeHost`.
        full: another server, which answers `full`, such as one whose attention is dense.
    """

    def __init__(
        self,
        url: str,
        model_dir: Path | None = None,
        *,
        distances: bool = True,
        full: "HttpHost | None" = None,
    ) -> None:
        self.url, self._model_dir, self._distances = url.rstrip("/"), model_dir, distances
        self._full = full
        self.client = httpx.Client(timeout=TIMEOUT_S)
        self._is_warm = False
        try:
            [model, *_] = self.client.get(f"{self.url}/v1/models").raise_for_status().json()["data"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ValueError(
                f"no OpenAI-compatible server answers at {self.url}: {error}"
            ) from error
        self.model = model["id"]

    @cached_property
    def chat(self) -> Chat | None:
        where = self._model_dir or Path(self.model)
        if not where.is_dir():
            raise ValueError(
                f"{self.url} serves {self.model}, whose chat template is not on this machine: give "
                "the directory of "
                "its tokenizer as --model, or --no-chat"
            )
        return find_chat(load_tokenizer(where))

    def describe(self) -> dict[str, Any]:
        return (
            {"host": "http", "model": self.model}
            | ({} if self._distances else {"distances": False})
            | ({"full": self._full.model} if self._full else {})
        )

    def answers(
        self, item: Item, policies: Sequence[str], orders: Orders = ()
    ) -> Iterator[tuple[int, str, Answer]]:
        if policies[0] != "full":
            raise ValueError(f"policies must begin with full, got {', '.join(policies)}")
        for number, ask in enumerate(item.phase_2):
            # vLLM compiles kernels for its first log-probabilities, which is not part of TTFT
            if not self._is_warm:
                self._ask(item, "full", replace(ask, max_tokens=1))
                self._is_warm = True
            full, truth = self._ask(item, "full", ask)
            full = self._compared(full, truth, truth, item, "full", ask)
            yield number, "full", full
            for policy in policies[1:]:
                answer, logprobs = self._ask(item, policy, ask)
                if answer.prompt != full.prompt:
                    raise ValueError(
                        f"a prompt has {answer.prompt} tokens at {self.url} and {full.prompt} at "
                        "the server that answers full: they serve different models"
                    )
                yield number, policy, self._compared(answer, logprobs, truth, item, policy, ask)
            if orders:
                noise = [
                    self._compared(*self._ask(item, "full", other), truth, item, "full", other)
                    for other in orders[number][: None if self._distances else 1]
                ]
                yield number, ORDER_NOISE, _mean(noise or [full])

    def _compared(
        self, answer: Answer, logprobs: Told, truth: Told, item: Item, policy: str, ask: Ask
    ) -> Answer:
        if not self._distances:
            return answer

        def give(tokens: tuple[int, ...]) -> Told:
            return self._ask(item, policy, ask, tokens)[1]

        return replace(answer, distances=distances(logprobs, truth, give, along_logprobs))

    def _ask(
        self, item: Item, policy: str, ask: Ask, answer: Sequence[int] = ()
    ) -> tuple[Answer, Told]:
        if policy == "full" and self._full is not None:
            return self._full._ask(item, policy, ask, answer)
        namespace, chat = uuid.uuid4().hex, self.chat if item.chat else None
        for read in item.phase_1 if policy != "full" else ():
            self._send(as_text(read, chat), {"reuse": "exact", "namespace": namespace}, 1)
        options = {"reuse": "exact"} if policy == "full" else {"policy": policy}
        given = {"forced_output": list(answer)} if answer else {}
        stop = () if answer else ask.stop
        prompt, options = as_text(ask.segments, chat, ask.begun), options | {"namespace": namespace}
        if not answer and isinstance(parse_policy(policy), KeepsDocuments):
            self._send(prompt, options, 1)  # computes its documents alone
        return self._send(prompt, options | given, len(answer) or ask.max_tokens, stop)

    def _send(
        self, prompt: str, options: dict[str, Any], max_tokens: int, stop: Sequence[str] = ()
    ) -> tuple[Answer, Told]:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "stop": list(stop), "ignore_eos": "forced_output" in options,
            "kv_transfer_params": {"kvgraft": options},
        }  # fmt: skip
        found = stream(self.client, self.url, body, MOST_LIKELY)
        if not found.report:
            raise ValueError(f"{self.url} sent no report of reuse: is it a `kvgraft serve`?")
        return _as_answer(found.text, found.first_s, found.report), ScoredPlaces(
            tuple(found.tokens), found.places
        )


def _as_answer(text: str, ttft_s: float, report: Mapping[str, Any]) -> Answer:
    kept, reason = report.get("kept_tokens"), report["reason"]
    of_documents = {} if kept is None else {"kept_tokens": kept - report["fresh_tokens"]}
    return Answer(
        text, ttft_s, report["prompt_tokens"], report["prefix_tokens"], report["grafted_tokens"],
        report["recomputed_tokens"], report["fresh_tokens"], report["computed_share"],
        None if reason in MISSES else reason,
        counts=report.get("counts", {}) | of_documents, kl_tokens=MOST_LIKELY,
    )  # fmt: skip


def _mean(answers: Sequence[Answer]) -> Answer:
    """Return the first answer, with the mean distances of all."""
    names = answers[0].distances
    return replace(
        answers[0], distances={name: mean(a.distances[name] for a in answers) for name in names}
    )


@contextmanager
def open_host(
    where: str,
    model: Path,
    *,
    dtype: str | None,
    distances: bool = True,
    policies: Sequence[str] = (),
    full: str | None = None,
    **engine: Any,
) -> Iterator[Host]:
    """Open a host: `native`, `vllm` (starts a server), or the URL of a server.

    Args:
        model: directory of the model; for a running server, of its tokenizer. The bundled model is
            the default and means the server's own.
        distances: see `NativeHost`.
        policies: policies that will be asked for, with or without flows.
        full: URL of another server that answers `full`; only if `where` is a URL.
        engine: settings of the native engine only.

    Raises:
        ValueError: none of these, no server answers, or a policy with a flow for a server.
    """
    is_url = where.startswith(("http://", "https://"))
    if full is not None and not is_url:
        raise ValueError(f"--full-host goes with the URL of a server as --host, not with {where!r}")
    with_flow = [name for name in policies if WITH in name]
    if with_flow and where != "native":
        raise ValueError(
            f"{with_flow[0]!r}: a server has one flow, which it is started with (--flow); choose "
            "--host native"
        )
    if where == "native":
        plain = [split_condition(name)[0] for name in policies]
        yield NativeHost(Engine(model, dtype=dtype, policies=plain, **engine), distances=distances)
    elif where == "vllm":
        from kvgraft.server.process import serving  # needs the packages of kvgraft[serve]

        flags = ("--dtype", dtype) if dtype else ()
        # decisions by tokens do not depend on the speed of this machine
        with serving(str(model), "--kvgraft-costs", "tokens", *flags) as server:
            yield HttpHost(server.url, distances=distances)
    elif is_url:
        own = None if model == MODEL_DIR else model
        other = None if full is None else HttpHost(full, own, distances=distances)
        yield HttpHost(where, own, distances=distances, full=other)
    else:
        raise ValueError(f"unknown host {where!r}: choose native, vllm, or the URL of a server")
