"""Function calls in an answer, compared with the expected calls as in BFCL."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

_AROUND = re.compile(r"```\w*|</?tool_call>")
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
    """Return the calls of an answer, or of its first line; empty if there are none.

    They are in Python, `f(a=1)` or a list of calls, or in JSON, `{"name": "f", "arguments": {"a":
    1}}`, several of these, or a list of them.
    """
    text = _AROUND.sub("", answer).strip()
    for read in (_from_json, _from_python):
        for part in (text, text.partition("\n")[0]):
            with suppress(
                ValueError,
                SyntaxError,
                TypeError,
                KeyError,
                AttributeError,
                RecursionError,
                MemoryError,
            ):
                return list(read(part))

    return []


def _from_json(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        for call in value if isinstance(value, list) else [value]:
            yield call["name"], dict(call["arguments"])
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
