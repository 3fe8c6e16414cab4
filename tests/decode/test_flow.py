"""What a flow may say, and where it is told that it may not."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvgraft.decode.flow import Caches, Flow, Selection, trace
from kvgraft.decode.graph import FlowError, Value
from kvgraft.decode.ops import (
    CFill,
    GeMM,
    Load,
    Max,
    Mean,
    Multiply,
    Reshape,
    Save,
    Softmax,
    Sum,
    Union,
    WhereGt,
    topK,
)  # fmt: skip
from kvgraft.decode.planner import Template, plan, unfused
from kvgraft.decode.vtensor import NumBlocks
from kvgraft.flows.block_topk import BlockTopK


@dataclass(frozen=True)
class Written(Flow):
    """A flow of two functions."""

    name: ClassVar[str] = "written"
    cache: Callable[[Caches], Any] = lambda c: c.__setitem__("centroids", Mean(c["k"], 2))
    index: Callable[[Value, Caches], Any] = lambda q, c: topK(Max(GeMM(c["centroids"], q.T), 2), 4)

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"centroids": (head_dim,)}

    def forward_cache(self, c: Caches) -> None:
        self.cache(c)

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        return self.index(q, c)  # type: ignore[no-any-return]


def test_a_flow_is_traced():
    program = trace(BlockTopK(topk_blocks=5), 16, 64, 4)
    assert program.caches == {"centroids": (64,)}
    assert [value.operator.name for value in program.cache] == ["Mean"]  # type: ignore[union-attr]
    assert [value.operator.name for value in program.indexer] == [
        "Transpose",
        "GeMM",
        "Max",
        "topK",
    ]  # type: ignore[union-attr]
    assert program.indexer[1].shape == (1, NumBlocks(), 4)
    assert not program.saved


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            lambda q, c: GeMM(c["centroids"], q),
            "GeMM: [1, B, 64] and [1, 4, 64]: the last axis of one must be",
        ),
        (
            lambda q, c: Max(GeMM(c["centroids"], q.T), 3),
            "Max: dim must be from 1 to 2 for [1, B, 4], got 3",
        ),
        (
            lambda q, c: topK(GeMM(c["centroids"], q.T), 4),
            "topK: [1, B, 4] has not one score for each block",
        ),
        (
            lambda q, c: topK(Max(c["centroids"], 2), 2.5),
            "topK: k must be an integer of at least 1, got 2.5",
        ),
        (
            lambda q, c: Max(GeMM(c["centroids"], q.T), 2),
            "must end in a selection (topK, approxTopK, Union)",
        ),
        (
            lambda q, c: Multiply(topK(Max(c["centroids"], 2), 2), 2.0),
            "Multiply cannot work on a selection",
        ),
        (lambda q, c: Union(q, q), "Union: [1, 4, 64] and [1, 4, 64] are not both selections"),
        (
            lambda q, c: Multiply(c["centroids"], c["k"]),
            "Multiply: shapes [1, B, 64] and [1, B, 16, 64] do not fit",
        ),
        (
            lambda q, c: GeMM(c["centroids"], Reshape(c["centroids"], (1, 64, c["k"].shape[1]))),
            "B where it was",
        ),
        (
            lambda q, c: Reshape(GeMM(q, c["centroids"].T), (1, 2, c["k"].shape[1], 2)),
            "B where it was",
        ),
        (
            lambda q, c: CFill(c["centroids"]),
            "CFill may stand in forward_cache only, not in forward_indexer",
        ),
        (lambda q, c: c["means"], "there is no cache 'means': choose from k, v, centroids"),
        (
            lambda q, c: c.__setitem__("centroids", q),
            "forward_indexer cannot assign to the cache 'centroids': use Save",
        ),
        (
            lambda q, c: Save(c["centroids"], q),
            "Save: [1, 4, 64] cannot be left in a cache of [1, B, 64]",
        ),
        (
            lambda q, c: Save(Max(c["centroids"], 2), Max(c["centroids"], 2)),
            "Save works on a cache of the flow's own",
        ),
        (lambda q, c: Load(c["k"]), "Load works on a cache of the flow's own, and on nothing else"),
        (
            lambda q, c: "all",
            "must return a selection (topK, approxTopK, Union) or a list of blocks, got 'all'",
        ),
    ],
)
def test_errors_name_the_line_of_the_indexer(index: Callable[..., Any], message: str):
    with pytest.raises(FlowError) as caught:
        trace(Written(index=index), 16, 64, 4)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (lambda c: None, "forward_cache assigns nothing to the cache 'centroids'"),
        (
            lambda c: c.__setitem__("k", Mean(c["k"], 2)),
            "'k' is the model's: a flow cannot assign to it",
        ),
        (
            lambda c: c.__setitem__("centroids", Mean(c["k"], 3)),
            "declared as [1, B, 64], not [1, B, 16, 1]",
        ),
        (lambda c: c.__setitem__("centroids", 3), "declared as [1, B, 64], not 3"),
        (
            lambda c: Mean(c["k"], 1),
            "Mean: forward_cache sees one block at a time: this looks across blocks",
        ),
        (lambda c: Sum(c["k"], 2), "Sum may stand in forward_indexer only, not in forward_cache"),
        (lambda c: Softmax(c["k"], 2), "Softmax may stand in forward_indexer only"),
        (lambda c: Load(c["centroids"]), "Load may stand in forward_indexer only"),
        (lambda c: topK(c["k"], 3), "topK may stand in forward_indexer only"),
    ],
)
def test_errors_name_the_line_of_the_cache_stage(cache: Callable[..., Any], message: str):
    with pytest.raises(FlowError) as caught:
        trace(Written(cache=cache), 16, 64, 4)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{__file__}:")
    assert re.search(r"\n    \(?lambda c:", str(caught.value)) or "forward_cache assigns" in message


def test_a_value_cannot_leave_its_flow():
    program = trace(BlockTopK(), 16, 64, 4)
    with pytest.raises(FlowError, match="Max is applied to a value of a flow outside of that flow"):
        Max(program.indexer[1], 2)


def test_operators_of_one_template_are_fused():
    def index(q: Value, c: Caches) -> Selection:
        score = Max(GeMM(c["centroids"], Mean(q, 1).T), 2)
        sharp = WhereGt(score, Mean(score, 1), score, float("-inf"))
        return topK(Multiply(sharp, Softmax(score, 1)), 4)

    program = trace(Written(index=index), 16, 64, 4)
    groups = plan(program)
    names = [(group.template, [value.operator.name for value in group.values]) for group in groups]  # type: ignore[union-attr]
    assert names == [
        (Template.QUERY, ["Mean", "Transpose"]),
        (Template.CHUNK, ["GeMM", "Max"]),
        (Template.SPECIAL, ["Mean"]),
        (Template.CHUNK, ["WhereGt"]),
        (Template.SPECIAL, ["Softmax"]),
        (Template.CHUNK, ["Multiply"]),
        (Template.SPECIAL, ["topK"]),
    ]
    made = set()
    for group in groups:
        assert all(given in made or given.operator is None for given in group.inputs)
        made |= set(group.values)
    assert len(groups) < len(unfused(program)) == len(program.indexer)
    moved = [
        sum(group.bytes_moved(1000) for group in groups) for groups in (groups, unfused(program))
    ]
    assert moved[0] < moved[1]
