"""Options of `Engine`. This module does not import PyTorch, so that commands show them at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.core.costs import Costs
from kvgraft.core.options import LAYERS, METHOD, AttentionFields, ReuseFields, StoreFields
from kvgraft.core.segmentation import Similarity
from kvgraft.setting_schema import (
    POSITIVE,
    SWITCH,
    TEXT,
    ValueType,
    at_least,
    check_declared,
    list_of,
    same_as,
    setting,
)

if TYPE_CHECKING:
    from kvgraft.decode.flow import Flow
    from kvgraft.kv.heads import HeadMap
    from kvgraft.prefill.context import Policy
    from kvgraft.store import StoreOptions


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ReuseFields, AttentionFields):
    """The keywords of `Engine`, each with its declaration (`setting`).

    Raises:
        ValueError: an option is outside its range.
    """

    policy: "str | Policy | None" = same_as(ReuseFields, "policy")
    head_map: "str | Path | HeadMap | None" = same_as(ReuseFields, "head_map")
    match: str | Similarity | None = same_as(ReuseFields, "match")
    costs: str | Path | Costs | None = same_as(
        ReuseFields, "costs", default=None, words_of_default="none: graft all known text"
    )
    flow: "str | Flow | None" = same_as(AttentionFields, "flow")
    policies: "Sequence[str | Policy]" = setting(
        (),
        "names other policies that requests may use. The engine prepares what they need (`match`, "
        "`residual_layers`) from the start",
        "requests name `similar`, or a policy with residual layers",
        list_of(METHOD, "a list of policies"),
        shown="none",
    )
    dtype: str | None = setting(
        None,
        "type of weights and KV: `float32`, `bfloat16`, `float16`, or as stored",
        "you want the precision of float32, or the speed of 16 bits",
        TEXT,
        shown="as stored",
    )
    device: str = setting(
        "cpu", "torch device, such as `cpu` or `cuda`", "you have a GPU", TEXT, shown="`cpu`"
    )
    block_size: int = setting(16, "tokens in a block, the unit of matching", "-", at_least(1))
    kv_gib: float = setting(
        2.0,
        "memory of the KV pool, GiB. The pool never takes more than eight prompts of the full "
        "length need",
        "prompts are refused, or known text is lost too early",
        POSITIVE,
    )
    num_pages: int | None = setting(
        None, "blocks in the KV pool", "you want an exact number", at_least(1), shown="by `kv_gib`"
    )
    max_length: int | None = setting(
        None,
        "tokens of a prompt and its answer together, from 2 on",
        "the pool must be smaller",
        at_least(2),
        shown="the limit of the model",
    )
    max_prefill_tokens: int = setting(
        8192,
        "prompt tokens that one step may compute. A longer prompt is computed in chunks of this "
        "size",
        "the memory of a step is too large",
        at_least(1),
    )
    anchors: Sequence[str] = setting(
        (),
        "strings that begin a segment wherever they occur in a text prompt, such as "
        "`\\nThought:`. Segments are tokenised on their own, so that their token ids never "
        "depend on their neighbours",
        "prompts come as one text with repeated parts",
        list_of(TEXT, "a list of strings"),
        shown="none",
    )
    pad_segments: bool = setting(
        False,
        "pads explicit segments to block borders with the tokenizer's pad token (SparseX 4.5)",
        "to compare",
        SWITCH,
        shown="off",
    )
    store: "StoreOptions | None" = setting(
        None,
        "adds tiers below the KV pool, in host memory and on disk: [the segment store](store.md). "
        "Use the engine as a context manager, or `close` it, so that all blocks are written",
        "text must outlast the pool or the process",
        ValueType("StoreOptions", lambda value: isinstance(value, StoreFields)),
        shown="none",
    )
    stable_layers: Sequence[int] | None = setting(
        None,
        "names the layers that agree on what is important, for `condense` and `samkv` (SamKV, "
        "Appendix A.2)",
        "to compare",
        LAYERS,
        shown="`layers.json` in the model directory (`kvgraft profile-layers`), or the last eighth",
    )
    enforce_eager: bool = setting(
        False,
        "on CUDA, launches every operation of a decode step by itself. Otherwise steps are "
        "captured in CUDA graphs, which take memory of their own",
        "to find where an error comes from, or to save that memory",
        SWITCH,
        shown="off",
    )
    poison_dropped_pages: bool = setting(
        False, "fills dead pages with NaN", "in tests", SWITCH, shown="off"
    )

    def __post_init__(self) -> None:
        check_declared(self)
