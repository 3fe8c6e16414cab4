"""The settings of a server, declared once: defaults, checks, flags, help and docs follow from this.

This module imports neither vLLM nor PyTorch, so that wrong flags are refused at once.
"""

from dataclasses import dataclass, replace

from kvgraft.core import EXACTNESS_WEIGHT
from kvgraft.core.costs import MEASURED
from kvgraft.core.matches import MAX_DEPTH
from kvgraft.core.options import StoreFields
from kvgraft.setting_schema import (
    AMOUNT,
    POSITIVE_SHARE,
    SHARE,
    SWITCH,
    TEXT,
    ValueType,
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

LAYERS = list_of(at_least(0), "a list of layers")
COSTS = ValueType("measured, tokens or a file", lambda value: isinstance(value, str))


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a text between its commas."""
    return tuple(text.split(","))


@dataclass(frozen=True)
class SettingFields:
    """The fields of `KVGraftSettings`, each with its declaration (`setting`).

    None stands for what a declaration shows as the default.
    """

    policy: str | None = setting(
        None,
        "sets the [policy](policies.md) of requests that name none: `naive`, "
        "`sparsex:boundary_layers=2,recompute_share=0.2`, ...",
        "another one is better on your texts",
        TEXT,
        shown="`spread`",
    )
    profile: str | None = setting(
        None,
        "takes the policy from a file that [`kvgraft calibrate`](calibration.md) wrote. A profile "
        "of another checkpoint is refused",
        "it is elsewhere",
        TEXT,
        shown="`policy.json` in the model directory, if no policy is given",
    )
    head_map: str | None = setting(
        None,
        "names the head map of `kvgraft profile-heads`, for [`redknot`](#redknot) and for head "
        "paging",
        "it is elsewhere",
        TEXT,
        shown="`heads.json` in the model directory, if it fits",
    )
    match: str | None = setting(
        None,
        "`exact`: reuse identical text only. `similar` or `similar:tau=0.5,...`: also find edited "
        "text ([near-duplicates](policies.md#near-duplicates))",
        "documents are edited between requests",
        TEXT,
        shown="the policy's: `exact`, but `similar` for `similar`",
    )
    residual_layers: tuple[int, ...] = setting(
        (),
        "keeps the residual stream of these layers (`3 5`), for requests with the policy "
        "`similar`. Eager mode only",
        "requests name another policy",
        LAYERS,
        shown="the layers that the server's policy needs",
    )
    continuation: bool = setting(
        True,
        "lets the next turn of a conversation continue with the KV of the last turn, grafts "
        "included. Nothing is copied; what the new question needs is recovered in place "
        "([conversations](results/conversations.md)). `--no-kvgraft-continuation`: off",
        "later turns must not follow approximate KV",
        SWITCH,
        shown="on",
    )
    max_depth: int = setting(
        MAX_DEPTH,
        "limits the depth of text that may be grafted: 0 is exact KV, 1 was computed over grafts "
        "of exact KV. Deeper text is computed again and reported as `too_deep_tokens`",
        "you want KV close to exact; long sessions cost more ([figures](results/endless.md))",
        at_least(0),
        shown="no limit",
    )
    require_clean_context: bool = setting(
        False,
        "grafts only text that stood at the beginning of its prompt, so its KV holds no other "
        "text. Pinned text qualifies",
        "users of one API key do not trust each other",
        SWITCH,
        shown="off",
    )
    watermark: float = setting(
        0.9,
        "sets the share of used blocks above which a tenant that needs room unpins its own blocks",
        "pinned blocks must give way earlier or later",
        POSITIVE_SHARE,
    )
    pin_capacity: float = setting(
        0.5,
        "limits pinned blocks to this share of the pool",
        "the pinned corpus is larger",
        POSITIVE_SHARE,
    )
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
    costs: str = setting(
        MEASURED,
        "sets the costs that decide what to graft: `measured` (seconds of this model on this "
        "machine, at the start), `tokens`, or a file of "
        "[`kvgraft profile-costs`](evaluation.md#costs)",
        "you want the same decisions at every start",
        COSTS,
        shown="`measured`",
    )
    exactness_weight: float = setting(
        EXACTNESS_WEIGHT,
        "says how strongly to prefer exact KV, from 0 to 1. Text behind a graft is approximate, so "
        "a graft must save more than this share of the cost of computing that text",
        "0: graft whenever the first token comes earlier",
        SHARE,
    )
    document_gib: float = setting(
        2.0,
        "sets the host memory of a worker, in GiB, for [documents that are kept in "
        "part](policies.md#many-documents-of-which-a-part-is-kept) (`condense`, `samkv`)",
        "the documents do not fit",
        AMOUNT,
    )
    idle_refresh: float = setting(
        0.0,
        "when the server has been idle for 0.5 s, recomputes popular approximate blocks exactly, "
        "most used first. Value: tokens, at most this share of the prompt tokens of requests. A "
        "new request aborts it and waits for one step of 512 tokens at most",
        "documents return in another order, and the server has idle time "
        "([figures](results/conversations.md#reading-anew-between-turns))",
        SHARE,
        shown="0: off",
    )
    guard: float = setting(
        0.0,
        "sets the share of answers on approximate KV that the [guard](guard.md) scores again with "
        "exact KV, when nothing waits",
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
