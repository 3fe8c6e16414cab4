import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from devices import DEVICE
from kvgraft.kernels.dispatch import attention_mass, segpaged_attention
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import LONG_CONTEXT, AttentionLayout
from properties import examples

IMPLEMENTATIONS = ["cpu", *(["triton"] if find_spec("triton") else [])]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
SHAPES = [(1, 1, 32), (8, 2, 64), (6, 3, 80), (4, 4, 16)]  # query heads, key heads, head size
POSITIONS = {
    "from the start": [range(63)],
    "one token": [[0]],
    "long run behind a prefix": [range(100, 700)],
    "scattered": [[0, 3, 4, 5, 90, 91, 200, 311]],
    "long run among scattered": [[2, 5, *range(40, 340), 400, 500]],
    "several prompts": [range(33), [], [7], [1, 2, 9, 128]],
    "decode": [[0], [5], [77], [300], [301]],
}


NUM_SLOTS, SINKS, WINDOW = 4096, 3, 40


def layout_of(kind: str, num_lists: int = 1, in_order: bool = False) -> AttentionLayout:
    """Every list has its own slots of every prompt, shuffled or in one stretch."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(NUM_SLOTS) if in_order else torch.randperm(NUM_SLOTS, generator=generator)
    slots = slots.to(DEVICE)
    positions, tables, used = [], [], 0
    for at in POSITIONS[kind]:
        position = torch.tensor(list(at), dtype=torch.int64)
        length = int(position[-1]) + 1 if position.numel() else 4
        positions.append(position)
        tables.append(slots[used : used + num_lists * length].view(num_lists, length).clone())
        used += num_lists * length
    return AttentionLayout.of(positions, tables, SINKS, WINDOW)


def give_back(layout: AttentionLayout, page_list: int) -> None:
    """Take from a list of every prompt what lies behind the sinks and before the windows of its
    queries."""
    for context in layout.contexts:
        context.slots[page_list, SINKS : max(SINKS, int(context.positions[0]) - WINDOW + 1)] = -1


def filled(
    layout: AttentionLayout,
    heads: LayerHeads,
    size: int,
    dtype: torch.dtype,
    *,
    together: bool = False,
) -> list[torch.Tensor]:
    """Keys and values [streams, slots, d]: NaN wherever no head may look. Together, a key lies next
    to its value, as in vLLM."""
    shape = (max(heads.streams) + 1, NUM_SLOTS, 2 * size)
    rows = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    pools = [part if together else part.contiguous() for part in rows.chunk(2, dim=-1)]
    for context in layout.contexts:
        here, at = torch.arange(context.seen, device=DEVICE), context.device_positions[:, None]
        for stream, page_list, local in zip(
            heads.streams, heads.page_lists, heads.local, strict=True
        ):
            seen = here <= at
            if local:
                seen &= (here < SINKS) | (here > at - WINDOW)
            slots = context.slots[page_list, : context.seen][seen.any(0)]
            for pool in pools:
                pool[stream, slots[slots >= 0]] = torch.randn(int((slots >= 0).sum()), size).to(
                    pool
                )
    return pools


def dense_heads(count: int) -> LayerHeads:
    return LayerHeads(tuple(range(count)), (0,) * count, (False,) * count)


def check(
    layout: AttentionLayout,
    heads: LayerHeads,
    shape: tuple[int, int],
    dtype: torch.dtype,
    name: str,
    *,
    together: bool = False,
) -> tuple[tuple[Any, ...], torch.Tensor]:
    """What the kernel was given, and its result."""
    torch.manual_seed(1)
    query_heads, size = shape
    keys, values = filled(layout, heads, size, dtype, together=together)
    query = torch.randn(layout.query_positions.numel(), query_heads, size).to(keys)
    arguments = (query, keys, values, heads, layout, size**-0.5)
    expected = segpaged_attention(*arguments, implementation="reference")
    actual = segpaged_attention(*arguments, implementation=name)
    assert torch.isfinite(expected).all()
    compare(actual, expected)
    return arguments, actual


def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if actual.dtype is torch.float32:
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    else:
        similar = torch.nn.functional.cosine_similarity(
            actual.float().flatten(1), expected.float().flatten(1)
        )
        assert float(similar.min()) > 0.9999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dense_heads_equal_the_reference_and_read_nothing_else(
    kind: str, shape: tuple[int, int, int], in_order: bool, dtype: torch.dtype, implementation: str
):
    query_heads, key_heads, size = shape
    layout = layout_of(kind, in_order=in_order)
    check(layout, dense_heads(key_heads), (query_heads, size), dtype, implementation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_more_query_heads_than_a_tile_has_rows(dtype: torch.dtype, implementation: str):
    for shape in ((66, 40), (20, 576)):
        check(layout_of("decode"), dense_heads(1), shape, dtype, implementation)


HEADS = {
    "one list a class": LayerHeads((4, 0, 1), (0, 1, 1), (False, True, True)),
    "heads out of order": LayerHeads((2, 7, 1), (0, 2, 0), (False, True, False)),
    "local heads of a common list": LayerHeads((0, 1, 2), (0, 0, 0), (True, False, True)),
    "all local": LayerHeads((0, 0, 0), (0, 1, 2), (True, True, True)),
    # local list, sees all that is left
    "a promoted head": LayerHeads((0, 0, 1), (0, 1, 1), (False, False, True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("together", [False, True])
def test_heads_of_two_classes_equal_masked_dense_attention(
    kind: str, heads: LayerHeads, dtype: torch.dtype, implementation: str, together: bool
):
    layout = layout_of(kind, num_lists=3)
    for page_list in {
        number for number, local in zip(heads.page_lists, heads.local, strict=True) if local
    } - {0}:
        give_back(layout, page_list)
    check(layout, heads, (6, 80), dtype, implementation, together=together)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_of_eight_bits_are_those_that_they_stand_for(
    kind: str, codes: torch.dtype, dtype: torch.dtype, implementation: str
):
    heads = next(iter(HEADS.values()))
    layout = layout_of(kind, max(heads.page_lists) + 1)
    keys, values = (pool.to(codes) for pool in filled(layout, heads, 32, torch.float32))
    query = torch.randn(layout.query_positions.numel(), 2 * len(heads.streams), 32)
    query = query.to(DEVICE, dtype)
    rest = heads, layout, 32**-0.5
    wide = segpaged_attention(
        query, keys.to(dtype), values.to(dtype), *rest, implementation="reference"
    )
    found = segpaged_attention(query, keys, values, *rest, implementation=implementation)
    assert wide.isfinite().all()
    compare(found, wide)


@pytest.mark.parametrize("flash_attends", [False, True])
@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_the_result_goes_where_it_shall(
    implementation: str, flash_attends: bool, request: pytest.FixtureRequest
):
    if flash_attends and implementation == "triton":
        request.getfixturevalue("flash")
    layout = layout_of("long run among scattered")
    arguments, result = check(layout, dense_heads(3), (6, 80), torch.bfloat16, implementation)
    rows = torch.full((len(result) + 2, *result.shape[1:]), 7.0).to(result)
    output = rows[2:]
    assert segpaged_attention(*arguments, output, implementation=implementation) is output
    assert torch.equal(output, result)
    assert (rows[:2] == 7).all()


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flash attention wherever it can be, and the forms in which it has been called."""
    from kvgraft.kernels.triton import attention

    if DEVICE == "cuda":
        attention._has_flash(torch.device(DEVICE))  # which asks once
    called: list[str] = []

    def noted(name: str) -> Callable[..., torch.Tensor]:
        real = getattr(attention, name)
        return lambda *given: called.append(name) or real(*given)

    monkeypatch.setattr(attention, "RUN", 20)
    monkeypatch.setattr(attention, "programs_of", lambda device: 0)
    for name in ("_varlen", "_triangle"):
        monkeypatch.setattr(attention, name, noted(name))
    return called


@needs_triton
@pytest.mark.parametrize(("splits", "triangle"), [(1, 4096), (3, 20)])
@pytest.mark.parametrize("heads", [dense_heads(3), *HEADS.values()], ids=["dense", *HEADS])
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("together", [False, True])
def test_long_runs_go_to_flash_attention(
    kind: str,
    heads: LayerHeads,
    splits: int,
    triangle: int,
    together: bool,
    flash: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Whatever else is in the same call; but not for heads that see a window, nor of a list that
    may have gaps."""
    from kvgraft.kernels.triton import attention

    monkeypatch.setattr(attention, "TRIANGLE", triangle)
    # a join is a program a row
    monkeypatch.setattr(attention, "splits_of", lambda *_: 1 if "long" in kind else splits)
    layout = layout_of(kind, num_lists=3)
    for page_list in {
        number for number, local in zip(heads.page_lists, heads.local, strict=True) if local
    } - {0}:
        give_back(layout, page_list)
    check(layout, heads, (6, 80), torch.bfloat16, "triton", together=together)
    opens = kind in ("from the start", "several prompts")
    expected = (
        {"_triangle" if opens and triangle == 20 else "_varlen"}
        if opens or "run" in kind
        else set()
    )
    whole = {head_set.page_list for head_set in heads.whole}
    assert set(flash) == (expected if whole == {0} else set())


@needs_triton
def test_long_runs_go_to_flash_attention_in_every_list_without_gaps(flash: list[str]):
    """As heads that see everything may have in vLLM, whose groups have block tables of their
    own."""
    layout = replace(layout_of("long run behind a prefix", num_lists=3), complete_lists=2)
    give_back(layout, 2)
    heads = LayerHeads((0, 1, 2), (0, 1, 2), (False, False, True))
    check(layout, heads, (6, 80), torch.bfloat16, "triton", together=True)
    assert flash == ["_varlen"] * 2


@needs_triton
@pytest.mark.parametrize("size", [20, 576])
def test_heads_that_flash_attention_does_not_take_go_to_the_kernel(size: int, flash: list[str]):
    """PyTorch would make the whole matrix of weights for latent attention's heads."""
    check(layout_of("from the start"), dense_heads(1), (4, size), torch.bfloat16, "triton")
    assert not flash


@needs_triton
def test_flash_attention_can_be_turned_off_and_has_to_fill_the_device(
    flash: list[str], monkeypatch: pytest.MonkeyPatch
):
    from kvgraft.kernels.triton import attention

    layout = layout_of("long run behind a prefix")
    # 30 tiles of two heads each
    monkeypatch.setattr(attention, "programs_of", lambda device: 4 * 61)
    check(layout, dense_heads(1), (2, 64), torch.bfloat16, "triton")
    assert not flash
    monkeypatch.setattr(attention, "programs_of", lambda device: 4 * 60)
    check(layout, dense_heads(1), (2, 64), torch.bfloat16, "triton")
    assert flash == ["_varlen"]
    monkeypatch.setattr(attention, "RUN", 0)
    check(layout, dense_heads(1), (2, 64), torch.bfloat16, "triton")
    assert flash == ["_varlen"]


@needs_triton
def test_flash_attention_is_not_used_where_it_computes_runs_wrongly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from kvgraft.kernels.triton import attention

    def refuses(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel for this device")

    assert attention.takes_runs(torch.device(DEVICE))
    assert not caplog.records
    for wrong, reason in ((lambda query, *_: query, "wrongly"), (refuses, "no kernel")):
        monkeypatch.setattr(attention, "_varlen", wrong)
        assert not attention.takes_runs(torch.device(DEVICE))
        assert reason in caplog.text


def pieces() -> st.SearchStrategy[list[int]]:
    """Positions of one prompt: runs and single tokens, with gaps between them."""
    piece = st.tuples(st.integers(0, 40), st.one_of(st.integers(1, 3), st.integers(18, 40)))
    return st.lists(piece, max_size=4).map(_positions)


def _positions(drawn: list[tuple[int, int]]) -> list[int]:
    positions: list[int] = []
    for gap, length in drawn:
        begin = (positions[-1] + 1 if positions else 0) + gap
        positions += range(begin, begin + length)
    return positions


@needs_triton
@examples(10)
@given(
    prompts=st.lists(pieces(), min_size=1, max_size=2),
    shape=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    dtype=st.sampled_from([torch.bfloat16, *([torch.float32] if DEVICE == "cpu" else [])]),
    splits=st.integers(1, 3),
    triangle=st.sampled_from([25, 4096]),
)
def test_any_split_of_rows_equals_the_reference(
    prompts: list[list[int]], shape: tuple[int, int], dtype: torch.dtype, splits: int, triangle: int
):
    """Runs at the beginning, in the middle and at the end, behind any number of tokens; prompts end
    to end."""
    from kvgraft.kernels.triton import attention

    slots, used, tables = (
        torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(3)).to(DEVICE),
        0,
        [],
    )
    for positions in prompts:
        length = max(positions, default=0) + 1
        tables.append(slots[None, used : used + length])
        used += length
    layout = AttentionLayout.of([torch.tensor(p, dtype=torch.int64) for p in prompts], tables)
    if not layout.contexts:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "RUN", 20)
        patch.setattr(attention, "TRIANGLE", triangle)
        patch.setattr(attention, "FLASH_DTYPES", (torch.bfloat16, torch.float32))
        patch.setattr(attention, "programs_of", lambda device: 0)
        patch.setattr(attention, "splits_of", lambda *_: splits)
        check(layout, dense_heads(shape[1]), (shape[0], 16), dtype, "triton")


def test_long_runs_and_what_lies_between_them():
    prompts = [range(5), [], [0, 3, *range(10, 16), 20], range(7, 12)]
    tables = [torch.arange(30)[None] + 100 * number for number in range(4)]
    layout = AttentionLayout.of([torch.tensor(list(p), dtype=torch.int64) for p in prompts], tables)
    runs = layout.long_runs(5)
    assert runs is not None
    assert [(run.start, run.stop, run.first_key, run.num_keys) for run in runs.runs] == [
        (0, 5, 0, 5), (7, 13, 5, 16), (14, 19, 21, 12),
    ]  # fmt: skip
    assert [run.opens for run in runs.runs] == [True, False, False]
    assert runs.slots.tolist() == [[*range(5), *range(200, 216), *range(300, 312)]]
    assert runs.other_rows.tolist() == [5, 6, 13]
    assert (runs.tiles(5), runs.tiles(2)) == (4, 9)
    sequences = runs.sequences(5)
    assert sequences is not None
    assert sequences.query_starts.tolist() == [0, 7, 13, 14, 19]
    assert sequences.key_starts.tolist() == [0, 5, 0, 21, 0]
    assert sequences.num_keys.tolist() == [0, 16, 0, 12]
    assert (sequences.longest_query, sequences.longest_keys) == (7, 16)
    tiles = layout.query_tiles(4, runs, False)
    assert tiles.tolist() == [[1, 5, 2, 0, 0], [1, 13, 1, 0, 2]]
    assert [tile[1:] for tile in layout.query_tiles(4, runs).tolist()] == [
        [0, 4, 1, 0], [4, 1, 1, 4], [5, 2, 0, 5], [7, 4, 1, 7], [11, 2, 1, 11], [13, 1, 0, 13], [14,
        4, 1, 14],
        [18, 1, 1, 18],
    ]  # fmt: skip
    assert layout.long_runs(7) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("size", [16, 80])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "kind",
    [
        [range(LONG_CONTEXT + 101, LONG_CONTEXT + 102), [12]],
        [range(LONG_CONTEXT, LONG_CONTEXT + 70)],
    ],
)
def test_long_contexts(
    kind: list,
    in_order: bool,
    size: int,
    dtype: torch.dtype,
    implementation: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Where the cores share one head, and where what lies before a chunk needs no mask."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    positions = [torch.tensor(list(at)) for at in kind]
    slots = torch.arange(2 * LONG_CONTEXT) if in_order else torch.randperm(2 * LONG_CONTEXT)
    slots = slots.to(DEVICE)
    layout = AttentionLayout.of(positions, [slots[None, 20:], slots[None, :20]][: len(kind)])
    torch.manual_seed(1)
    for heads in (1, 2):
        keys, values = torch.randn(2, heads, 2 * LONG_CONTEXT, size).to(DEVICE, dtype)
        query = torch.randn(layout.query_positions.numel(), 6, size).to(keys)
        arguments = (query, keys, values, dense_heads(heads), layout, size**-0.5)
        expected = segpaged_attention(*arguments, implementation="reference")
        compare(segpaged_attention(*arguments, implementation=implementation), expected)


def test_reference_equals_attention_written_out():
    torch.manual_seed(2)
    keys, values, query = (torch.randn(1, count, 4).to(DEVICE) for count in (4, 4, 2))
    for window, seen in ((9, (2, 0, 3)), (1, (2, 3))):
        slots = torch.tensor([[2, 0, 3]], device=DEVICE)
        layout = AttentionLayout.of([torch.tensor([2])], [slots], sinks=1, window=window)
        heads = LayerHeads((0,), (0,), (True,))
        actual = segpaged_attention(
            query, keys, values, heads, layout, 0.5, implementation="reference"
        )
        for head in range(2):
            weights = [math.exp(0.5 * float(query[0, head] @ keys[0, slot])) for slot in seen]
            expected = sum(
                w * values[0, slot] for w, slot in zip(weights, seen, strict=True)
            ) / sum(weights)
            torch.testing.assert_close(actual[0, head], expected)


@pytest.mark.parametrize("local", [True, False])
def test_a_step_on_the_rows_of_vllm_copies_what_it_sees_and_not_the_pool(local: bool):
    """In vLLM's caches a row has key and value, so that the keys alone are not contiguous."""
    rows = torch.zeros(2, 50_000, 2 * 64)
    keys, values = rows.chunk(2, dim=-1)
    slots = torch.randperm(50_000)[:600][None]
    layout = AttentionLayout.of([torch.tensor([599])], [slots], SINKS, WINDOW)
    heads = LayerHeads((0, 1), (0, 0), (local, local))
    query = torch.zeros(1, 4, 64)
    with torch.profiler.profile(profile_memory=True) as profile:
        segpaged_attention(query, keys, values, heads, layout, 1.0, implementation="cpu")
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert 0 < allocated < keys.numel() * keys.element_size() / 10


def test_no_queries_at_all():
    layout = AttentionLayout.of(
        [torch.zeros(0, dtype=torch.int64)], [torch.arange(4, device=DEVICE)[None]]
    )
    query, *pools = torch.zeros(0, 2, 8, device=DEVICE), *torch.zeros(2, 1, 8, 8, device=DEVICE)
    assert segpaged_attention(query, *pools, dense_heads(1), layout, 1.0).shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (20, 1, 576)])
@pytest.mark.parametrize("at", [[0], [62], [0, 5, 6, 61], range(63), range(30, 63), [5, 700, 1500]])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mass_equals_reference_and_sums_to_queries_times_heads(
    shape: tuple[int, int, int], at: list[int], dtype: torch.dtype, implementation: str
):
    query_heads, key_heads, size = shape
    torch.manual_seed(3)
    positions, count = torch.tensor(list(at), device=DEVICE), max(63, max(at) + 1)
    query, keys = (
        torch.randn(len(positions), query_heads, size),
        torch.randn(count, key_heads, size),
    )
    arguments = (query.to(DEVICE, dtype), keys.to(DEVICE, dtype), positions, size**-0.5)
    expected = attention_mass(*arguments, implementation="reference")
    actual = attention_mass(*arguments, implementation=implementation)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert actual.sum().item() == pytest.approx(len(positions) * query_heads, rel=1e-5)
    assert not actual[int(positions.max()) + 1 :].any()
    greatest = attention_mass(*arguments, "max", implementation="reference")
    found = attention_mass(*arguments, "max", implementation=implementation)
    torch.testing.assert_close(found, greatest, atol=1e-5, rtol=1e-5)
    assert (greatest <= expected + 1e-5).all()


@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_prompts_end_to_end_score_as_each_alone(implementation: str, reduction: str):
    torch.manual_seed(4)
    asking = [[0, 5, 61], [], [*range(70, 141)], [3]]
    counts = [(len(at), tokens) for at, tokens in zip(asking, (70, 20, 150, 7), strict=True)]
    queries, tokens = map(list, zip(*counts, strict=True))
    query, keys = (
        torch.randn(sum(queries), 4, 32, device=DEVICE),
        torch.randn(sum(tokens), 2, 32, device=DEVICE),
    )
    positions = torch.tensor([place for at in asking for place in at], device=DEVICE)
    found = attention_mass(
        query, keys, positions, 0.2, reduction, counts, implementation=implementation
    )
    parts = zip(query.split(queries), keys.split(tokens), positions.split(queries), strict=True)
    alone = [attention_mass(*part, 0.2, reduction, implementation="reference") for part in parts]
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert not found[70:90].any()


@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_a_query_in_front_of_its_prompt_asks_for_nothing(implementation: str, reduction: str):
    torch.manual_seed(5)
    query, keys = torch.randn(9, 4, 32, device=DEVICE), torch.randn(110, 2, 32, device=DEVICE)
    positions = torch.tensor([-1, -1, 3, 60, -1, -1, 9, 10, 39], device=DEVICE)
    found = attention_mass(
        query, keys, positions, 0.2, reduction, [(4, 70), (5, 40)], implementation=implementation
    )
    asking = positions >= 0
    expected = attention_mass(
        query[asking], keys, positions[asking], 0.2, reduction, [(2, 70), (3, 40)],
        implementation="reference",
    )  # fmt: skip
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_nobody_asks(implementation: str, reduction: str):
    """As for a prompt of a batch in which a round has found nothing more."""
    query, keys = torch.zeros(0, 4, 16, device=DEVICE), torch.ones(9, 2, 16, device=DEVICE)
    positions = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert not attention_mass(
        query, keys, positions, 1.0, reduction, implementation=implementation
    ).any()


def test_mass_is_reduced_by_sum_or_max():
    with pytest.raises(ValueError, match="reduction must be sum or max, got 'mean'"):
        attention_mass(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.tensor([0]), 1.0, "mean")


def test_runs_are_pseudo_sequences():
    context = AttentionLayout.of(
        [torch.tensor([0, 1, 4, 7, 8, 9])], [torch.arange(10)[None]]
    ).contexts[0]
    assert context.runs == [(0, 2), (2, 3), (3, 6)]
