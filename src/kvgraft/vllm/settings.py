"""Settings of the server: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from kvgraft.core.costs import MEASURED, Costs, find_costs
from kvgraft.core.segmentation import Similarity, parse_match
from kvgraft.guard.target import Target
from kvgraft.methods import check_options
from kvgraft.policies import DEFAULT_POLICY, parse_policy
from kvgraft.policies.profile import PolicyProfile, default_match
from kvgraft.setting_schema import check_declared
from kvgraft.store import StoreOptions
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.setting_fields import SHADOW, STORE, SettingFields


@dataclass(frozen=True)
class KVGraftSettings(SettingFields):
    """Settings of reuse in one server; `SettingFields` declares them."""

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
        return parse_match(self.default_match)

    @property
    def default_match(self) -> str:
        """Matching of requests that name none."""
        policy = parse_policy(self.default_policy)
        return self.match or default_match([policy], self.policy_profile)

    @property
    def target(self) -> Target | None:
        """Quality target of the guard, or None."""
        return None if self.guard_target is None else Target.parse(self.guard_target)

    @property
    def store(self) -> StoreOptions | None:
        """Options of the segment store, or None. Raises ValueError if they are invalid."""
        options = StoreOptions(**{field: getattr(self, name) for name, field in STORE.items()})
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
        check_options("KVGraft", cls, given)
        settings = cls(**given)
        check_declared(settings)

        if None not in (settings.policy, settings.profile):
            raise ValueError(
                f"give either a policy or a profile, got {settings.policy} and {settings.profile}"
            )
        parse_policy(settings.default_policy)
        # each of these raises ValueError for a value that cannot be used
        _ = settings.similarity, settings.store, settings.given_costs
        settings._check_target()
        return settings

    def _check_target(self) -> None:
        """Raise ValueError if there is a target, and no guard that could reach it."""
        if self.target is None:
            return
        if not self.guard:
            raise ValueError(
                f"guard_target {self.guard_target} needs a guard above 0: a share of answers to "
                "score"
            )
        if self.mode == SHADOW:
            raise ValueError(
                f"guard_target {self.guard_target}: mode {SHADOW} has nothing to cut back"
            )


SETTINGS = tuple(field.name for field in fields(KVGraftSettings))


def given_settings(args: Namespace) -> dict[str, Any]:
    """Return the settings given by flags of `kvgraft serve`."""
    given = {name: getattr(args, f"kvgraft_{name}") for name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}
