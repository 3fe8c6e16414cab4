"""Flags of `kvgraft serve` that have one value; each is a setting."""

from collections.abc import Callable
from typing import Any


def _kinds(text: str) -> tuple[str, ...]:
    """By commas."""
    return tuple(text.split(","))


FLAGS: tuple[tuple[str, Callable[[str], Any], str], ...] = (  # name, type, help
    ("head-map", str, "What `kvgraft profile-heads` has written, for redknot; by default beside the weights."),
    ("max-depth", int, "Of sources: 0 is exact, d + 1 follows grafts of depth d; no limit by default."),
    ("costs", str, "By which it is decided what to graft: measured (at the start), tokens, or a file of them."),
    ("exact-value", float, "What exact KV is worth, as a share of what computing it costs."),
    ("watermark", float, "Share of used blocks above which frozen ones are shed."),
    ("frozen-capacity", float, "Share of the pool that frozen blocks may take."),
    ("frozen-quota", float, "Share of that which one tenant may take."),
    ("document-gib", float, "Host memory for documents kept in part (condense)."),
    (
        "refresh",
        float,
        "Read popular text exactly that is known only approximately while no request runs, at most so many tokens as "
        "this share of what requests have brought; 0: none.",
    ),
    ("mode", str, "live, or discover: graft nothing, and say in reports and metrics what would have been."),
    ("guard", float, "Share of the answers on approximate KV that are scored again with exact KV."),
    (
        "guard-target",
        str,
        "flips=0.01 or kl=0.05: a policy whose answers are worse gets a larger budget, then exact KV.",
    ),
    ("guard-tokens", int, "That may be computed a minute to score answers."),
    ("exact-for", _kinds, "Kinds of requests that always get exact KV: tools, json, or both with a comma."),
    ("store-dir", str, "Directory for exact blocks, which outlasts the server."),
    ("store-ram-gib", float, "Host memory for exact blocks that vLLM reclaims."),
    ("store-disk-gib", float, "Size of the store's directory."),
    ("store-quota", float, "Share of the store that one namespace may take."),
    (
        "store-shared",
        str,
        "Place that machines share: redis://HOST:6379/0, valkey://, s3://BUCKET/PATH, file:///DIR; it needs "
        "KVGRAFT_CACHE_SECRET, the same for all of them.",
    ),
    ("store-shared-timeout", float, "Seconds for which a prompt waits for it."),
    ("store-shared-gib", float, "Size of a shared directory."),
)
