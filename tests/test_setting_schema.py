"""Options that are declared once: what a declaration allows, shows and passes on."""

import re
from argparse import ArgumentParser
from dataclasses import dataclass
from inspect import signature
from typing import Any

import pytest

from kvgraft.setting_schema import (
    AMOUNT,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    SWITCH,
    ValueType,
    at_least,
    check_declared,
    declarations,
    list_of,
    one_of,
    same_as,
    setting,
    with_keywords,
)


@dataclass(frozen=True, kw_only=True)
class Lamp:
    power: float = setting(0.5, "share of [full](x.md) `power`", "it is dark", SHARE)
    hours: int | None = setting(None, "hours of light.", "-", at_least(1), shown="no limit")
    on: bool = setting(True, "gives light", "-", SWITCH, shown="on")
    seed: int = 0

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, kw_only=True)
class Torch:
    strength: float = same_as(Lamp, "power", default=1.0)


class Room:
    @with_keywords(Lamp)
    def __init__(self, name: str, lamp: Lamp) -> None:
        self.name, self.lamp = name, lamp


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (SHARE, [0, 0.5, 1], [-0.1, 1.1, True, "0.5", None, float("nan")]),
        (POSITIVE_SHARE, [1e-9, 1], [0, 2, False, float("nan")]),
        (AMOUNT, [0, 3.5], [-1, float("inf"), float("nan"), "1", True]),
        (POSITIVE, [1e-9, 3], [0, float("inf"), None]),
        (at_least(1), [1, 10**30], [0, 1.0, True, "1"]),
        (one_of("a", "b"), ["a"], ["c", ["a"], None]),
        (list_of(at_least(0), "a list"), [[], (0, 1)], [{0}, "1", [-1], [True], 3]),
    ],
    ids=lambda value: value.words if isinstance(value, ValueType) else "",
)
def test_a_type_of_values_allows_these_only(kind: ValueType, good: list[Any], bad: list[Any]):
    for value in good:
        kind.check("it", value)
    for value in bad:
        with pytest.raises(ValueError, match=f"^it must be {re.escape(kind.words)}, got "):
            kind.check("it", value)


def test_an_error_does_not_repeat_a_long_value():
    with pytest.raises(ValueError, match=r"'xxxx.*\.\.\..*xxxx'") as refused:
        SHARE.check("it", "x" * 10_000)
    assert len(str(refused.value)) < 100


def test_none_is_allowed_where_it_is_the_default():
    Lamp(hours=None)
    with pytest.raises(ValueError, match="power must be a share from 0 to 1, got None"):
        Lamp(power=None)  # type: ignore[arg-type]


def test_help_and_row_follow_from_the_declaration():
    power, hours, _ = declarations(Lamp).values()
    assert power.help == "share of full power. Default: 0.5."
    assert hours.help == "hours of light. Default: no limit."
    assert power.row("`power`") == "| `power` | share of [full](x.md) `power` | 0.5 | it is dark |"


def test_a_declaration_is_used_twice_with_what_differs():
    [strength] = declarations(Torch).values()
    assert (strength.what, strength.shown) == (declarations(Lamp)["power"].what, "1")
    assert Torch().strength == 1.0


@pytest.mark.parametrize(
    ("given", "found"),
    [([], (None, None)), (["--power", "1"], (1.0, None)), (["--no-on"], (None, False))],
)
def test_a_flag_that_was_not_given_is_none(given: list[str], found: tuple[Any, Any]):
    parser = ArgumentParser()
    for name, declared in declarations(Lamp).items():
        declared.add_flag(parser, f"--{name}")
    args = parser.parse_args(given)
    assert (args.power, args.on) == found


def test_options_are_the_keywords_of_a_class():
    assert Room("hall", power=0.1).lamp == Lamp(power=0.1)
    assert list(signature(Room).parameters) == ["name", "power", "hours", "on", "seed"]
    with pytest.raises(ValueError, match="hours must be an integer of at least 1, got 0"):
        Room("hall", hours=0)
