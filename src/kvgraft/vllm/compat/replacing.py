"""Methods of single objects of vLLM, replaced for some time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Have this object, and no other of its class, use `method`; it may be replaced already."""
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
    """Call `act` whenever one of vLLM's attention layers has stored keys and values and is about to
    attend.

    vLLM's operators find the implementation when they run, so this holds in compiled graphs, too.
    """
    attend = attention.impl.forward

    def forward(*given: Any, **named: Any) -> Any:
        act()
        return attend(*given, **named)

    with replaced(attention.impl, "forward", forward):
        yield
