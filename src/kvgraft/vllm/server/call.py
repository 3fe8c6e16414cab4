"""One HTTP request on its way to the engine, and which one is being served."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from kvgraft.vllm.server.tenancy import Principal


@dataclass
class Call:
    """One HTTP request on its way to the engine.

    Attributes:
        salt: the cache key to use as it is; None derives it from the tenant and what the client chose.
        kinds: what it is, of `exact_for`: tools.
        yields: whether it gives way to any other one: nobody waits for it.
        reports: what the engine reported on each prompt of the request, in their order; None until it ends.
        cached: tokens of each that came from a cache, as vLLM counts them; 0 until it says so.
    """

    principal: Principal
    route: str
    salt: str | None = None
    kinds: frozenset[str] = frozenset()
    yields: bool = False
    reports: list[dict[str, Any] | None] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


CURRENT: ContextVar[Call | None] = ContextVar("kvgraft_call", default=None)
