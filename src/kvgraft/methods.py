"""Methods (policies, flows) by name and options, as users write them: `name` or `name:option=value,option=value`; and
checks that they share for their options."""

import math
from collections.abc import Mapping, Sequence
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


def require_share(name: str, value: float) -> None:
    """Raise ValueError unless 0 <= value <= 1."""
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a share from 0 to 1, got {value!r}")


def require_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError unless value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def require_amount(name: str, value: float) -> None:
    """Raise ValueError unless value is a finite number of at least 0."""
    if not _is_number(value) or not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def require_layers(name: str, value: int | float) -> None:
    """Raise ValueError unless value is a number of layers (int) or a share of them (float)."""
    if isinstance(value, float):
        require_share(name, value)
    else:
        require_at_least(name, value, 0)


def count_layers(value: int | float, num_layers: int) -> int:
    """A number of layers (int), or a share of all `num_layers` (float), rounded up, as a number of layers."""
    if isinstance(value, float):
        return math.ceil(value * num_layers - 1e-9)
    return min(value, num_layers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
