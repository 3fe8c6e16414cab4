"""One streamed completion of an OpenAI-compatible server: its time, report and
log-probabilities.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_TOKEN = "token_id:"  # noqa: S105  # vLLM's, before the id of a token


@dataclass
class Completion:
    """Streamed completion.

    Attributes:
        text: text of the answer.
        first_s: seconds to the first token.
        report: KVGraft's report; empty without one.
        tokens: token ids of the answer.
        places: log-probabilities by token id at each place: of its token and of the most likely
            ones.
    """

    text: str = ""
    first_s: float = 0.0
    report: Mapping[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    places: list[Mapping[int, float]] = field(default_factory=list)


def stream(client: httpx.Client, url: str, body: Mapping[str, Any], most_likely: int) -> Completion:
    """Request one answer from `/v1/completions`, with log-probabilities of the `most_likely` tokens
    at each place.

    Raises:
        ValueError: the server refuses, breaks off, or returns no log-probabilities.
    """
    asked = {
        "stream": True, "stream_options": {"include_usage": True}, "logprobs": most_likely,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    found, start = Completion(), time.perf_counter()

    with client.stream("POST", f"{url}/v1/completions", json={**body, **asked}) as response:
        if response.status_code != 200:
            raise ValueError(
                f"{url} refused a prompt: {response.read().decode(errors='replace')[:500]}"
            )
        for chunk in _chunks(response):
            if "error" in chunk:
                raise ValueError(f"{url} broke off an answer: {chunk['error']}")
            found.first_s = found.first_s or time.perf_counter() - start
            for choice in chunk["choices"]:
                found.text += choice["text"]
                _add(found, choice.get("logprobs") or {})
            found.report = (chunk.get("kv_transfer_params") or {}).get("kvgraft") or found.report

    if not found.places:
        raise ValueError(f"{url} returned no log-probabilities")

    return found


def _chunks(response: httpx.Response) -> Iterator[Mapping[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _add(found: Completion, choice: Mapping[str, Sequence[Any]]) -> None:
    found.tokens += [int(token.removeprefix(_TOKEN)) for token in choice.get("tokens", ())]
    for places in choice.get("top_logprobs", ()):
        found.places.append(
            {int(token.removeprefix(_TOKEN)): value for token, value in places.items()}
        )
