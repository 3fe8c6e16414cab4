"""Methods (policies, flows) by name and options, as users write them: `name` or `name:option=value,option=value`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast

Option = int | float | str | tuple[int, ...]


AnyMethod = TypeVar("AnyMethod")  # a frozen dataclass, whose fields are its options


def make(kind: str, known: Mapping[str, type[AnyMethod]], name: str, options: Mapping[str, Any]) -> AnyMethod:
    """A method of a kind (`policy`) from its name and options.

    Raises:
        ValueError: an unknown name or option (the message lists the known ones), or a value out of range.
    """
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: choose from {', '.join(sorted(known))}")
    allowed = [field.name for field in fields(cast(Any, known[name]))]
    for option in options:
        if option not in allowed:
            raise ValueError(f"{kind} {name!r} has no option {option!r}: it has {', '.join(allowed) or 'none'}")
    return known[name](**options)


def parse(kind: str, text: str) -> tuple[str, dict[str, Option]]:
    """Name and options of `name:option=value,...`; numbers as in Python, `0+2` is a list of integers.

    Raises:
        ValueError: an option without a value.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Option] = {}
    for item in filter(None, rest.split(",")):
        option, _, value = item.partition("=")
        if not value:
            raise ValueError(f"{kind} option {item!r} is not option=value")
        options[option.strip()] = _value(value.strip())
    return name.strip(), options


def _value(text: str) -> Option:
    for kind in (int, float, lambda listed: tuple(map(int, listed.split("+")))):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
