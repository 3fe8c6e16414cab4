"""What a request may say about reuse, and what its answer reports: the one schema of the HTTP edge
and the engine.

A request carries `kv_transfer_params: {"kvgraft": {...}}`; its response carries a `ServedReport` in
the same place."""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvgraft.methods import UnknownOption, require_choice, require_share
from kvgraft.prefill.context import Policy
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.policies import parse_policy, with_options
from kvgraft.prefill.report import PrefillReport
from kvgraft.reuse.index import wants_similar

PARAMS = "kv_transfer_params"  # of requests and answers
KEY = "kvgraft"  # in these
TRIAL_OF = "kvgraft_trial_of"  # likewise: vLLM's id of the request whose plan it tries
NOTE_PLAN = "kvgraft_note_plan"  # likewise: whether its plan may be tried later
# likewise, set by the API server alone: why a request gets exact KV
EXACT_BECAUSE = "kvgraft_exact"
CONTROL_TOKEN = "KVGRAFT_CONTROL_TOKEN"  # noqa: S105  # name of the variable that API server and engine share
_LABELLED = re.compile(r"[0-9a-f]{64}:(.+)", re.DOTALL)  # a cache key of the API server
_LABEL_LENGTH = 8  # hexadecimal digits
SERVE_SIMILAR = "start the server with --kvgraft-match=similar"
MAX_NAME = 128  # characters of a namespace or a segment name
REFRESH, READ = "refresh", "read"  # control operations that read anew
SCORE = "score"  # another: computes exactly what an answer is scored by
_OPS = ("pin", "delete", "list", REFRESH, READ, SCORE)
OWN_FIELDS = ("policy", "reuse", "quality", "match", "namespace", "shared", "forced_output")
QUALITIES = ("exact", "guarded", "fast")
GUARDED = "guarded"


@dataclass(frozen=True)
class RequestOptions:
    """How one request wants its known text recovered.

    Attributes:
        policy: the method with its options.
        reuse: False takes exact prefix hits only, and computes everything else.
        quality: `guarded`: the guard may have it answered with more exact KV; `fast`: it may not.
        namespace: narrows the caller's own namespace; the API server folds it into `cache_salt`.
        match_similar: whether near-duplicates are grafted, too.
        shared: names of the shared namespaces that it grafts from, beside its own; None: of all
            that are granted to it.
        forced_output: token ids with which its answer begins, whatever the model would choose.
        profile: which profile named the policy, or None.
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
        """Whether its answer may rest on KV that is not exact."""
        return self.reuse and (self.policy.uses_grafts or isinstance(self.policy, KeepsDocuments))

    @classmethod
    def parse(cls, given: Mapping[str, Any], default: "RequestOptions") -> "RequestOptions":
        """From `{"policy": name, "reuse": "auto" | "exact" | "off", "quality": "exact" | "guarded"
        | "fast", "match": "exact" | "similar", "namespace": text, "shared": [text, ...],
        "forced_output": [token id, ...], <policy option>: value}`, all optional. `off` is another
        word for `exact`, and quality `exact` one more.

        Policy options beside no `policy`, or the default one's bare name, change that option of the
        default policy.

        Raises:
            ValueError: a field that does not exist or a value that is not allowed; the message
                names it.
        """
        name, reuse, namespace = (
            given.get("policy"),
            given.get("reuse", "auto"),
            given.get("namespace", ""),
        )
        if not (name is None or isinstance(name, str)):
            raise ValueError(f"policy must be a string, got {name!r}")
        if reuse not in ("auto", "exact", "off"):
            raise ValueError(f"reuse must be 'auto', 'exact' or 'off', got {reuse!r}")
        quality = given.get("quality", GUARDED)
        require_choice("quality", quality, QUALITIES)
        check_name("namespace", namespace, may_be_empty=True)
        similar = wants_similar(
            given.get("match"), offered=default.match_similar, how=SERVE_SIMILAR
        )
        base = default.policy if name in (None, default.policy.name) else parse_policy(str(name))
        options = {key: value for key, value in given.items() if key not in OWN_FIELDS}
        policy = _changed(base, options)
        shared, answer = (
            _shared(given.get("shared")),
            parse_forced_output(given.get("forced_output")),
        )
        profile = default.profile if policy == default.policy else None
        is_exact = reuse != "auto" or quality == "exact"
        return cls(policy, not is_exact, quality, namespace, similar, shared, answer, profile)


@dataclass(frozen=True)
class Control:
    """An operation on the pinned documents, or on what is to be read anew, sent by the API server
    as a request of its own: the one way into the engine that every layout of vLLM has. The prompt
    of `pin` is the text to pin, that of `read` the text to read, that of `score` what to compute;
    that of the others is ignored.

    Attributes:
        op: pin, delete, list; refresh, read (see `RefreshControls`); score (see `Scorer`).
        owner: whom `pin` charges, whatever the namespace: the label of a tenant.
        quota: share of the pinned capacity that this owner may take.
        adapter: name of the one under which a segment was read; empty: none.
    """

    op: str
    name: str = ""
    owner: str = ""
    quota: float = 1.0
    adapter: str = ""

    @classmethod
    def parse(cls, given: Any) -> "Control":
        """From its fields and `token`, which proves that the API server sent it.

        Raises:
            ValueError: a wrong token, an operation that does not exist, or a quota that is no
                share.
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
        if control.op not in _OPS:
            raise ValueError(f"op must be {', '.join(_OPS[:-1])} or {_OPS[-1]}, got {control.op!r}")
        return control

    @property
    def is_idle_refresh(self) -> bool:
        """Whether it is about what to read anew, and not about the pinned documents."""
        return self.op in (REFRESH, READ)

    def as_params(self) -> dict[str, Any]:
        """The `kv_transfer_params` of the request that carries it."""
        return {KEY: {"control": {**asdict(self), "token": os.environ.get(CONTROL_TOKEN, "")}}}


@dataclass
class ServedReport(PrefillReport):
    """What became of one prompt; `as_params` puts it into the response's `kv_transfer_params`.

    Attributes:
        spans: [start, stop, kind] of the prompt, kind one of prefix, grafted, fresh; at most 64
            (the rest is cut off).
        registered_blocks: blocks that later requests can graft from.
        counts: `rejected_tokens` and `rejected_segments`: grafted, and computed after all, since a
            probe did not trust them; `promoted_heads`: local ones that saw everything, over all
            layers; `distinguishing_tokens`: recomputed because their segment looks alike. Empty if
            its policy counts nothing.
        kept_tokens: of the prompt, in the cache when the answer begins, if that is a part; else
            None.
        shadow_graftable_tokens: that a server in shadow mode would have grafted, had it been live.
        guard: `pending`: the answer will be scored; `larger_budget`, `exact`: how the guard had it
            answered; else None.
    """

    spans: list[list[int | str]] = field(default_factory=list)
    registered_blocks: int = 0
    kept_tokens: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    shadow_graftable_tokens: int = 0
    guard: str | None = None

    def as_params(self) -> dict[str, Any]:
        """`{"kvgraft": {...}}`."""
        return {KEY: asdict(self)}


def labelled(key: str, label: str) -> str:
    """A `cache_salt` that is as secret as this key, 64 hexadecimal digits, and says whose namespace
    it is."""
    return f"{key}:{label}"


def namespace_label(cache_salt: str) -> str:
    """What may be shown of a namespace: the label that the API server gave it; else, as the
    client's own salt may be its secret, a digest of that."""
    if (found := _LABELLED.fullmatch(cache_salt)) is not None:
        return found[1]
    return hashlib.sha256(cache_salt.encode()).hexdigest()[:_LABEL_LENGTH] if cache_salt else ""


def pin_namespace(cache_salt: str, adapter: str) -> str:
    """Where text is pinned that a namespace reads under the adapter of this name; empty: under
    none."""
    return f"lora:{adapter}:{cache_salt}" if adapter else cache_salt


def _changed(policy: Policy, options: Mapping[str, Any]) -> Policy:
    """The policy with these options; ValueError says what else a request may have."""
    try:
        return with_options(policy, options)
    except UnknownOption as error:
        raise ValueError(f"{error}; a request itself has {', '.join(OWN_FIELDS)}") from error


def _shared(names: Any) -> tuple[str, ...] | None:
    """The shared namespaces that a request names; ValueError unless they are distinct names in a
    list."""
    if names is None:
        return None
    if not isinstance(names, list):
        raise ValueError(f"shared must be a list of names, got {str(names)[:40]!r}")
    for name in names:
        check_name("shared: a name", name)
    if len(set(names)) < len(names):
        raise ValueError("shared has a name twice")
    return tuple(names)


def parse_forced_output(given: Any) -> tuple[int, ...]:
    """Token ids with which an answer is to begin, none of nothing; ValueError unless it is a list
    of some."""
    if given is None:
        return ()
    if (
        not isinstance(given, list)
        or not given
        or not all(type(token) is int and token >= 0 for token in given)
    ):
        raise ValueError(f"forced_output must be a list of token ids, got {str(given)[:40]!r}")
    return tuple(given)


def check_name(what: str, value: Any, *, may_be_empty: bool = False) -> None:
    """Raise ValueError unless value is a printable string of at most 128 characters."""
    if (
        not isinstance(value, str)
        or len(value) > MAX_NAME
        or not value.isprintable()
        or not (value or may_be_empty)
    ):
        raise ValueError(
            f"{what} must be a printable string of 1 to {MAX_NAME} characters, got "
            f"{str(value)[:40]!r}"
        )
