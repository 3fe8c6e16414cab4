"""Demonstration over HTTP: `kvgraft serve` with the official OpenAI client, streaming and not."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from openai import OpenAI
from openai.types import Completion
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.cli.progress import OnProgress
from kvgraft.server.process import Server, serving
from kvgraft_lab.evaluate.prompts import as_text
from kvgraft_lab.testbed.scenarios import Segments, make_scenarios

MODEL = "bundled"
# the results are the same on any machine
SERVER_FLAGS = ("--dtype", "float32", "--kvgraft-costs", "tokens")
MAX_TOKENS = 4
METRICS = ("kvgraft:requests_total", "kvgraft:tokens_total", "kvgraft:misses_total")


@dataclass(frozen=True)
class ServedPrompt:
    """One request, its answer, and the response's token counts.

    Attributes:
        ttft_ms: milliseconds to the first token if streamed, else to the whole answer.
        cached_tokens: `usage.prompt_tokens_details.cached_tokens`.
        reason: reason why nothing was grafted, or None.
    """

    request: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    prefix: int
    continued: int
    grafted: int
    recomputed: int
    fresh: int
    reason: str | None
    answer: str
    expected: str


@dataclass(frozen=True)
class ServingReport:
    """All requests in order, and the lines of /metrics that count them."""

    command: str
    rows: tuple[ServedPrompt, ...]
    metrics: tuple[str, ...]


def run_serving_demo(*, seed: int = 0, on_progress: OnProgress | None = None) -> ServingReport:
    """Start a server on the bundled model. It reads documents once, then gets them in other orders.

    Raises:
        RuntimeError: the server did not start; the message holds the end of its log.
    """
    rag, *_ = make_scenarios(seed, 1)
    [item] = rag.items
    asks = [_Ask("first reading", item.phase_1[0])]
    for number, prompt in enumerate(item.phase_2):
        stream = number % 2 == 1
        name = "streamed" if stream else "reordered"
        asks.append(_Ask(name, prompt.segments, prompt.question.answer, stream))

    asks.append(replace(asks[-1], name="reuse off", reuse="off"))

    with serving(*SERVER_FLAGS) as server:
        client = OpenAI(base_url=server.api, api_key="none")
        _send(client, _Ask("warm-up", ("one two three",), reuse="off"))
        rows = []
        for done, ask in enumerate(asks, 1):
            rows.append(_send(client, ask))
            if on_progress is not None:
                on_progress(done, len(asks))
        return ServingReport(
            f"kvgraft serve {' '.join(SERVER_FLAGS)}", tuple(rows), _metrics(server)
        )


@dataclass(frozen=True)
class _Ask:
    name: str
    segments: Segments
    expected: str = ""
    stream: bool = False
    reuse: str = "auto"


def _send(client: OpenAI, ask: _Ask) -> ServedPrompt:
    extra = {"kv_transfer_params": {"kvgraft": {"reuse": ask.reuse}}}
    arguments: dict[str, Any] = {
        "model": MODEL,
        "prompt": as_text(ask.segments),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    start = time.perf_counter()
    if ask.stream:
        chunks = client.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        received, first = [], 0.0
        for chunk in chunks:
            first = first or time.perf_counter()
            received.append(chunk)
        answer = "".join(choice.text for chunk in received for choice in chunk.choices)
        return _row(ask, first - start, received[-1], answer)

    whole = client.completions.create(**arguments, extra_body=extra)
    return _row(ask, time.perf_counter() - start, whole, whole.choices[0].text)


def _row(ask: _Ask, seconds: float, last: Completion, answer: str) -> ServedPrompt:
    report = (last.model_extra or {})["kv_transfer_params"]["kvgraft"]
    details = last.usage.prompt_tokens_details if last.usage else None
    return ServedPrompt(
        request=ask.name,
        ttft_ms=1000 * seconds,
        prompt_tokens=report["prompt_tokens"],
        cached_tokens=(details.cached_tokens if details else 0) or 0,
        prefix=report["prefix_tokens"],
        continued=report["continued_tokens"],
        grafted=report["grafted_tokens"],
        recomputed=report["recomputed_tokens"],
        fresh=report["fresh_tokens"],
        reason=report["reason"],
        answer=answer.strip(),
        expected=ask.expected,
    )


def _metrics(server: Server) -> tuple[str, ...]:
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return tuple(line for line in lines if line.startswith(METRICS) and "_created" not in line)


def render(report: ServingReport) -> RenderableType:
    """Return a table of the requests, 80 columns wide, and the metrics, for a rich console."""
    table = Table(
        title=f"over HTTP: {report.command}, official OpenAI client",
        caption="ms: to the first token where streamed, else to the end of the answer; tokens of "
        "the prompt by kind, redone: computed again of the continued and the grafted",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("request", overflow="fold")
    for name in ("ms", "prefix", "contin-\nued", "grafted", "redone", "fresh"):
        table.add_column(name, justify="right")

    table.add_column("answer", overflow="fold")
    for row in report.rows:
        numbers = (row.prefix, row.continued, row.grafted, row.recomputed, row.fresh)
        word, *_ = row.answer.split() or [""]
        answer = f"{word} ({row.expected})" if row.expected else word
        table.add_row(row.request, f"{row.ttft_ms:.0f}", *map(str, numbers), answer)

    return Group(
        table,
        Text("/metrics", style="bold"),
        Text("\n".join(_shorten(report.metrics)), style="dim"),
    )


def _shorten(metrics: Sequence[str]) -> list[str]:
    """Return metrics without the labels that are equal in all of them."""
    return [
        re.sub(rf'engine="0",?|,?model_name="{MODEL}"', "", line).replace("{,", "{")
        for line in metrics
    ]
