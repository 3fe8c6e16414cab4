"""Function calls in an answer, compared with the expected calls as in BFCL."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"```\w*")
# characters of strings that a comparison ignores
_IGNORED = re.compile(r"[ ,./\-_*^]")


def match_calls(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the answer makes exactly the expected calls, in any order, else 0.

    Args:
        expected: one JSON object per call, `{name: {argument: [allowed values]}}`; "" as a value
            means that the argument is optional.
    """
    made = find_calls(answer)
    for wanted in map(json.loads, expected):
        fitting = [call for call in made if _is(call, wanted)]
        if not fitting:
            return 0.0
        made.remove(fitting[0])
    return float(not made)


def find_calls(answer: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of an answer; empty if there are none, or if one cannot be read.

    They are in Python, `f(a=1)` or a list of calls, or in JSON, `{"name": "f", "arguments": {"a":
    1}}`, several of these, or a list of them. If the answer has `<tool_call>` tags, the calls are
    what these enclose. Otherwise other text may follow the line of the calls.
    """
    if tagged := _TAGGED.findall(answer):
        parts = [_read(part) for part in tagged]
        return [call for part in parts for call in part or ()] if None not in parts else []

    first, _, rest = _FENCE.sub("", answer).strip().partition("\n")
    calls = _read(f"{first}\n{rest}")
    if calls is None and not rest.lstrip().startswith(("{", "[")):
        calls = _read(first)
    return calls or []


def _read(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the calls that a text consists of, or None if it is no calls."""
    text = _FENCE.sub("", text).strip()
    for read in (_from_json, _from_python):
        with suppress(
            ValueError,
            SyntaxError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            MemoryError,
        ):
            return list(read(text))

    return None


def _from_json(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call["arguments"], dict):
                raise TypeError("arguments are an object")
            yield call["name"], call["arguments"]
        text = text[end:].lstrip()


def _from_python(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    body = ast.parse(text, mode="eval").body
    for call in body.elts if isinstance(body, ast.List | ast.Tuple) else [body]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call, or one with arguments that have no name")
        yield (
            ast.unparse(call.func),
            {str(given.arg): _value(given.value) for given in call.keywords},
        )


def _value(node: ast.expr) -> Any:
    """Return a literal, or the source text of any other expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _is(call: tuple[str, dict[str, Any]], wanted: Mapping[str, Mapping[str, Any]]) -> bool:
    [(name, allowed)] = wanted.items()
    return call[0] == name and _fits(call[1], allowed)


def _fits(given: Mapping[str, Any], allowed: Mapping[str, Any]) -> bool:
    """Return whether all given arguments are allowed, and all required ones are given. A single
    allowed value may come without a list.
    """
    choices = {
        name: values if isinstance(values, list) else [values] for name, values in allowed.items()
    }
    return given.keys() <= choices.keys() and all(
        any(_equal(given[name], value) for value in values) if name in given else "" in values
        for name, values in choices.items()
    )


def _equal(given: Any, allowed: Any) -> bool:
    if isinstance(allowed, dict):
        return isinstance(given, dict) and _fits(given, allowed)
    if isinstance(allowed, list):
        return (
            isinstance(given, list | tuple)
            and len(given) == len(allowed)
            and all(map(_equal, given, allowed))
        )
    if isinstance(allowed, str):
        return isinstance(given, str) and _plain(given) == _plain(allowed)
    return isinstance(given, bool) == isinstance(allowed, bool) and bool(given == allowed)


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')
