"""Options of a request and the report in its response: one schema for the HTTP API and the engine.

A request carries `kv_transfer_params: {"kvgraft": {...}}`. Its response carries a `ServedReport` in
the same place.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvgraft.core.report import PrefillReport
from kvgraft.core.reuse_index import wants_similar
from kvgraft.methods import UnknownOption, require_share
from kvgraft.policies import parse_policy, with_options
from kvgraft.prefill.context import Policy
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.setting_schema import declarations, one_of
from kvgraft.vllm.request_fields import GUARDED, RequestFields

# field of requests and responses
PARAMS = "kv_transfer_params"
# key within `kv_transfer_params` for options and reports
KEY = "kvgraft"
# key for vLLM's id of the request whose plan a trial uses
TRIAL_OF = "kvgraft_trial_of"
# key that lets a trial use the request's plan later
NOTE_PLAN = "kvgraft_note_plan"
# key for the reason why a request gets exact KV; only the API server sets it
EXACT_BECAUSE = "kvgraft_exact"
# environment variable with the secret that API server and engine share
CONTROL_TOKEN = "KVGRAFT_CONTROL_TOKEN"  # noqa: S105
# form of a cache key of the API server: key and label
_LABELLED = re.compile(r"[0-9a-f]{64}:(.+)", re.DOTALL)
# in hexadecimal digits
_LABEL_LENGTH = 8
SERVE_SIMILAR = "start the server with --kvgraft-match=similar"
# control operations of the idle refresh
REFRESH, READ = "refresh", "read"
# control operation that computes exact KV to score an answer
SCORE = "score"
_OPS = ("pin", "delete", "list", REFRESH, READ, SCORE)
OWN_FIELDS = tuple(declarations(RequestFields))


@dataclass(frozen=True)
class RequestOptions:
    """Reuse options of one request.

    Attributes:
        policy: the method with its options.
        reuse: False to use exact prefix hits only and compute everything else.
        quality: `guarded` lets the guard answer the request with more exact KV; `fast` does not.
        namespace: subdivision of the caller's own namespace; the API server includes it in
            `cache_salt`.
        match_similar: True to graft near-duplicates too.
        shared: names of shared namespaces to graft from, besides its own. None: all that are
            granted.
        forced_output: token ids that the answer begins with, regardless of the model's choice.
        profile: name of the profile that set the policy, or None.
    """

    policy: Policy
    reuse: bool = True
    quality: str = GUARDED
    namespace: str = ""
    match_similar: bool = False
    shared: tuple[str, ...] | None = None
    forced_output: tuple[int, ...] = ()
    profile: str | None = None

    @property
    def is_approximate(self) -> bool:
        """True if the answer may depend on approximate KV."""
        return self.reuse and (self.policy.uses_grafts or isinstance(self.policy, KeepsDocuments))

    @classmethod
    def parse(cls, given: Mapping[str, Any], default: "RequestOptions") -> "RequestOptions":
        """Return options from a request's parameters, all of them optional.

        They are those of `RequestFields`, and options of policies. Reuse `off`, reuse `exact` and
        quality `exact` mean the same.

        Policy options without a `policy`, or with the bare name of the default policy, change that
        option of the default policy (see `_changed`).

        Raises:
            ValueError: a field does not exist or a value is not allowed; the message names it.
        """
        asked = RequestFields(**{name: given[name] for name in OWN_FIELDS if name in given})
        similar = wants_similar(asked.match, offered=default.match_similar, how=SERVE_SIMILAR)

        is_default = asked.policy in (None, default.policy.name)
        base = default.policy if is_default else parse_policy(str(asked.policy))
        options = {name: value for name, value in given.items() if name not in OWN_FIELDS}
        policy = _changed(base, options)

        return cls(
            policy,
            reuse=asked.reuse == "auto" and asked.quality != "exact",
            quality=asked.quality,
            namespace=asked.namespace,
            match_similar=similar,
            shared=None if asked.shared is None else tuple(asked.shared),
            forced_output=tuple(asked.forced_output or ()),
            profile=default.profile if policy == default.policy else None,
        )


@dataclass(frozen=True)
class Control:
    """A control operation that the API server sends as a request of its own.

    It acts on the pinned documents, the idle refresh or the guard. A request is the only way into
    the engine that works with every process layout of vLLM. The prompt is the text to pin (`pin`),
    to compute (`read`) or to score (`score`). Other operations ignore it.

    Attributes:
        op: pin, delete, list; refresh, read (see `RefreshControls`); score (see `Scorer`).
        name: name of the pinned document.
        owner: label of the tenant that `pin` charges, for all its namespaces.
        quota: share of the pinned capacity that this owner may take.
        adapter: name of the adapter of a pinned document; empty for none.
    """

    op: str
    name: str = ""
    owner: str = ""
    quota: float = 1.0
    adapter: str = ""

    @classmethod
    def parse(cls, given: Any) -> "Control":
        """Return a control operation from its fields and the API server's `token`.

        Raises:
            ValueError: the token is wrong, the operation does not exist, or the quota is no share.
        """
        known = {"token", *(f.name for f in fields(cls))}
        if not isinstance(given, Mapping) or not given.keys() <= known:
            raise ValueError(f"control must have {', '.join(sorted(known))}")

        token, expected = str(given.get("token", "")), os.environ.get(CONTROL_TOKEN, "")
        if not expected or not hmac.compare_digest(token.encode(), expected.encode()):
            raise ValueError("control operations come from the API server only")

        quota = given.get("quota", 1.0)
        require_share("quota", quota)
        name, owner, adapter = (str(given.get(key, "")) for key in ("name", "owner", "adapter"))
        control = cls(str(given.get("op")), name, owner, quota, adapter)
        one_of(*_OPS).check("op", control.op)

        return control

    @property
    def is_idle_refresh(self) -> bool:
        """True for operations of the idle refresh."""
        return self.op in (REFRESH, READ)

    def as_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the request that carries the operation."""
        return {KEY: {"control": {**asdict(self), "token": os.environ.get(CONTROL_TOKEN, "")}}}


@dataclass
class ServedReport(PrefillReport):
    """Report of one prompt; `as_params` puts it into the response's `kv_transfer_params`.

    Attributes:
        spans: [start, stop, kind] of the prompt, with kind prefix, continued, grafted or fresh. At
            most 64; further spans are cut off.
        registered_blocks: blocks that later requests can graft from.
        kept_tokens: prompt tokens in the cache when the answer begins, if only a part is kept; else
            None.
        counts: `rejected_tokens` and `rejected_segments`: grafts that were computed because a probe
            rejected them. `promoted_heads`: local heads that saw everything, over all layers.
            `distinguishing_tokens`: tokens recomputed because their segments look similar. Empty if
            the policy counts nothing.
        shadow_graftable_tokens: tokens that a server in shadow mode would have grafted.
        guard: `pending` if the answer will be scored; `larger_budget` or `exact` if the guard has
            changed how it was computed; else None.
        engine: index of the engine that has computed it, among those of data parallelism; else 0.
    """

    spans: list[list[int | str]] = field(default_factory=list)
    registered_blocks: int = 0
    kept_tokens: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    shadow_graftable_tokens: int = 0
    guard: str | None = None
    engine: int = 0

    def as_params(self) -> dict[str, Any]:
        """Return `{"kvgraft": {...}}`."""
        return {KEY: asdict(self)}


def labelled(key: str, label: str) -> str:
    """Return a `cache_salt` made of a secret key (64 hexadecimal digits) and a public label."""
    return f"{key}:{label}"


def namespace_label(cache_salt: str) -> str:
    """Return the part of a namespace that may be shown.

    This is the label that the API server gave it. A client's own salt may be secret, so a digest of
    it is shown.
    """
    if (found := _LABELLED.fullmatch(cache_salt)) is not None:
        return found[1]
    return hashlib.sha256(cache_salt.encode()).hexdigest()[:_LABEL_LENGTH] if cache_salt else ""


def pin_namespace(cache_salt: str, adapter: str) -> str:
    """Return the namespace of pins read under an adapter; an empty name means none."""
    return f"lora:{adapter}:{cache_salt}" if adapter else cache_salt


def _changed(policy: Policy, options: Mapping[str, Any]) -> Policy:
    """Return the policy with these options changed; a ValueError names the allowed fields.

    Of a policy that chooses by prompt, options that it has not itself change its most careful
    choice, which then recovers the prompt.
    """
    if not options.keys() <= {field.name for field in fields(policy)}:
        policy = policy.choices[0]
    try:
        return with_options(policy, options)
    except UnknownOption as error:
        raise ValueError(f"{error}; a request itself has {', '.join(OWN_FIELDS)}") from error
