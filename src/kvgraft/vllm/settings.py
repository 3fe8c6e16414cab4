"""Settings of the server: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from kvgraft.guard.target import Target
from kvgraft.methods import require_amount, require_at_least, require_choice, require_share
from kvgraft.prefill.costs import MEASURED, Costs, find_costs
from kvgraft.prefill.policies import DEFAULT_POLICY, parse_policy
from kvgraft.prefill.profile import PolicyProfile
from kvgraft.reuse.cost import EXACTNESS_WEIGHT
from kvgraft.segments.matches import MAX_DEPTH
from kvgraft.segments.segmentation import Similarity, parse_match
from kvgraft.segments.store import StoreOptions
from kvgraft.vllm.options import RequestOptions

MODES = ("live", "shadow")
SHADOW = "shadow"
TOOLS, JSON = "tools", "json"
# kinds of requests, see `exact_for`
KINDS = (TOOLS, JSON)


@dataclass(frozen=True)
class KVGraftSettings:
    """Settings of reuse in one server.

    Attributes:
        policy: policy of requests that name none, as `name` or `name:option=value,...`. None: the
            policy of the profile, or `spread` without one.
        profile: file that `kvgraft calibrate` has written for this checkpoint.
        head_map: file of `kvgraft profile-heads` for this checkpoint, for policies that work head
            by head. None: the map that lies with the weights, if there is one.
        match: `exact`, or `similar` (`similar:tau=0.7,...`) to find also edited copies of known
            text. None: what `policy` needs.
        residual_layers: layers whose incoming residual stream is kept, for requests whose policies
            need it. Layers that `policy` needs are kept in any case.
        continuation: let a prompt continue with the KV of an earlier prompt that it begins with,
            grafts included. The policy may recover the approximate part in place.
        max_depth: maximum depth of KV to graft from. Exact KV has depth 0; KV computed over grafts
            of depth d has depth d + 1. MAX_DEPTH is no limit.
        require_clean_context: graft only text that was read at the beginning of a prompt, as pinned
            text is.
        watermark: share of used blocks above which a namespace sheds its own pinned blocks when it
            needs room.
        pin_capacity: share of the pool that pinned blocks may take.
        pin_quota: share of `pin_capacity` that one tenant may take, over all its namespaces. None:
            equal shares for all API keys.
        store_dir: directory of each worker for exact blocks that outlast the server. None: none.
        store_ram_gib: host memory of each worker for exact blocks that vLLM may reclaim. With 0, no
            store_dir and no store_shared there is no store.
        store_disk_gib, store_quota, store_int8: see `StoreOptions`.
        store_shared: URL of a store that machines share: a Redis or Valkey server, or a directory.
            None: none.
        store_shared_timeout: seconds for which a prompt waits for the shared store.
        store_shared_gib: size of a shared directory. None: 64. A Redis or Valkey server limits
            itself.
        costs: costs that decide what to graft: `measured` at start, `tokens`, or a file of costs.
        exactness_weight: preference for exact KV, as a share of the cost to compute it. 0 grafts
            everything that lowers the TTFT.
        document_gib: host memory of each worker for documents that were read on their own, for
            policies that keep a part of them.
        idle_refresh: budget of tokens to recompute popular approximate text exactly while no
            request runs, as a share of the prompt tokens that requests have brought.
        guard: share of the answers on approximate KV that are scored with exact KV.
        guard_target: quality to keep, `flips=0.01` or `kl=0.05` (nats). A policy whose answers are
            worse gets a larger budget, and if that fails its requests get exact KV. None: no
            target.
        guard_tokens: tokens per minute that may be computed to score answers.
        mode: `live`, or `shadow` to graft nothing and only report what would have been grafted.
        exact_for: kinds of requests that always get exact KV, of `tools` and `json`.
        allow_untested: start, with a warning, on a vLLM newer than the supported versions.
    """

    policy: str | None = None
    profile: str | None = None
    head_map: str | None = None
    match: str | None = None
    residual_layers: tuple[int, ...] = ()
    continuation: bool = True
    max_depth: int = MAX_DEPTH
    require_clean_context: bool = False
    watermark: float = 0.9
    pin_capacity: float = 0.5
    pin_quota: float | None = None
    store_dir: str | None = None
    store_ram_gib: float = 0.0
    store_disk_gib: float = 16.0
    store_quota: float = 1.0
    store_int8: bool = False
    store_shared: str | None = None
    store_shared_timeout: float = 0.5
    store_shared_gib: float | None = None
    costs: str = MEASURED
    exactness_weight: float = EXACTNESS_WEIGHT
    document_gib: float = 2.0
    idle_refresh: float = 0.0
    guard: float = 0.0
    guard_target: str | None = None
    guard_tokens: int = 20_000
    exact_for: tuple[str, ...] = ()
    mode: str = "live"
    allow_untested: bool = False

    @property
    def default(self) -> RequestOptions:
        """Options of requests that set none."""
        name = self.policy_profile.name if self.policy_profile else None
        return RequestOptions(
            parse_policy(self.default_policy),
            match_similar=self.similarity is not None,
            profile=name,
        )

    @property
    def default_policy(self) -> str:
        """Policy of requests that name none."""
        named = self.policy_profile.policy if self.policy_profile else DEFAULT_POLICY
        return named if self.policy is None else self.policy

    @cached_property
    def policy_profile(self) -> PolicyProfile | None:
        """The loaded profile, or None.

        Raises FileNotFoundError or ValueError if the file holds none.
        """
        return None if self.profile is None else PolicyProfile.load(self.profile)

    @property
    def similarity(self) -> Similarity | None:
        """Definition of near-duplicates; None if they are not matched."""
        return parse_match(self.match or parse_policy(self.default_policy).match)

    @property
    def target(self) -> Target | None:
        """Quality target of the guard, or None."""
        return None if self.guard_target is None else Target.parse(self.guard_target)

    @property
    def store(self) -> StoreOptions | None:
        """Options of the segment store; None without a store. Raises ValueError for invalid
        options.
        """
        sizes = self.store_ram_gib, self.store_disk_gib, self.store_quota
        shared = self.store_shared, self.store_shared_timeout, self.store_shared_gib
        options = StoreOptions(self.store_dir, *sizes, self.store_int8, *shared)
        is_wanted = (
            self.store_dir is not None or self.store_ram_gib or self.store_shared is not None
        )
        return options if is_wanted else None

    @cached_property
    def given_costs(self) -> Costs | None:
        """The configured costs; None if they are to be measured.

        Raises:
            FileNotFoundError, ValueError: the file does not exist or holds no costs.
        """
        return None if self.costs == MEASURED else find_costs(self.costs, Costs)

    def kept_residual_layers(self, num_layers: int) -> set[int]:
        """Return `residual_layers` and the layers that the default policy needs."""
        return {*self.residual_layers, *self.default.policy.residual_layers(num_layers)}

    @classmethod
    def of(cls, config: Any) -> "KVGraftSettings":
        """Return the settings of a `VllmConfig`."""
        transfer = config.kv_transfer_config
        return cls.parse((transfer.kv_connector_extra_config if transfer else None) or {})

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "KVGraftSettings":
        """Return settings from a mapping.

        Raises:
            ValueError: a setting does not exist, or its value is not allowed.
        """
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"no KVGraft setting {name!r}: allowed are {', '.join(known)}")

        settings = cls(**given)
        for name in ("policy", "match", "profile", "head_map"):
            if not isinstance(value := getattr(settings, name), str | None):
                raise ValueError(f"{name} must be a string, got {value!r}")

        if None not in (settings.policy, settings.profile):
            raise ValueError(
                f"give either a policy or a profile, got {settings.policy} and {settings.profile}"
            )

        parse_policy(settings.default_policy)
        _ = settings.similarity
        if not isinstance(settings.residual_layers, list | tuple):
            raise ValueError(
                f"residual_layers must be a list of layers, got {settings.residual_layers!r}"
            )

        for layer in settings.residual_layers:
            require_at_least("residual_layers", layer, 0)

        for name in ("watermark", "pin_capacity", "exactness_weight", "idle_refresh", "guard"):
            require_share(name, getattr(settings, name))

        if settings.pin_quota is not None:
            require_share("pin_quota", settings.pin_quota)

        for name in ("watermark", "pin_capacity", "pin_quota"):
            if getattr(settings, name) == 0:
                raise ValueError(f"{name} must be above 0")

        require_amount("document_gib", settings.document_gib)
        if not (settings.store_dir is None or isinstance(settings.store_dir, str)):
            raise ValueError(f"store_dir must be a path, got {settings.store_dir!r}")

        require_amount("store_ram_gib", settings.store_ram_gib)
        _ = settings.store
        if not isinstance(settings.costs, str):
            raise ValueError(f"costs must be measured, tokens or a file, got {settings.costs!r}")

        _ = settings.given_costs

        _check_guard(settings)
        require_at_least("max_depth", settings.max_depth, 0)

        for name in ("continuation", "require_clean_context", "allow_untested"):
            if not isinstance(getattr(settings, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(settings, name)!r}")

        return settings


def _check_guard(settings: KVGraftSettings) -> None:
    """Raise ValueError if the settings of the guard are invalid."""
    require_choice("mode", settings.mode, MODES)
    require_at_least("guard_tokens", settings.guard_tokens, 1)
    if settings.target is not None and not settings.guard:
        raise ValueError(
            f"guard_target {settings.guard_target} needs a guard above 0: a share of answers to "
            "score"
        )

    if settings.target is not None and settings.mode == SHADOW:
        raise ValueError(
            f"guard_target {settings.guard_target}: mode {SHADOW} has nothing to cut back"
        )
    if not isinstance(settings.exact_for, list | tuple):
        raise ValueError(
            f"exact_for must be a list of {', '.join(KINDS)}, got {settings.exact_for!r}"
        )

    for kind in settings.exact_for:
        require_choice("exact_for", kind, KINDS)


# names of all settings; each has a flag of `kvgraft serve`
SETTINGS = tuple(field.name for field in fields(KVGraftSettings))


def given_settings(args: Namespace) -> dict[str, Any]:
    """Return the settings given by flags of `kvgraft serve`."""
    given = {name: getattr(args, f"kvgraft_{name}") for name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}
