"""How a setting is declared: one declaration gives its check, its flag, its help and its row in
docs."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvgraft.methods import require_at_least, require_choice, require_share

_SCHEMA = "kvgraft"
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
Check = Callable[[str, Any], None]


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        what: what it does, with its unit; one line of Markdown.
        change: when an operator should change it; one line of Markdown.
        shown: its default, as docs show it.
        parse: makes a value from the text of its flag; None: the flag has no value.
        is_list: whether the flag takes several values.
        check: raises ValueError, with the name, unless a value is allowed.
    """

    what: str
    change: str
    shown: str
    parse: Callable[[str], Any] | None
    check: Check
    is_list: bool

    @property
    def help(self) -> str:
        """The text of `--help`, without Markdown."""
        end = "" if self.what.endswith(".") else "."
        return f"{_plain(self.what)}{end} Default: {_plain(self.shown)}."

    def row(self, flag: str) -> str:
        """The row of the flag in a table of docs: option, what it does, default, when to change."""
        return f"| `{flag}` | {self.what} | {self.shown} | {self.change} |"


def setting(
    default: Any,
    what: str,
    change: str,
    check: Check,
    *,
    parse: Callable[[str], Any] | None = str,
    shown: str | None = None,
    is_list: bool = False,
) -> Any:
    """Return the field of a dataclass of settings; see `Setting`."""
    shown = f"{default:,}" if shown is None else shown
    declared = Setting(what, change, shown, parse, check, is_list)
    return field(default=default, metadata={_SCHEMA: declared})


def _plain(text: str) -> str:
    """Return a line of Markdown without links and code marks."""
    return _LINK.sub(r"\1", text).replace("`", "")


def declaration(of: Any) -> Setting:
    """Return the declaration of a field that `setting` made."""
    return of.metadata[_SCHEMA]


def is_bool(name: str, value: Any) -> None:
    """Raise ValueError unless the value is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def is_text(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a string or None."""
    if not isinstance(value, str | None):
        raise ValueError(f"{name} must be a string, got {value!r}")


def is_path(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a path or None."""
    if not isinstance(value, str | None):
        raise ValueError(f"{name} must be a path, got {value!r}")


def is_positive_share(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a share above 0."""
    require_share(name, value)
    if value == 0:
        raise ValueError(f"{name} must be above 0")


def is_share_or_none(name: str, value: Any) -> None:
    """Raise ValueError unless the value is None or a share above 0."""
    if value is not None:
        is_positive_share(name, value)


def at_least(least: int) -> Check:
    """Return a check that a value is an integer of at least `least`."""
    return lambda name, value: require_at_least(name, value, least)


def one_of(*choices: str) -> Check:
    """Return a check that a value is one of these."""
    return lambda name, value: require_choice(name, value, choices)


def several_of(*choices: str) -> Check:
    """Return a check that a value is a list of these."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list of {', '.join(choices)}, got {value!r}")
        for one in value:
            require_choice(name, one, choices)

    return check


def anything(name: str, value: Any) -> None:
    """Allow every value: what uses it checks it."""
