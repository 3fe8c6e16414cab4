"""The guard of one server: which requests are watched, at which level they are answered, and what
metrics say of it."""

from collections.abc import Mapping
from typing import Any

from kvgraft.guard.breaker import Level, Transition
from kvgraft.guard.guard import Guard
from kvgraft.prefill.report import Outcome
from kvgraft.vllm.options import (
    EXACT_BECAUSE,
    GUARDED,
    KEY,
    NOTE_PLAN,
    OWN_FIELDS,
    PARAMS,
    RequestOptions,
)
from kvgraft.vllm.server.call import Call
from kvgraft.vllm.server.logprob_recorder import LogprobRecorder, can_be_watched, watched
from kvgraft.vllm.server.metrics import GuardMetrics
from kvgraft.vllm.server.scorer import AnswerSample, EngineGate, Scorer
from kvgraft.vllm.settings import SHADOW, KVGraftSettings

PENDING = "pending"  # in a report: its answer will be scored
APPROXIMATE = (Outcome.GRAFTED, Outcome.CONTINUED)


class ServerGuard:
    """Beside the gate to the engine, `engine_client`."""

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
        """A request that may be approximate is about to enter the engine: the sampling parameters
        with which it does, and what is noted of it."""
        can = can_be_watched(params)
        ticket = self.guard.admit(
            options.policy, guarded=options.quality == GUARDED, can_be_watched=can
        )
        if ticket.level is Level.EXACT:
            params = exact(params, "guard_tripped")
        elif ticket.level is Level.LARGER_BUDGET:
            params = _with_policy(params, str(ticket.policy))
        one = LogprobRecorder(ticket, call.principal.tenant.label)
        if ticket.is_watched:
            params, one.kind = watched(params), params.output_kind
            if self._is_shadow:
                params = _with_params(params, {NOTE_PLAN: True})
        return params, one

    def end(self, one: LogprobRecorder, report: dict[str, Any] | None) -> None:
        """Its answer has ended; the engine's report of it is completed."""
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
        """An answer has been scored."""
        sample.found.update(distances)
        self.guard.add(sample.ticket, sample.tenant, distances)
        self.metrics.observe(sample.ticket.name, sample.depth, distances)
        self.metrics.bound(sample.ticket.name, self.guard.policy_view(sample.ticket.name))

    async def reset(self) -> None:
        """The prefix cache is about to be reset: answers that wait to be scored may be of old
        weights."""
        await self._scorer.reset()

    def view(self, tenant: str | None) -> dict[str, Any]:
        """For the page: see `Guard.view`; `order_noise` is the unit of KL, in nats, if a profile
        knows it."""
        return {**self.guard.view(tenant), "order_noise": self._noise}

    def _moved(self, name: str, transition: Transition) -> None:
        self.metrics.transitions.labels(
            name, transition.after.name.lower(), transition.reason
        ).inc()
        self.metrics.level.labels(name).set(int(transition.after))


def exact(params: Any, reason: str) -> Any:
    """Sampling parameters of a request that is to be answered with exact KV, with the reason for
    its report."""
    return _with_params(params, {EXACT_BECAUSE: reason})


def _with_policy(params: Any, policy: str) -> Any:
    """Sampling parameters of a request that is to have this policy instead of its own."""
    given = ((params.extra_args or {}).get(PARAMS) or {}).get(KEY) or {}
    kept = {name: value for name, value in given.items() if name in OWN_FIELDS}
    return _with_params(params, {KEY: {**kept, "policy": policy}})


def _with_params(params: Any, changes: Mapping[str, Any]) -> Any:
    changed, extra = params.clone(), params.extra_args or {}
    changed.extra_args = {**extra, PARAMS: {**(extra.get(PARAMS) or {}), **changes}}
    return changed
