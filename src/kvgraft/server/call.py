"""State of one HTTP request on its way to the engine, and the context variable that holds it."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from kvgraft.server.logprob_recorder import LogprobRecorder
from kvgraft.server.tenancy import LOCAL, Principal
from kvgraft.vllm.setting_fields import JSON


@dataclass
class Call:
    """One HTTP request on its way to the engine.

    Attributes:
        principal: the caller.
        route: path of the HTTP request; empty for an internal request.
        salt: the cache key to use unchanged; None derives it from the tenant and the client's
            options.
        lora_request: vLLM's LoRA request, for an internal request that runs with an adapter.
        kinds: its kinds in the sense of `--kvgraft-exact-for`, known from the body: `tools` or
            none.
        engine: index of the engine to use, for an internal request; None leaves the choice to the
            server.
        low_priority: the request gives way to all others, because no client waits for it.
        watched: the guard's record of each prompt, by vLLM's request id. Clients may choose these
            ids, so they are unique within one call only.
        reports: the engine's report on each prompt, in order; None until the prompt's answer ends.
        cached: cached tokens of each prompt, as vLLM counts them; 0 until vLLM reports them.
    """

    principal: Principal
    route: str
    salt: str | None = None
    lora_request: Any = None
    kinds: frozenset[str] = frozenset()
    engine: int | None = None
    low_priority: bool = False
    watched: dict[str, LogprobRecorder] = field(default_factory=dict)
    reports: list[dict[str, Any] | None] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def kinds_of(self, params: Any) -> frozenset[str]:
        """Return the kinds of one prompt, including `json` if its answer has structured output."""
        return self.kinds if params.structured_outputs is None else self.kinds | {JSON}

    @classmethod
    def internal_request(
        cls, cache_salt: str, lora_request: Any = None, engine: int | None = None
    ) -> "Call":
        """Return a low-priority call of the server itself, with this cache key, adapter and
        engine."""
        principal = Principal(LOCAL, is_admin=True)
        return cls(principal, "", cache_salt, lora_request, engine=engine, low_priority=True)


CURRENT: ContextVar[Call | None] = ContextVar("kvgraft_call", default=None)
