"""Connection of the quality guard to one server: watched requests, levels and metrics."""

from collections.abc import Mapping
from typing import Any

from kvgraft.core.report import Outcome
from kvgraft.guard.breaker import Level, Transition
from kvgraft.guard.guard import Guard
from kvgraft.server.call import Call
from kvgraft.server.logprob_recorder import LogprobRecorder, can_be_watched, watched
from kvgraft.server.metrics import GuardMetrics
from kvgraft.server.scorer import AnswerSample, EngineGate, Scorer
from kvgraft.vllm.options import (
    EXACT_BECAUSE,
    KEY,
    NOTE_PLAN,
    OWN_FIELDS,
    PARAMS,
    RequestOptions,
)
from kvgraft.vllm.request_fields import GUARDED
from kvgraft.vllm.setting_fields import SHADOW
from kvgraft.vllm.settings import KVGraftSettings

# value of a report's `guard` field: the answer will be scored
PENDING = "pending"
APPROXIMATE = (Outcome.GRAFTED, Outcome.CONTINUED)


class ServerGuard:
    """Quality guard of one server, called by `TenantEngineClient` at the start and end of
    requests."""

    def __init__(
        self, settings: KVGraftSettings, engine_client: EngineGate, model_name: str
    ) -> None:
        self.guard = Guard(
            settings.guard,
            settings.target,
            default=settings.default.policy,
            on_transition=self._moved,
        )

        self.metrics = GuardMetrics(model_name)
        profile = settings.policy_profile
        self._scorer = Scorer(engine_client, settings.guard_tokens, self.scored, self.metrics)
        self._is_shadow = settings.mode == SHADOW
        self._noise = None if profile is None else profile.order_noise[0]
        self.metrics.noise.set(self._noise or 0.0)

    def begin(
        self, call: Call, params: Any, options: RequestOptions
    ) -> tuple[Any, LogprobRecorder]:
        """Register a request that may use approximate KV, before it enters the engine.

        Returns:
            The sampling parameters for the engine, and the recorder of the request's answer.
        """
        can = can_be_watched(params)
        ticket = self.guard.admit(
            options.policy, guarded=options.quality == GUARDED, can_be_watched=can
        )

        if ticket.level is Level.EXACT:
            params = exact(params, "guard_tripped")
        elif ticket.level is Level.LARGER_BUDGET:
            params = _with_policy(params, str(ticket.policy))

        one = LogprobRecorder(ticket, call.principal.tenant.name)
        if ticket.is_watched:
            params, one.kind = watched(params), params.output_kind
            if self._is_shadow:
                params = _with_params(params, {NOTE_PLAN: True})
        return params, one

    def end(self, one: LogprobRecorder, report: dict[str, Any] | None) -> None:
        """Complete the engine's report of an answer that has ended, and queue the answer for
        scoring."""
        if report is None:
            return
        ticket = one.ticket
        if ticket.level is not Level.AS_ASKED:
            report["guard"] = ticket.level.name.lower()

        would = report["shadow_graftable_tokens"]
        if report["outcome"] not in APPROXIMATE and not would:
            return

        self.metrics.approximate.labels(ticket.name).inc()
        grafted = (report["grafted_tokens"] + would) / report["prompt_tokens"]
        if not self.guard.chooses(ticket, report["depth"], grafted):
            return

        if not one.is_whole:
            self.metrics.answers.labels("empty").inc()
        elif self._scorer.add(AnswerSample.of(one, report["depth"], would=bool(would))):
            report["guard"] = PENDING
        else:
            self.metrics.answers.labels("dropped").inc()

    def scored(self, sample: AnswerSample, distances: Mapping[str, float]) -> None:
        """Record the distances of an answer that was scored."""
        sample.found.update(distances)
        self.guard.add(sample.ticket, sample.tenant, distances)
        self.metrics.observe(sample.ticket.name, sample.depth, distances)
        self.metrics.bound(sample.ticket.name, self.guard.policy_view(sample.ticket.name))

    async def reset(self) -> None:
        """Drop the answers that wait to be scored: after a cache reset the model may have other
        weights."""
        await self._scorer.reset()

    def view(self, tenant: str | None) -> dict[str, Any]:
        """Return the results for the status page: those of `Guard.view`, and `order_noise`.

        `order_noise` is the KL, in nats, that another order of the same documents causes; None if
        no profile knows it.
        """
        return {**self.guard.view(tenant), "order_noise": self._noise}

    def _moved(self, name: str, transition: Transition) -> None:
        """Count a change of a circuit breaker's level."""
        self.metrics.transitions.labels(
            name, transition.after.name.lower(), transition.reason
        ).inc()
        self.metrics.level.labels(name).set(int(transition.after))


def exact(params: Any, reason: str) -> Any:
    """Return sampling parameters that request exact KV, with the reason for the report."""
    return _with_params(params, {EXACT_BECAUSE: reason})


def _with_policy(params: Any, policy: str) -> Any:
    """Return sampling parameters with this policy in place of the one that the client asked for."""
    given = ((params.extra_args or {}).get(PARAMS) or {}).get(KEY) or {}
    kept = {name: value for name, value in given.items() if name in OWN_FIELDS}
    return _with_params(params, {KEY: {**kept, "policy": policy}})


def _with_params(params: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of sampling parameters with changes to their `kv_transfer_params`."""
    changed, extra = params.clone(), params.extra_args or {}
    changed.extra_args = {**extra, PARAMS: {**(extra.get(PARAMS) or {}), **changes}}
    return changed
