"""Rows of a recovery in chunks, long runs first, and how much of a prompt our kernel reads for the
others."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.kernels.layout import AttentionLayout
from kvgraft.vllm.chunks import PrefillChunk, cut, long_first, runs_of
from properties import examples

# of a token and layer of an 8B model, which has 32 query heads
KV_BYTES = 2 * 8 * 128 * torch.bfloat16.itemsize
TILE = 64 // 4  # rows that read keys and values together


def rows_of(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(prompt, at) for prompt, first, stop in runs for at in range(first, stop)]


def drawn() -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Runs of some prompts, with gaps between them."""
    prompt = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=6)

    def runs(prompts: list[list[tuple[int, int]]]) -> list[tuple[int, int, int]]:
        found = []
        for number, pieces in enumerate(prompts):
            at = 0
            for gap, size in pieces:
                found.append((number, at + gap, at + gap + size))
                at += gap + size
        return found

    return st.lists(prompt, min_size=1, max_size=3).map(runs)


@examples(200)
@given(runs=drawn(), max_rows=st.integers(1, 20), max_runs=st.one_of(st.none(), st.integers(1, 4)))
def test_chunks_hold_all_rows_in_order(
    runs: list[tuple[int, int, int]], max_rows: int, max_runs: int | None
):
    prompts, positions = map(np.array, zip(*rows_of(runs), strict=True))
    assert runs_of(prompts, positions) == runs
    chunks = cut(runs, max_rows, max_runs)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows_of(runs)
    assert all(1 <= len(rows_of(chunk)) <= max_rows for chunk in chunks)
    assert all(len(chunk) <= (max_runs or len(chunk)) for chunk in chunks)
    if max_runs is None:
        assert len(chunks) == -(-len(positions) // max_rows)


@examples(200)
@given(runs=drawn(), least=st.integers(1, 12), most=st.one_of(st.none(), st.integers(1, 3)))
def test_long_runs_come_first(runs: list[tuple[int, int, int]], least: int, most: int | None):
    ordered, count, rows = long_first(runs, least, most)
    sizes = [stop - first for _, first, stop in runs]
    assert [rows_of(runs)[row] for row in rows.tolist()] == rows_of(ordered)
    assert ordered[:count] == sorted(ordered[:count])
    assert ordered[count:] == sorted(ordered[count:])
    longest = sorted((size for size in sizes if size >= least), reverse=True)[:most]
    assert sorted((stop - first for _, first, stop in ordered[:count]), reverse=True) == longest


def test_nothing_to_compute_is_one_chunk():
    assert cut([], 8, 2) == [[]]
    assert long_first([], 8, 2)[:2] == ([], 0)


def test_rows_are_taken_and_put_back():
    runs, count, order = long_first([(0, 3, 5), (0, 9, 14), (1, 0, 1)], 4, None)
    chunk = PrefillChunk(slice(2, 10), order, order[None], order, runs, count, order)
    rows = torch.arange(12.0)[:, None]
    taken = chunk.taken_from(rows)
    assert taken[:, 0].tolist() == [4, 5, 6, 7, 8, 2, 3, 9]
    again = torch.zeros_like(rows)
    chunk.put_into(again, taken)
    assert torch.equal(again[2:10], rows[2:10])
    assert not again[:2].any()
    chunk.known_positions = torch.tensor([9, 10, 11, 12, 13, 3, 4, 0])
    prompts, positions = chunk.scattered()
    assert prompts == [0, 1]
    assert [at.tolist() for at in positions] == [[3, 4], [0]]


@pytest.mark.parametrize("together", [1, 12])
def test_keys_and_values_that_rows_of_a_long_prompt_read(together: int):
    """32K tokens, a tenth of them new, before and behind the known ones, where 1160 are recomputed:
    single ones, or twelve together."""
    length, new, count = 32768, 1640, 1160
    starts = np.random.default_rng(0).choice(
        np.arange(new, length - new, 24), count // together, replace=False
    )
    found = np.sort(np.ravel(starts[:, None] + np.arange(together)))
    at = np.concatenate([np.arange(new), found, np.arange(length - new, length)])
    runs, num_long, order = long_first(runs_of(np.zeros_like(at), at), 64, None)
    assert num_long == 2
    scattered = torch.from_numpy(at)[order][2 * new :]
    layout = AttentionLayout.of([scattered], [torch.arange(length)[None]])
    tiles = layout.query_tiles(TILE)
    last = tiles[:, 1] + tiles[:, 2] - 1
    read, needed = int((scattered[last] + 1).sum()), float((scattered + 1).sum()) / TILE
    by_run = sum(stop for _, _, stop in runs[num_long:])
    assert read < 1.05 * needed
    assert by_run == pytest.approx(read * TILE / together, rel=0.05)
    assert KV_BYTES * read < 5.3e9
