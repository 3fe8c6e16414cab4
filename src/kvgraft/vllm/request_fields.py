"""The options of a request, declared once: defaults, checks and docs follow from this."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgraft.core.options import MATCH
from kvgraft.setting_schema import (
    TEXT,
    ValueType,
    at_least,
    check_declared,
    list_of,
    one_of,
    setting,
)

QUALITIES = ("exact", "guarded", "fast")
GUARDED = "guarded"
# maximum characters in the name of a namespace or document
MAX_NAME = 128


def _is_printable(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable()


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(NAME.test, value)) and len({*value}) == len(value)


NAMESPACE = ValueType(f"a printable string of at most {MAX_NAME} characters", _is_printable)
NAME = ValueType(
    f"a printable string of 1 to {MAX_NAME} characters",
    lambda value: _is_printable(value) and value != "",
)
_TOKENS = list_of(at_least(0), "a list of token ids")


@dataclass(frozen=True, kw_only=True)
class RequestFields:
    """What a request may set besides options of policies, each with its declaration (`setting`).

    Raises:
        ValueError: a value is not allowed; the message names the field.
    """

    policy: str | None = setting(
        None,
        "sets how this prompt is recovered. Options without a policy change options of the "
        "server's policy",
        "one kind of request needs another policy",
        TEXT,
        shown="the server's",
    )
    reuse: str = setting(
        "auto",
        "`auto`; `exact` takes exact prefix hits only, as plain vLLM does; `off` means the same",
        "the answer must not be approximate",
        one_of("auto", "exact", "off"),
        shown="`auto`",
    )
    quality: str = setting(
        GUARDED,
        '`exact`: as `"reuse": "exact"`. `guarded`: the [guard](guard.md) may give more exact KV. '
        "`fast`: it may not",
        "some answers matter more, or less",
        one_of(*QUALITIES),
        shown=f"`{GUARDED}`",
    )
    match: str | None = setting(
        None,
        "`exact`: reuse identical text only, on a server with `--kvgraft-match similar`",
        "edited text must not be reused",
        MATCH,
        shown="the server's",
    )
    namespace: str = setting(
        "",
        f"narrows the caller's own namespace, at most {MAX_NAME} characters",
        "users of one key must not share text",
        NAMESPACE,
        shown="none",
    )
    shared: Sequence[str] | None = setting(
        None,
        "lists the granted [shared namespaces](#shared-namespaces) to graft from, in this order; "
        "`[]`: none",
        "this prompt needs no text of others",
        ValueType(f"a list of distinct names of 1 to {MAX_NAME} printable characters", _are_names),
        shown="all that are granted",
    )
    forced_output: Sequence[int] | None = setting(
        None,
        "lists token ids, at most `max_tokens`, that the answer begins with. `logprobs` stay the "
        "model's own, over KV that the policy chose by the prompt alone. Not with drafted tokens, "
        "structured outputs or thinking budgets",
        "you [measure](evaluation.md#order-noise) how likely a given answer is",
        ValueType(_TOKENS.words, lambda value: _TOKENS.test(value) and len(value) > 0),
        shown="none",
    )

    def __post_init__(self) -> None:
        check_declared(self)
