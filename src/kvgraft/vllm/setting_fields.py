"""The settings of a server, declared once: defaults, checks, flags, help and docs follow from this.

This module imports neither vLLM nor PyTorch, so that wrong flags are refused at once.
"""

from dataclasses import dataclass, replace

from kvgraft.core.options import ReuseFields, StoreFields
from kvgraft.setting_schema import (
    POSITIVE_SHARE,
    SHARE,
    SWITCH,
    TEXT,
    at_least,
    list_of,
    one_of,
    same_as,
    setting,
)

MODES = ("live", "shadow")
SHADOW = "shadow"
TOOLS, JSON = "tools", "json"
# kinds of requests, see `exact_for`
KINDS = (TOOLS, JSON)
# fields of `StoreOptions`, by the settings that give them
STORE = {
    "store_dir": "directory",
    "store_ram_gib": "ram_gib",
    "store_disk_gib": "disk_gib",
    "store_quota": "quota",
    "store_int8": "int8",
    "store_shared": "shared_url",
    "store_shared_timeout": "shared_timeout_s",
    "store_shared_gib": "shared_gib",
}


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a text between its commas."""
    return tuple(text.split(","))


@dataclass(frozen=True, kw_only=True)
class SettingFields(ReuseFields):
    """The fields of `KVGraftSettings`, each with its declaration (`setting`).

    None stands for what a declaration shows as the default.
    """

    policy: str | None = same_as(ReuseFields, "policy")
    head_map: str | None = same_as(ReuseFields, "head_map")
    match: str | None = same_as(ReuseFields, "match")
    costs: str = same_as(ReuseFields, "costs")
    residual_layers: tuple[int, ...] = same_as(ReuseFields, "residual_layers")
    pin_quota: float | None = setting(
        None,
        "limits one tenant to this share of the pinned capacity",
        "tenants need different amounts",
        POSITIVE_SHARE,
        shown="an equal share for each API key, and one for all shared namespaces",
    )
    store_dir: str | None = same_as(StoreFields, "directory")
    store_ram_gib: float = same_as(
        StoreFields, "ram_gib", default=0.0, words_of_default="0; `StoreOptions`: 1"
    )
    store_disk_gib: float = same_as(StoreFields, "disk_gib")
    store_quota: float = same_as(StoreFields, "quota")
    store_int8: bool = same_as(StoreFields, "int8")
    store_shared: str | None = same_as(StoreFields, "shared_url")
    store_shared_timeout: float = same_as(StoreFields, "shared_timeout_s")
    store_shared_gib: float | None = same_as(StoreFields, "shared_gib")
    idle_refresh: float = setting(
        0.0,
        "when the server has been idle for 0.5 s, recomputes popular approximate blocks exactly, "
        "most used first. Value: a share; fewer tokens are recomputed than this share of all "
        "prompt tokens received. A new request aborts it and waits for one step of 512 tokens at "
        "most",
        "documents return in another order, and the server has idle time "
        "([figures](results/conversations.md#recomputing-between-turns))",
        SHARE,
        shown="0: off",
    )
    guard: float = setting(
        0.0,
        "sets the share of answers on approximate KV that the [guard](guard.md) scores again with "
        "exact KV, mostly while no request waits",
        "you want to measure what reuse changes",
        SHARE,
        shown="0: off",
    )
    guard_target: str | None = setting(
        None,
        "`flips=0.03` or `kl=0.1`: a policy with worse answers gets a larger budget, then exact "
        "KV. Needs `--kvgraft-guard`; not in shadow mode",
        "you want a limit on quality loss",
        TEXT,
        shown="none: measure only",
    )
    guard_tokens: int = setting(
        20_000,
        "limits the tokens that scoring may compute in a minute",
        "too few answers are scored",
        at_least(1),
    )
    exact_for: tuple[str, ...] = setting(
        (),
        "gives exact KV to requests of these kinds: `tools` (may call tools), `json` (structured "
        "output), or `tools,json`",
        "such answers must not be approximate",
        replace(list_of(one_of(*KINDS), "a list of tools, json"), read=listed, is_list=False),
        shown="none",
    )
    mode: str = setting(
        "live",
        "`live`, or [`shadow`](guard.md#try-it-without-risk): compute every prompt exactly, and "
        "report what would be grafted",
        "before you trust reuse on your traffic",
        one_of(*MODES),
        shown="`live`",
    )
    allow_untested: bool = setting(
        False,
        "starts, with a warning, on a vLLM newer than the supported versions; also with "
        "`--kvgraft-head-paging`",
        "after `make contract VERSION=...` in a clone, which shows in two minutes what has changed",
        SWITCH,
        shown="off: refused",
    )
