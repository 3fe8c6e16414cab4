"""Methods (policies, flows) by name and options, and shared checks of their options.

Users write `name` or `name:option=value,option=value`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from kvgraft.setting_schema import AMOUNT, SHARE, at_least, one_of

Option = int | float | str | tuple[int, ...]


# a frozen dataclass, whose fields are its options
AnyMethod = TypeVar("AnyMethod")


class UnknownOption(ValueError):
    """Error of an option that a method does not have."""


def make(
    kind: str, known: Mapping[str, type[AnyMethod]], name: str, options: Mapping[str, Any]
) -> AnyMethod:
    """Return a method of a kind (`policy`) from its name and options.

    Raises:
        ValueError: an unknown name or option (the message lists the known ones), a number of layers
            together with a share of them, or a value out of range.
    """
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: choose from {', '.join(sorted(known))}")
    check_options(f"{kind} {name!r}", known[name], options)
    return known[name](**options)


def check_options(what: str, method: type[Any], options: Iterable[str]) -> None:
    """Raise ValueError, as `make` does, unless a method accepts these options together."""
    given, allowed = set(options), [field.name for field in fields(cast(Any, method))]
    for option in options:
        if option not in allowed:
            raise UnknownOption(
                f"{what} has no option {option!r}: it has {', '.join(allowed) or 'none'}"
            )
        if option.endswith("_layers") and (share := layers_share(option)) in given:
            raise ValueError(f"{what} takes {option} or {share}, not both")


def layers_share(option: str) -> str:
    """Return the name of the option that gives the number of layers in `option` (`..._layers`) as a
    share of all layers.
    """
    return f"{option.removesuffix('_layers')}_share"


def parse(kind: str, text: str) -> tuple[str, dict[str, Option]]:
    """Return name and options of `name:option=value,...`. Numbers are as in Python; `0+2` is a list
    of integers.

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
    """Return a value as int, float, list of integers or text, the first that fits."""
    for kind in (int, float, lambda listed: tuple(map(int, listed.split("+")))):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def require_share(name: str, value: float) -> None:
    """Raise ValueError unless 0 <= value <= 1."""
    SHARE.check(name, value)


def require_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError unless value is an integer of at least `least`."""
    at_least(least).check(name, value)


def require_amount(name: str, value: float) -> None:
    """Raise ValueError unless value is a finite number of at least 0."""
    AMOUNT.check(name, value)


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless value is one of the choices."""
    one_of(*choices).check(name, value)


def require_layers(method: Any, option: str) -> None:
    """Raise ValueError unless `option` (`..._layers`) of a method is None or a number of layers,
    and its share a share."""
    if getattr(method, option) is not None:
        require_at_least(option, getattr(method, option), 0)
    require_share(layers_share(option), getattr(method, layers_share(option)))


def count_layers(count: int | None, share: float, num_layers: int) -> int:
    """Return the number of layers: `count`, or if it is None the `share` of `num_layers`, rounded
    up.
    """
    return math.ceil(share * num_layers - 1e-9) if count is None else min(count, num_layers)
