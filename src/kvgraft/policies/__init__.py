"""Policies by name. A new policy is one file and one line here."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from kvgraft.methods import check_options, layers_share, make, parse
from kvgraft.policies.auto import Auto
from kvgraft.policies.cacheblend import CacheBlend
from kvgraft.policies.condense import Condense
from kvgraft.policies.epic import Epic
from kvgraft.policies.full import Full
from kvgraft.policies.naive import Naive
from kvgraft.policies.prophet import Prophet
from kvgraft.policies.redknot import RedKnot
from kvgraft.policies.samkv import SamKV
from kvgraft.policies.similar import Similar
from kvgraft.policies.sparsex import SparseX
from kvgraft.policies.spread import Spread
from kvgraft.policies.transitive import Transitive
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft.prefill.context import Policy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Full,
        Naive,
        Epic,
        CacheBlend,
        Prophet,
        SparseX,
        Transitive,
        Spread,
        Auto,
        RedKnot,
        SamKV,
        Condense,
        Similar,
    )
}


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Make a policy from its name and options; ValueError as `methods.make`."""
    return make("policy", POLICIES, name, options or {})


def with_options(policy: Policy, options: Mapping[str, Any]) -> Policy:
    """Return a policy with some options replaced; ValueError as `methods.make`.

    A share of all layers replaces a number of layers.
    """
    check_options(f"policy {policy.name!r}", type(policy), options)
    counts = {field.name for field in fields(policy) if field.name.endswith("_layers")}
    outdated = {count: None for count in counts if layers_share(count) in options}
    return replace(policy, **outdated, **options)


def parse_policy(given: str | Policy) -> Policy:
    """Parse a policy from `name` or `name:option=value,option=value`, with numbers as in Python
    (`0.15` share, `2` count)."""
    return make_policy(*parse("policy", given)) if isinstance(given, str) else given


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Auto",
    "CacheBlend",
    "Condense",
    "Epic",
    "Full",
    "Naive",
    "Policy",
    "Prophet",
    "RedKnot",
    "SamKV",
    "Similar",
    "SparseX",
    "Spread",
    "Transitive",
    "make_policy",
    "parse_policy",
    "with_options",
]
