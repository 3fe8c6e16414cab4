"""Methods whose results are cached as long as their object lives."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


def memoised(method: Callable[P, Result]) -> Callable[P, Result]:
    """Cache the results of a method in its object, by its positional, hashable arguments."""

    @wraps(method)
    def remembered(*given: P.args, **none: P.kwargs) -> Result:
        owner, *arguments = given
        known: dict[Any, Result] = vars(owner).setdefault("_memoised", {})
        key = (method.__name__, *arguments)
        if key not in known:
            known[key] = method(*given, **none)
        return known[key]

    return remembered


def forget(owner: object, method: str) -> None:
    """Drop the cached results of a memoised method of an object."""
    known: dict[Any, Any] = vars(owner).get("_memoised", {})
    for key in [key for key in known if key[0] == method]:
        del known[key]
