"""How an option is declared: one declaration gives its check, its flag, its help and its row in
docs.

Options are the fields of a frozen dataclass, made by `setting`. An option that two surfaces have is
declared once: inherited, or repeated by `same_as`. msgspec does not check values, because its
errors do not name them, and its types cannot describe "a path or an object" or a printable name.
"""

import math
import re
import reprlib
from argparse import BooleanOptionalAction
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from inspect import Signature, signature
from os import PathLike
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
First = TypeVar("First")
Options = TypeVar("Options")
Init = Callable[[Any, First, Options], None]
# end of a help text that names its default, so that no formatter adds the parser's own (None)
SAYS_DEFAULT = "%(default).0s"
_SCHEMA = "kvgraft"
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class ValueType:
    """The values that an option may have.

    Attributes:
        words: what is allowed, for messages: "a share from 0 to 1".
        test: returns whether a value is allowed.
        read: makes a value from the text of a flag; None: the flag has no value.
        is_list: whether the flag takes several values.
    """

    words: str
    test: Callable[[Any], bool]
    read: Callable[[str], Any] | None = str
    is_list: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError, with the name of the option, unless the value is allowed."""
        if not self.test(value):
            raise ValueError(f"{name} must be {self.words}, got {reprlib.repr(value)}")


@dataclass(frozen=True)
class Setting:
    """The declaration of an option.

    Attributes:
        default: its default; if it is None, None is allowed.
        what: what it does, with its unit; one line of Markdown.
        change: when a user should change it; one line of Markdown.
        kind: the values that are allowed.
        words_of_default: its default in docs, if the value does not say it.
    """

    default: Any
    what: str
    change: str
    kind: ValueType
    words_of_default: str | None = None

    @property
    def shown(self) -> str:
        """Its default, as docs show it."""
        if self.words_of_default is not None:
            return self.words_of_default
        return f"{self.default:,}" if isinstance(self.default, int) else f"{self.default:g}"

    @property
    def summary(self) -> str:
        """What it does, without Markdown."""
        return f"{_plain(self.what).removesuffix('.')}."

    @property
    def help(self) -> str:
        """The text of `--help`."""
        return f"{self.summary} Default: {_plain(self.shown)}."

    def row(self, name: str) -> str:
        """The row in a table of docs: option, what it does, default, when to change."""
        return f"| {name} | {self.what} | {self.shown} | {self.change} |"

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError, with the name of the option, unless the value is allowed."""
        if value is not None or self.default is not None:
            self.kind.check(name, value)

    def field(self) -> Any:
        """Return a field of a dataclass with this declaration."""
        return field(default=self.default, metadata={_SCHEMA: self})

    def add_flag(self, parser: Any, *flags: str, **more: Any) -> None:
        """Add the flag of the option to a parser. A flag that was not given is None; a switch that
        is on by default can also be negated.

        Args:
            more: further arguments of `add_argument`.
        """
        text = self.help.replace("%", "%%") + SAYS_DEFAULT
        if self.kind.read is None:
            action = BooleanOptionalAction if self.default else "store_true"
            parser.add_argument(*flags, action=action, default=None, help=text, **more)
        else:
            nargs = "+" if self.kind.is_list else None
            parser.add_argument(*flags, type=self.kind.read, nargs=nargs, help=text, **more)


def setting(
    default: Any, what: str, change: str, kind: ValueType, *, shown: str | None = None
) -> Any:
    """Return the field of a dataclass of options; see `Setting`."""
    return Setting(default, what, change, kind, shown).field()


def same_as(options: type[Any], name: str, **changes: Any) -> Any:
    """Return a field with the declaration that a field of other options has.

    Args:
        changes: attributes of the declaration that differ here, such as its default.
    """
    return replace(declarations(options)[name], **changes).field()


def declarations(options: Any) -> dict[str, Setting]:
    """Return the declarations of a dataclass of options, by the names of its fields."""
    return {one.name: one.metadata[_SCHEMA] for one in fields(options) if _SCHEMA in one.metadata}


def check_declared(options: Any) -> None:
    """Raise ValueError if an option has a value that its declaration does not allow."""
    for name, declared in declarations(options).items():
        declared.check(name, getattr(options, name))


def _plain(text: str) -> str:
    """Return a line of Markdown without links and code marks."""
    return _LINK.sub(r"\1", text).replace("`", "")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


SWITCH = ValueType("true or false", lambda value: isinstance(value, bool), None)
TEXT = ValueType("a string", lambda value: isinstance(value, str))
URL = ValueType("a URL", lambda value: isinstance(value, str))
PATH = ValueType("a path", lambda value: isinstance(value, str | PathLike))
SHARE = ValueType("a share from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1, float)
POSITIVE_SHARE = ValueType(
    "a share above 0, up to 1", lambda value: _is_number(value) and 0 < value <= 1, float
)
AMOUNT = ValueType(
    "a number of at least 0", lambda value: _is_number(value) and 0 <= value < math.inf, float
)
POSITIVE = ValueType(
    "a number above 0", lambda value: _is_number(value) and 0 < value < math.inf, float
)


def at_least(least: int) -> ValueType:
    """Return the integers of at least `least`."""
    return ValueType(
        f"an integer of at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
        int,
    )


def one_of(*choices: str) -> ValueType:
    """Return one of these strings."""
    return ValueType(f"one of {', '.join(choices)}", lambda value: value in choices)


def list_of(kind: ValueType, words: str) -> ValueType:
    """Return the lists of values of a kind; `words` name such a list."""
    return ValueType(
        words,
        lambda value: isinstance(value, list | tuple) and all(map(kind.test, value)),
        kind.read,
        is_list=True,
    )


def or_object(kind: ValueType) -> ValueType:
    """Return the type of values that Python code may also give as the object that they name."""
    return replace(
        kind,
        test=lambda value: (
            kind.test(value) or is_dataclass(value) or isinstance(value, msgspec.Struct)
        ),
    )


def with_keywords(
    options: Callable[P, Options],
) -> Callable[[Init[First, Options]], Callable[Concatenate[Any, First, P], None]]:
    """Return a decorator of an `__init__` that takes options: their fields become its keywords."""

    def decorate(init: Init[First, Options]) -> Callable[Concatenate[Any, First, P], None]:
        @wraps(init)
        def made(self: Any, first: First, *args: P.args, **keywords: P.kwargs) -> None:
            init(self, first, options(*args, **keywords))

        own, keywords = (signature(one).parameters.values() for one in (init, options))
        made.__signature__ = Signature([*list(own)[:2], *keywords])  # type: ignore[attr-defined]
        return made

    return decorate
