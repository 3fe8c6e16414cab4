"""Options that several surfaces have, declared once: flags of a server, keywords of `Engine`,
`StoreOptions`.

This module imports neither vLLM nor PyTorch, so that wrong flags are refused at once.
"""

from dataclasses import dataclass
from pathlib import Path

from kvgraft.setting_schema import (
    AMOUNT,
    PATH,
    POSITIVE,
    POSITIVE_SHARE,
    SWITCH,
    URL,
    setting,
)


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
