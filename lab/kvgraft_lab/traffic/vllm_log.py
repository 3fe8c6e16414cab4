"""Prompts in the log of a vLLM server."""

import ast
import re
from collections.abc import Iterator

from kvgraft_lab.traffic.records import BadLine, LoggedAnswer, LoggedRequest

_QUOTED = r"""'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+\""""
# first form: vLLM up to about 0.12; second form: later versions, at log level DEBUG
_REQUEST = re.compile(
    r"(?:Received request (?P<old>\S+)|Request (?P<id>\S+) details): "
    rf"prompt: (?P<prompt>None|{_QUOTED}), (?:params: .*?, )?prompt_token_ids: (?P<ids>None|\[[\d, "
    r"]*\])"
)
_ANSWER = re.compile(
    rf"Generated response (?P<id>\S+)(?: \(streaming complete\))?: output: (?P<text>{_QUOTED})"
)
# prefixes of log lines: vLLM's own, and those of its HTTP server
_LINE = re.compile(
    r"^(?:\(\w+ pid=\d+\)\s+)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"\[|INFO:\s+)",
    re.MULTILINE,
)
_BARE = re.compile(r"Received request \S+: params: ")
_HOW = (
    "vLLM logs prompts with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG in its environment"
)
WITHOUT_PROMPTS = f"this log says that requests came, not what they were: {_HOW}"
WITHOUT_REQUESTS = f"this log has no request: {_HOW}"


def is_log(text: str) -> bool:
    """Return whether a text has lines in vLLM's log format."""
    return any(pattern.search(text) for pattern in (_REQUEST, _BARE, _LINE))


def read_log(lines: list[str]) -> Iterator[tuple[int, LoggedRequest | LoggedAnswer | BadLine]]:
    """Yield requests and answers with their line numbers from 1. Other lines are skipped, unless
    there are no requests.
    """
    has_prompts, bare = False, 0
    for number, line in enumerate(lines, 1):
        if found := _REQUEST.search(line):
            has_prompts = True
            yield number, _request(found)
        elif found := _ANSWER.search(line):
            yield number, LoggedAnswer(_unquoted(found["text"]), found["id"])
        elif _BARE.search(line):
            bare = bare or number
    if not has_prompts:
        yield (bare, BadLine(WITHOUT_PROMPTS)) if bare else (1, BadLine(WITHOUT_REQUESTS))


def _request(found: re.Match[str]) -> LoggedRequest | BadLine:
    """Return a request, by its token ids if they were logged. These are what the model read."""
    request_id = found["old"] or found["id"]
    if found["ids"] not in ("None", "[]"):
        return LoggedRequest(tuple(map(int, found["ids"][1:-1].split(","))), request_id=request_id)
    if found["prompt"] == "None":
        return BadLine(f"request {request_id} was logged without prompt and token ids")
    return LoggedRequest(_unquoted(found["prompt"]), request_id=request_id)


def _unquoted(literal: str) -> str:
    """Return the text of a Python string literal."""
    # parses a literal that the pattern has found to be one string
    text: str = ast.literal_eval(literal)
    return text
