"""Stages of a decode step, while somebody watches and while nobody does."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from devices import DEVICE
from kvgraft.kernels.dispatch import block_sparse_attention, radix_topk
from kvgraft.kernels.watched import watched, watching


@contextmanager
def noting(found: list[str], stage: str) -> Iterator[None]:
    found.append(stage)
    try:
        yield
    finally:
        found.append(f"end of {stage}")


def test_a_watcher_is_entered_around_stages_and_what_they_call():
    @watched("outer")
    def outer(count: int) -> list[int]:
        return radix_topk(
            torch.arange(4.0, device=DEVICE)[None], torch.tensor([4], device=DEVICE), count
        )[0].tolist()

    found: list[str] = []
    with watching(lambda stage: noting(found, stage)):
        assert outer(1) == [3]
    assert found == ["outer", "top-k", "end of top-k", "end of outer"]
    assert outer(count=1) == [3]
    assert len(found) == 4


def test_a_stage_that_fails_is_left_and_so_is_the_watcher():
    found: list[str] = []
    with pytest.raises(ValueError, match="k must be"), watching(lambda stage: noting(found, stage)):
        radix_topk(torch.zeros(1, 1), torch.ones(1), 0)
    assert found == ["top-k", "end of top-k"]
    query, pages = torch.zeros(1, 1, 16, device=DEVICE), torch.zeros(1, 2, 16, device=DEVICE)
    table, length = torch.zeros(1, 1, device=DEVICE).long(), torch.ones(1, device=DEVICE).long()
    block_sparse_attention(query, pages, pages, table, length, 1.0)
    assert len(found) == 2
