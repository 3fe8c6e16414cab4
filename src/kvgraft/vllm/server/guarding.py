"""The guard of one server: which requests are watched, at which level they are answered, and what metrics say of it."""

from collections.abc import Mapping
from typing import Any

from kvgraft.guard.breaker import Level, Transition
from kvgraft.guard.guard import Guard, Ticket, with_larger_budget
from kvgraft.prefill.report import Outcome
from kvgraft.vllm.options import EXACT_BECAUSE, GUARDED, KEY, OWN_FIELDS, PARAMS, RequestOptions
from kvgraft.vllm.server.call import Call
from kvgraft.vllm.server.guard_metrics import GuardMetrics
from kvgraft.vllm.server.scorer import EngineGate, Sample, Scorer
from kvgraft.vllm.server.watching import Watched, can_be_watched, watched
from kvgraft.vllm.settings import KVGraftSettings

PENDING = "pending"  # in a report: its answer will be scored
APPROXIMATE = (Outcome.GRAFTED, Outcome.CONTINUED)


class ServerGuard:
    """Beside the gate to the engine, `engine_client`."""

    def __init__(self, settings: KVGraftSettings, engine_client: EngineGate) -> None:
        self._exact_for = frozenset(settings.exact_for)
        self._longest = engine_client.max_model_len - 1  # one token is generated behind what is scored
        self.guard = Guard(settings.guard, settings.target, on_transition=self._moved)
        self.metrics = GuardMetrics()
        profile = settings.policy_profile
        self._scorer = Scorer(engine_client, settings.guard_tokens, self.scored, self.metrics)
        self._noise = None if profile is None else profile.order_noise[0]
        self.metrics.noise.set(self._noise or 0.0)

    def begin(self, call: Call, params: Any, options: RequestOptions) -> tuple[Any, Watched | None]:
        """A request is about to enter the engine: the sampling parameters with which it does, and what is noted of
        it."""
        if not options.is_approximate:
            return params, None
        kinds = call.kinds | ({"json"} if params.structured_outputs is not None else set())
        if kinds & self._exact_for:
            return exact(params, "exact_for"), None
        ticket = self.guard.admit(options.policy, guarded=options.quality == GUARDED)
        if ticket.level is Level.EXACT:
            return exact(params, "guard_tripped"), self._watch(call, ticket, params)
        if ticket.level is Level.LARGER_BUDGET:
            params = with_policy(params, str(with_larger_budget(options.policy)))
        if ticket.is_watched and not can_be_watched(params):
            self.metrics.answers.labels("own_logprobs").inc()
            ticket = Ticket(ticket.policy, ticket.level, is_watched=False)
        return watched(params) if ticket.is_watched else params, self._watch(call, ticket, params)

    def _watch(self, call: Call, ticket: Ticket, params: Any) -> Watched:
        return Watched(ticket, call.principal.tenant.label, self._longest, params.output_kind)

    def end(self, one: Watched, report: dict[str, Any] | None) -> None:
        """Its answer has ended; the engine's report of it is completed."""
        if report is None:
            return
        ticket = one.ticket
        if ticket.level is not Level.AS_ASKED:
            report["guard"] = ticket.level.name.lower()
        would = report["would_graft_tokens"]
        if report["outcome"] not in APPROXIMATE and not would:
            return
        self.metrics.approximate.labels(ticket.policy).inc()
        grafted = (report["grafted_tokens"] + would) / report["prompt_tokens"]
        if self.guard.chooses(ticket, report["depth"], grafted) and one.is_whole:
            report["guard"] = PENDING
            self._scorer.add(Sample.of(one, report["depth"], would=bool(would)))

    def scored(self, sample: Sample, distances: Mapping[str, float]) -> None:
        """An answer has been scored."""
        sample.found.update(distances)
        self.guard.add(sample.ticket, sample.tenant, distances)
        self.metrics.observe(sample.ticket.policy, sample.depth, distances)
        self.metrics.bound(sample.ticket.policy, self.guard.policy_view(sample.ticket.policy))

    def view(self, tenant: str | None) -> dict[str, Any]:
        """For the page: see `Guard.view`; `order_noise` is the unit of KL, in nats, if a profile knows it."""
        return {**self.guard.view(tenant), "order_noise": self._noise}

    def _moved(self, policy: str, transition: Transition) -> None:
        self.metrics.transitions.labels(policy, transition.after.name.lower(), transition.reason).inc()
        self.metrics.level.labels(policy).set(int(transition.after))


def exact(params: Any, reason: str) -> Any:
    """Sampling parameters of a request that is to be answered with exact KV, with the reason for its report."""
    return _with_params(params, {EXACT_BECAUSE: reason})


def with_policy(params: Any, policy: str) -> Any:
    """Sampling parameters of a request that is to have this policy instead of its own."""
    given = ((params.extra_args or {}).get(PARAMS) or {}).get(KEY) or {}
    kept = {name: value for name, value in given.items() if name in OWN_FIELDS}
    return _with_params(params, {KEY: {**kept, "policy": policy}})


def _with_params(params: Any, changes: Mapping[str, Any]) -> Any:
    changed, extra = params.clone(), params.extra_args or {}
    changed.extra_args = {**extra, PARAMS: {**(extra.get(PARAMS) or {}), **changes}}
    return changed
