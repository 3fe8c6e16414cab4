"""Parser of trace lines."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

import msgspec

ALLOWED = (
    'a line is an OpenAI request body with "messages" or "prompt", bare or under "body", a prompt '
    "as a JSON string, "
    'a request with "hash_ids" instead of text, or, with "type": "response", an answer'
)
# tokens of a block in traces that have block ids instead of text
BLOCK_TOKENS = 512
# number of block ids with their own token ids
MOST_BLOCKS = 2**31 // BLOCK_TOKENS
SESSION_KEYS = ("session", "session_id", "user")
TIME_KEYS = ("timestamp", "timestamp_utc", "timestamp_rel_s")


class _BlockRequest(msgspec.Struct):
    """Request in Mooncake's published format, used by other projects too; `timestamp` in
    milliseconds.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, lt=MOST_BLOCKS)], ...]


class BadLine(ValueError):
    """Error of a line that is no request, answer or prompt; the message says why."""


@dataclass(frozen=True)
class Conversation:
    """A chat prompt. Its messages have plain text as content.

    Attributes:
        messages: messages in order.
        tools: tools of the request.
        template_options: other arguments of the chat template (`chat_template_kwargs` of vLLM).
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HashedPrompt:
    """A prompt without text: its number of tokens, and an id for each prefix of `BLOCK_TOKENS` more
    tokens.
    """

    ids: tuple[int, ...]
    num_tokens: int


Prompt = str | Conversation | tuple[int, ...]


@dataclass(frozen=True)
class LoggedRequest:
    """A request of a trace.

    Attributes:
        prompt: prompt.
        session: name of the session; None if the trace does not say.
        timestamp: seconds; None if the trace does not say.
        request_id: id of the request, or None.
        num_answered: tokens of its answer, if the trace has only their number.
    """

    prompt: Prompt | HashedPrompt
    session: str | None = None
    timestamp: float | None = None
    request_id: str | None = None
    num_answered: int = 0


@dataclass(frozen=True)
class LoggedAnswer:
    """Text of an answer to the request of this id, or to the last request before it."""

    text: str
    request_id: str | None = None


def parse_record(value: object) -> list[LoggedRequest | LoggedAnswer]:
    """Return the requests and answers of a JSON line: one request, several if its `prompt` is a
    batch, or an answer.

    Raises:
        BadLine: the line is something else.
    """
    if isinstance(value, str):
        return [LoggedRequest(value)]
    if not isinstance(value, dict):
        raise BadLine(f"{_short(value)}: {ALLOWED}")
    if "hash_ids" in value:
        return [_of_blocks(value)]

    kind = value.get("type", "request")
    if kind not in ("request", "response"):
        raise BadLine(f'"type" is {_short(kind)}: must be "request" or "response"')

    body = value.get("body", value)
    request_id = _text_of(value, ("request_id", "id"))
    if kind == "response":
        text = _answer_text(body)
        return [LoggedAnswer(text, request_id)] if text else []
    if not isinstance(body, dict):
        raise BadLine(f'"body" is {_short(body)}: {ALLOWED}')

    session, timestamp = session_of(value, body), timestamp_of(value)
    return [LoggedRequest(prompt, session, timestamp, request_id) for prompt in prompts_of(body)]


def _of_blocks(value: dict[str, Any]) -> LoggedRequest:
    """Return a request that has only block ids."""
    try:
        said = msgspec.convert(value, _BlockRequest)
    except msgspec.ValidationError as error:
        raise BadLine(f"{_short(value)}: {error}") from None

    blocks = -(-said.input_length // BLOCK_TOKENS)
    if len(said.hash_ids) != blocks:
        raise BadLine(
            f'"hash_ids" are {len(said.hash_ids)}, must be {blocks}: one for each {BLOCK_TOKENS} '
            "tokens"
        )

    prompt = HashedPrompt(said.hash_ids, said.input_length)
    return LoggedRequest(
        prompt, session_of(value, value), said.timestamp / 1000, num_answered=said.output_length
    )


def prompts_of(body: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of an OpenAI body: one, or several if its `prompt` is a batch.

    Raises:
        BadLine: there is no readable prompt.
    """
    if ("messages" in body) == ("prompt" in body):
        what = "both" if "messages" in body else "neither"
        raise BadLine(f'"messages" and "prompt": the request has {what}; {ALLOWED}')
    if "messages" in body:
        return [_conversation(body)]

    prompt = body["prompt"]
    if isinstance(prompt, str) or _are_ids(prompt):
        return [_as_prompt(prompt)]
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(one, str) or _are_ids(one) for one in prompt)
    ):
        return [_as_prompt(one) for one in prompt]

    raise BadLine(f'"prompt" is {_short(prompt)}: must be a string, token ids, or a list of such')


def _conversation(body: Mapping[str, Any]) -> Conversation:
    messages, tools = body["messages"], body.get("tools") or []
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not messages:
        raise BadLine(f'"messages" is {_short(messages)}: must be a list of messages')
    if not isinstance(tools, list):
        raise BadLine(f'"tools" is {_short(tools)}: must be a list')
    if not isinstance(options, dict):
        raise BadLine(f'"chat_template_kwargs" is {_short(options)}: must be an object')
    return Conversation(
        tuple(_message(number, one) for number, one in enumerate(messages)), tuple(tools), options
    )


def _message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadLine(f'message {number} is {_short(message)}: must be an object with a "role"')
    read = {**message, "content": _content(number, message.get("content"))}
    if message.get("tool_calls"):
        read["tool_calls"] = [
            _tool_call(number, call) for call in _listed(number, message["tool_calls"])
        ]
    return read


def _content(number: int, content: object) -> str:
    """Return the plain text of a message's content. Text parts are joined by line breaks as in
    vLLM.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadLine(
            f"message {number}: content is {_short(content)}: must be text or a list of text parts"
        )
    return "\n".join(_part(number, part) for part in content)


def _part(number: int, part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise BadLine(
            f"message {number}: a content part of type {_short(kind)}: only text can be reused"
        )
    return text


def _listed(number: int, calls: object) -> list[object]:
    if not isinstance(calls, list):
        raise BadLine(f"message {number}: tool_calls is {_short(calls)}: must be a list")
    return calls


def _tool_call(number: int, call: object) -> dict[str, Any]:
    """Return a call with its arguments as an object, as chat templates expect."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise BadLine(
            f'message {number}: tool call {_short(call)}: must be an object with a "function"'
        )
    arguments = call["function"].get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _answer_text(body: object) -> str | None:
    """Return the text of the first choice of a response, or None."""
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        return None
    message = first.get("message")
    text = message.get("content") if isinstance(message, dict) else first.get("text")
    return text if isinstance(text, str) else None


def session_of(value: dict[str, Any], body: dict[str, Any]) -> str | None:
    """Return the session that a line or its body names, or None."""
    return _text_of(value, SESSION_KEYS) or _text_of(body, SESSION_KEYS)


def timestamp_of(value: dict[str, Any]) -> float | None:
    """Return the timestamp in seconds, or None. Raise BadLine if it is neither seconds nor an ISO
    8601 date and time.
    """
    found = next((value[key] for key in TIME_KEYS if value.get(key) is not None), None)
    if found is None or (isinstance(found, int | float) and not isinstance(found, bool)):
        return found
    try:
        return datetime.fromisoformat(found).timestamp()
    except (TypeError, ValueError):
        raise BadLine(
            f"timestamp is {_short(found)}: must be seconds, or a date and time of ISO 8601"
        ) from None


def _text_of(value: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    found = next((value[key] for key in keys if value.get(key) not in (None, "")), None)
    return None if found is None else str(found)


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < 2**31 for token in value)
    )


def _as_prompt(value: Any) -> Prompt:
    return value if isinstance(value, str) else tuple(value)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
