"""KVGraft's flags of `kvgraft serve`, in addition to vLLM's. This module does not import vLLM."""

from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable
from typing import Any

# of the attributes that hold KVGraft's flags after parsing
PREFIX = "kvgraft_"
SHARE = "--kvgraft-share"


def _kinds(text: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(text.split(","))


# flags with one value: name, type, help text
FLAGS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    (
        "head-map",
        str,
        "What `kvgraft profile-heads` has written, for redknot; by default beside the weights.",
    ),
    ("max-depth", int, "Of sources: 0 is exact, d + 1 follows grafts of depth d."),
    (
        "costs",
        str,
        "By which it is decided what to graft: measured (at the start), tokens, or a file of them.",
    ),
    ("exactness-weight", float, "How strongly to prefer exact KV, from 0 to 1."),
    ("watermark", float, "Share of used blocks above which pinned ones are shed."),
    ("pin-capacity", float, "Share of the pool that pinned blocks may take."),
    ("pin-quota", float, "Share of that which one tenant may take."),
    ("document-gib", float, "Host memory for documents kept in part (condense)."),
    (
        "idle-refresh",
        float,
        "When no request has run for half a second, compute popular approximate blocks exactly: at "
        "most this share "
        "of the prompt tokens of requests; 0: never.",
    ),
    (
        "mode",
        str,
        "live, or shadow: graft nothing, and say in reports and metrics what would have been.",
    ),
    ("guard", float, "Share of the answers on approximate KV that are scored again with exact KV."),
    (
        "guard-target",
        str,
        "flips=0.01 or kl=0.05: a policy whose answers are worse gets a larger budget, then exact "
        "KV.",
    ),
    ("guard-tokens", int, "That may be computed a minute to score answers."),
    (
        "exact-for",
        _kinds,
        "Kinds of requests that always get exact KV: tools, json, or both with a comma.",
    ),
    ("store-dir", str, "Directory for exact blocks, which outlasts the server."),
    ("store-ram-gib", float, "Host memory for exact blocks that vLLM reclaims."),
    ("store-disk-gib", float, "Size of the store's directory."),
    ("store-quota", float, "Share of the store that one namespace may take."),
    (
        "store-shared",
        str,
        "Place that machines share: redis://HOST:6379/0, valkey://, s3://BUCKET/PATH, file:///DIR; "
        "it needs "
        "KVGRAFT_CACHE_SECRET, the same for all of them.",
    ),
    ("store-shared-timeout", float, "Seconds for which a prompt waits for it."),
    ("store-shared-gib", float, "Size of a shared directory."),
)
# flags without a value: name, help text
SWITCHES = (
    (
        "require-clean-context",
        "Graft only text that stood at the beginning of what it was read in, as pinned text does.",
    ),
    ("store-int8", "Store keys and values as int8."),
    ("head-paging", "Keep only sinks and windows of the heads that the head map calls local."),
    (
        "allow-untested",
        "Start, with a warning, on a vLLM that is newer than those that are supported.",
    ),
)


def add_flags(parser: ArgumentParser) -> None:
    """Add all flags of KVGraft to a parser.

    A flag that was not given is None, because the defaults are those of `KVGraftSettings`.
    """
    group = parser.add_argument_group("KVGraft", "Reuse of known text at any position.")
    group.add_argument(
        "--check",
        action="store_true",
        help="Load nothing: check the configuration, print what will be used, and end.",
    )
    group.add_argument("--json", action="store_true", help="With --check: print it as JSON.")
    group.add_argument(
        "--kvgraft-policy",
        help="Of requests that name none: spread (default), sparsex:recompute_share=0.2",
    )
    group.add_argument(
        "--kvgraft-profile",
        help="Instead: what `kvgraft calibrate` has written, by default beside the weights.",
    )
    group.add_argument(
        "--kvgraft-match",
        help="exact, or similar[:tau=0.7,...]: find text that is known but for edits.",
    )
    group.add_argument(
        "--kvgraft-residual-layers",
        type=int,
        nargs="+",
        help=(
            "Layers of which the residual stream that enters them is kept, for requests with the "
            "policy similar."
        ),
    )
    for flag, kind, text in FLAGS:
        group.add_argument(f"--kvgraft-{flag}", type=kind, help=text)
    _add_switches(group)
    _add_owners(group)
    group.add_argument(
        "--flow",
        "--kvgraft-flow",
        dest="kvgraft_flow",
        help="Decode steps attend to the blocks that this flow chooses: quest, "
        "quest:topk_blocks=64, my_flow.py,... Flows that keep state need --no-kvgraft and "
        "--no-enable-prefix-caching.",
    )
    group.add_argument(
        "--kvgraft-engine-timeout",
        type=_seconds,
        metavar="SECONDS",
        help=(
            "Without an answer of the engine after which /health says 503; 0: never. Default: 120, "
            "on CPUs 330."
        ),
    )
    group.add_argument(
        "--no-kvgraft",
        action="store_true",
        help="Plain vLLM with the same defaults, for comparisons.",
    )


def _seconds(text: str) -> float:
    """Return a number of seconds, 0 or more, from the text of a flag."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"must be a number of seconds, at least 0, got {text}")
    return seconds


def _add_switches(group: Any) -> None:
    """Add the flags that take no value."""
    group.add_argument(
        "--kvgraft-continuation",
        action=BooleanOptionalAction,
        default=None,
        help=(
            "Let the next turn of a conversation go on with the KV of the last one, grafts and all."
        ),
    )
    for flag, text in SWITCHES:
        group.add_argument(f"--kvgraft-{flag}", action="store_true", default=None, help=text)


def _add_owners(group: Any) -> None:
    """Add the flags about tenants: the admin key, shared namespaces and single-tenant servers."""
    group.add_argument(
        "--kvgraft-admin-key", help="For the segments API; rather set KVGRAFT_ADMIN_KEY."
    )
    group.add_argument(
        SHARE,
        action="append",
        metavar="NAME=KEY,KEY",
        help=(
            "Let these API keys (or their labels; *: all) graft from a namespace that the admin "
            "fills; repeatable."
        ),
    )
    group.add_argument(
        "--kvgraft-single-tenant",
        action="store_true",
        help="All who reach the server belong together.",
    )
