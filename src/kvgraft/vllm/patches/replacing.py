"""Temporary replacement of methods on single objects of vLLM."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of this object, and of no other, within a context.

    Contexts may be nested.
    """
    own = vars(owner)
    missing = object()
    before = own.get(name, missing)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def before_attending(attention: Any, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` whenever an attention layer of vLLM has stored its KV and is about to attend.

    vLLM's operators look up the implementation when they run, so this works in compiled graphs too.
    """
    attend = attention.impl.forward

    def forward(*given: Any, **named: Any) -> Any:
        act()
        return attend(*given, **named)

    with replaced(attention.impl, "forward", forward):
        yield
