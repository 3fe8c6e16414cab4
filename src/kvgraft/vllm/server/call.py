"""One HTTP request on its way to the engine, and which one is being served."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from kvgraft.vllm.server.logprob_recorder import LogprobRecorder
from kvgraft.vllm.server.tenancy import LOCAL, Principal
from kvgraft.vllm.settings import JSON


@dataclass
class Call:
    """One HTTP request on its way to the engine.

    Attributes:
        salt: the cache key to use as it is; None derives it from the tenant and what the client
            chose.
        lora_request: vLLM's, of a request of the server's own that runs under an adapter.
        kinds: what it is, of `exact_for`: tools.
        low_priority: nobody waits for it, so all other requests come first.
        reports: what the engine reported on each prompt of the request, in their order; None until
            it ends.
        watched: what the guard notes of its prompts, by vLLM's ids, which clients may choose: not
            unique on a server.
        cached: tokens of each that came from a cache, as vLLM counts them; 0 until it says so.
    """

    principal: Principal
    route: str
    salt: str | None = None
    lora_request: Any = None
    kinds: frozenset[str] = frozenset()
    low_priority: bool = False
    watched: dict[str, LogprobRecorder] = field(default_factory=dict)
    reports: list[dict[str, Any] | None] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def kinds_of(self, params: Any) -> frozenset[str]:
        """What a prompt of it is, with these sampling parameters."""
        return self.kinds if params.structured_outputs is None else self.kinds | {JSON}

    @classmethod
    def internal_request(cls, cache_salt: str, lora_request: Any = None) -> "Call":
        """One of the server's own, under this cache key and this adapter."""
        return cls(Principal(LOCAL, is_admin=True), "", cache_salt, lora_request, low_priority=True)


CURRENT: ContextVar[Call | None] = ContextVar("kvgraft_call", default=None)
