"""Where an evaluation asks its questions: the native engine, our vLLM server, or a server that is already running."""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import httpx

from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.engine.text import load_tokenizer
from kvgraft.evaluate.metrics import first_token
from kvgraft.evaluate.prompts import Chat, as_parts, as_text, find_chat
from kvgraft.evaluate.tasks import Item
from kvgraft.testbed import MODEL_DIR

TIMEOUT_S = 600.0
MISSES = ("no_known_text", "too_little_known", "off", "policy_full")  # reasons of a server that are no fallbacks


@dataclass(frozen=True)
class Answer:
    """What one policy made of one prompt.

    Attributes:
        ttft_s: seconds to the first token.
        prompt, prefix, grafted, recomputed, fresh: tokens, see `PrefillReport`.
        computed: (token, layer) pairs computed, as a share of those of full recomputation without any cache.
        fallback: why what is known was not used; None where it was, and where nothing is known.
        flops: floating-point operations of prefill, `ffn_flops` of them in FFNs; 0 over HTTP, where nobody counts them.
        kv_bytes: most memory that the prompt's keys and values took at a time; 0 over HTTP.
        distances: of the first token's logits from those of `full`, see `metrics.first_token`; empty over HTTP.
        counts: what was counted, such as `promoted_heads`; over HTTP only `kept_tokens` (of documents).
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


class Host(Protocol):
    """Answers the prompts of one item under several policies, of which none may profit from another's work."""

    @property
    def chat(self) -> Chat | None:
        """The chat template of the model, in which items that want it are asked.

        Raises:
            ValueError: nobody knows it, or it cannot be used; the message says why.
        """

    def describe(self) -> dict[str, Any]:
        """What a reader has to know of model and machine to repeat this."""

    def answers(self, item: Item, policies: Sequence[str]) -> Iterator[tuple[int, str, Answer]]:
        """(number of the prompt, policy, answer) in any order; phase 1 is read before.

        Raises:
            ValueError: a prompt or a policy that this host cannot serve; the message says why.
        """


class NativeHost:
    """The native engine: every item begins with an empty cache, and phase 2 leaves nothing behind. Policies that keep a
    part of documents find those that phase 1 read, on their own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @cached_property
    def chat(self) -> Chat | None:
        return find_chat(self.engine.tokenizer)

    def describe(self) -> dict[str, Any]:
        config, decoder = self.engine.config, self.engine.decoder
        return {
            "host": "native", "model": config.identity, "architecture": config.architecture,
            "layers": config.num_layers, "dtype": str(decoder.dtype).removeprefix("torch."),
            "device": str(decoder.device), "head map": self.engine.head_map.digest if self.engine.head_map else None,
            "head paging": self.engine.memory.cache.layout.num_local_lists > 0,
        }  # fmt: skip

    def answers(self, item: Item, policies: Sequence[str]) -> Iterator[tuple[int, str, Answer]]:
        self.engine.clear_cache()
        chat = self.chat if item.chat else None
        for segments in item.phase_1:
            reading = Request(as_parts(segments, chat=chat), "full", SamplingParams(max_tokens=1, ignore_eos=True))
            self._send(reading)
        reused = {segment for segments in item.phase_1 for segment in segments}
        for number, ask in enumerate(item.phase_2):
            first = number % len(policies)
            turns = (*policies[first:], *policies[:first])
            sampling = SamplingParams(max_tokens=ask.max_tokens)
            parts, results = as_parts(ask.segments, reused, chat, ask.begun), {}
            for policy in turns:
                request = Request(parts, policy, sampling, remember=False, return_logits=True)
                self.engine.read_documents(request)
                results[policy] = self._send(request)
            truth = results["full"].first_logits
            for policy, result in results.items():
                logits, report = result.first_logits, result.report
                distances = {} if truth is None or logits is None else first_token(logits, truth)
                yield number, policy, Answer(
                    result.text, report.ttft_s, report.prompt_tokens, report.prefix_tokens, report.grafted_tokens,
                    report.recomputed_tokens, report.fresh_tokens, report.computed_share, report.fallback, report.flops,
                    report.kv_bytes, distances, report.ffn_flops, dict(report.counts),
                )  # fmt: skip

    def _send(self, request: Request) -> Result:
        [result] = self.engine.generate([request])
        if result.error:
            raise ValueError(f"the engine cannot answer a prompt: {result.error}")
        return result


class HttpHost:
    """An OpenAI-compatible server with KVGraft, greedy and streaming.

    Each prompt is answered under each policy in a new namespace, in which phase 1 has been read (not for `full`, which
    no exact hit is to make faster): so nothing of what other prompts have computed is reused.

    Args:
        model_dir: where the tokenizer of the model lies, of which chat templates are taken; None is what the server
            calls the model.
    """

    def __init__(self, url: str, model_dir: Path | None = None) -> None:
        self.url, self._model_dir = url.rstrip("/"), model_dir
        self.client = httpx.Client(timeout=TIMEOUT_S)
        try:
            [model, *_] = self.client.get(f"{self.url}/v1/models").raise_for_status().json()["data"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ValueError(f"no OpenAI-compatible server answers at {self.url}: {error}") from error
        self.model = model["id"]

    @cached_property
    def chat(self) -> Chat | None:
        where = self._model_dir or Path(self.model)
        if not where.is_dir():
            raise ValueError(
                f"{self.url} serves {self.model}, whose chat template is not on this machine: give the directory of "
                "its tokenizer as --model, or --no-chat"
            )
        return find_chat(load_tokenizer(where))

    def describe(self) -> dict[str, Any]:
        return {"host": "http", "model": self.model}

    def answers(self, item: Item, policies: Sequence[str]) -> Iterator[tuple[int, str, Answer]]:
        chat = self.chat if item.chat else None
        for number, ask in enumerate(item.phase_2):
            for policy in policies:
                namespace = uuid.uuid4().hex
                for segments in item.phase_1 if policy != "full" else ():
                    self._send(as_text(segments, chat), {"reuse": "exact", "namespace": namespace}, 1)
                options = {"reuse": "exact"} if policy == "full" else {"policy": policy}
                prompt = as_text(ask.segments, chat, ask.begun)
                yield number, policy, self._send(prompt, options | {"namespace": namespace}, ask.max_tokens)

    def _send(self, prompt: str, options: dict[str, Any], max_tokens: int) -> Answer:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "kv_transfer_params": {"kvgraft": options},
        }  # fmt: skip
        start, first, text, report = time.perf_counter(), 0.0, "", None
        with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{self.url} refused a prompt: {response.read().decode(errors='replace')[:500]}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(f"{self.url} broke off an answer: {chunk['error']}")
                first = first or time.perf_counter() - start
                text += "".join(choice["text"] for choice in chunk["choices"])
                report = (chunk.get("kv_transfer_params") or {}).get("kvgraft") or report
        if report is None:
            raise ValueError(f"{self.url} sent no report of reuse: is it a `kvgraft serve`?")
        kept, reason = report.get("kept_tokens"), report["reason"]
        return Answer(
            text, first, report["prompt_tokens"], report["prefix_tokens"], report["grafted_tokens"],
            report["recomputed_tokens"], report["fresh_tokens"], report["computed_share"],
            None if reason in MISSES else reason,
            counts={} if kept is None else {"kept_tokens": kept - report["fresh_tokens"]},
        )  # fmt: skip


@contextmanager
def open_host(where: str, model: Path, *, dtype: str | None, **engine: Any) -> Iterator[Host]:
    """A host by what the user calls it: `native`, `vllm` (starts a server of its own), or the URL of a server.

    Args:
        model: of a server that is running, where its tokenizer lies; the bundled one says nothing of it.
        engine: of the native engine only.

    Raises:
        ValueError: none of these, or no server answers.
    """
    if where == "native":
        yield NativeHost(Engine(model, dtype=dtype, **engine))
    elif where == "vllm":
        from kvgraft.evaluate.servers import serving  # needs the packages of kvgraft[serve]

        flags = ("--dtype", dtype) if dtype else ()
        with serving(str(model), "--kvgraft-costs", "tokens", *flags) as server:  # whatever takes how long here
            yield HttpHost(server.url)
    elif where.startswith(("http://", "https://")):
        yield HttpHost(where, None if model == MODEL_DIR else model)
    else:
        raise ValueError(f"unknown host {where!r}: choose native, vllm, or the URL of a server")
