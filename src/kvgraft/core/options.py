"""Options that several surfaces have, declared once: flags of a server, keywords of `Engine`,
`StoreOptions`.

This module imports neither vLLM nor PyTorch, so that wrong flags are refused at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraft.core import EXACTNESS_WEIGHT
from kvgraft.core.costs import MEASURED
from kvgraft.core.matches import MAX_DEPTH
from kvgraft.setting_schema import (
    AMOUNT,
    PATH,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    SWITCH,
    TEXT,
    URL,
    ValueType,
    at_least,
    list_of,
    one_of,
    or_object,
    setting,
)

MATCH = one_of("exact", "similar")
LAYERS = list_of(at_least(0), "a list of layers")
METHOD = or_object(ValueType("a name or name:option=value,...", TEXT.test))


@dataclass(frozen=True)
class StoreFields:
    """The fields of `StoreOptions`, each with its declaration (`setting`)."""

    directory: Path | str | None = setting(
        None,
        "directory on disk; each rank has its own part of it",
        "to keep text over restarts",
        PATH,
        shown="none",
    )
    ram_gib: float = setting(
        1.0,
        "host memory of each worker, GiB",
        "to keep more text than the pool holds",
        AMOUNT,
    )
    disk_gib: float = setting(
        16.0,
        "size of the directory for each worker, GiB",
        "to the disk",
        POSITIVE,
    )
    quota: float = setting(
        1.0,
        "share of the store that one namespace may take, above 0 up to 1. In any case the "
        "namespace that holds most is evicted first",
        "so that no tenant evicts all others",
        POSITIVE_SHARE,
    )
    int8: bool = setting(
        False,
        "store keys and values as int8, in a quarter to a half of the bytes. They return as "
        "sources of grafts only, never as exact prefix blocks",
        "if room is short",
        SWITCH,
        shown="off",
    )
    shared_url: str | None = setting(
        None,
        "URL of the shared tier: `redis://HOST:6379/0`, `rediss://`, `valkey://`, "
        "`unix:///SOCKET`, `s3://BUCKET/PATH`, `file:///DIR`",
        "several machines",
        URL,
        shown="none",
    )
    shared_timeout_s: float = setting(
        0.5,
        "longest time that a prompt waits for the shared tier, s",
        "raise it for long prompts of large models",
        POSITIVE,
    )
    shared_gib: float | None = setting(
        None,
        "size of a shared directory for each rank, GiB (not for Redis)",
        "to the file system",
        POSITIVE,
        shown="64",
    )


@dataclass(frozen=True, kw_only=True)
class ReuseFields:
    """Options of reuse that a server and `Engine` have, each with its declaration (`setting`).

    None stands for what a declaration shows as the default.
    """

    policy: Any = setting(
        None,
        "sets the [policy](policies.md) of requests that name none: `naive`, "
        "`sparsex:boundary_layers=2,recompute_share=0.2`, ...",
        "another one is better on your texts",
        METHOD,
        shown="`spread`",
    )
    profile: str | Path | None = setting(
        None,
        "takes the policy from a file that [`kvgraft calibrate`](calibration.md) wrote. A profile "
        "of another checkpoint is refused",
        "it is elsewhere",
        PATH,
        shown="`policy.json` in the model directory, if no policy is given",
    )
    head_map: Any = setting(
        None,
        "names the head map of `kvgraft profile-heads`, for [`redknot`](serving.md#redknot) and "
        "for head paging",
        "it is elsewhere",
        or_object(PATH),
        shown="`heads.json` in the model directory, if it fits",
    )
    match: Any = setting(
        None,
        "`exact`: reuse identical text only. `similar` or `similar:tau=0.5,...`: also find edited "
        "text ([near-duplicates](policies.md#near-duplicates))",
        "documents are edited between requests",
        METHOD,
        shown="the policy's: `exact`, but `similar` for `similar`",
    )
    residual_layers: Sequence[int] = setting(
        (),
        "keeps the residual stream of these layers, for requests with the policy `similar`. vLLM: "
        "eager mode only",
        "requests name another policy",
        LAYERS,
        shown="the layers that the default policy needs",
    )
    continuation: bool = setting(
        True,
        "lets the next turn of a conversation continue with the KV of the last turn, grafts "
        "included. Nothing is copied; what the new question needs is recovered in place "
        "([conversations](results/conversations.md))",
        "later turns must not follow approximate KV",
        SWITCH,
        shown="on",
    )
    max_depth: int = setting(
        MAX_DEPTH,
        "limits the depth of the sources of grafts: 0 grafts exact KV only (such answers have "
        "depth 1), 1 also KV that was computed over grafts of exact KV. Deeper text is computed "
        "again and reported as `too_deep_tokens`",
        "you want KV close to exact; long sessions cost more ([figures](results/endless.md))",
        at_least(0),
        shown="no limit",
    )
    require_clean_context: bool = setting(
        False,
        "grafts only text that stood at the beginning of its prompt, so its KV holds no other "
        "text. Pinned text qualifies",
        "users of one API key or namespace do not trust each other",
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
    costs: Any = setting(
        MEASURED,
        "sets the costs that decide what to graft: `measured` (seconds of this model on this "
        "machine, at the start), `tokens`, or a file of "
        "[`kvgraft profile-costs`](evaluation.md#costs)",
        "you want the same decisions at every start",
        or_object(ValueType("measured, tokens or a file", PATH.test)),
        shown="`measured`",
    )
    exactness_weight: float = setting(
        EXACTNESS_WEIGHT,
        "says how strongly to prefer exact KV, from 0 to 1. A graft makes all text behind it "
        "approximate; it is made only if it saves more than this share of the cost of computing "
        "that text",
        "0: graft whenever the first token comes earlier",
        SHARE,
    )
    document_gib: float = setting(
        2.0,
        "sets the host memory of each process, in GiB, for [documents that are kept in "
        "part](policies.md#many-documents-of-which-a-part-is-kept) (`condense`, `samkv`)",
        "the documents do not fit",
        AMOUNT,
    )


@dataclass(frozen=True, kw_only=True)
class AttentionFields:
    """Options of attention that a server and `Engine` have, each with its declaration."""

    head_paging: bool = setting(
        False,
        "keeps only sinks and windows of local heads ([per-head KV "
        "eviction](serving.md#per-head-kv-eviction))",
        "more sessions must fit",
        SWITCH,
        shown="off",
    )
    flow: Any = setting(
        None,
        "decode steps attend to the blocks that this [flow](flows.md) chooses: "
        "`quest:topk_blocks=64`, `my_flow.py`",
        "contexts are long; [measure it](results/flows.md) first",
        METHOD,
        shown="dense attention",
    )
