"""Every Triton kernel compiles for CUDA, also where the interpreter is more tolerant, and fits the
shared memory and the registers of a device."""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

SHARED = 227 * 1024  # bytes of a program on Hopper; Ampere's data centre devices have 163
KERNELS = Path(__file__).parents[2] / "src/kvgraft/kernels/triton"
HALF = """
DTYPES += (torch.float16,)
"""
ALIGN = """
for dtype in DTYPES:
    pool, slots, turn = torch.zeros(2, 64, 3, 80, dtype=dtype), torch.arange(4), torch.zeros(4, 40)
    for values in (pool.clone(), None):
        dispatch.align_copy(pool, values, range(2), slots, slots + 8, turn, turn, implementation="triton")
for dtype in (*DTYPES, torch.float8_e4m3fn):
    for interleaved in (False, True):
        pages = [torch.zeros(8, 3, 16, 576, dtype=torch.float32).to(dtype) for _ in range(2)]
        given = pages, slots, slots + 16, turn, turn
        dispatch.align_paged(*given, first=496, interleaved=interleaved, implementation="triton")
"""
ROWS = """
from kvgraft.kernels import changes, rows
from kvgraft.kernels.heads import LayerHeads

heads = LayerHeads(tuple(range(8)), (0,) * 8, (False,) * 8)
for dtype in DTYPES:
    for dim in (80, 128):
        x, table = torch.zeros(20, 48, dim, dtype=dtype), torch.zeros(20, dim // 2)
        for weight in (x[0], None):
            rows.norm_rotate(x, weight, 1e-6, table, table, implementation="triton")
        pool, new = torch.zeros(8, 64, dim, dtype=dtype), x[:, :8]
        for count in (1, 2):
            pools, parts, at = (pool, pool)[:count], (new, new)[:count], torch.arange(20)[None]
            rows.write_rows(pools, parts, heads, at, implementation="triton")
            rows.read_rows(pools, heads, at, implementation="triton")
            turn = torch.zeros(3, dim // 2), torch.zeros(3, dim // 2)
            source, target = ((slots, turn) for slots in torch.arange(6).view(2, 1, 3))
            averaged = torch.zeros(8, 3, dim * count)
            changes.kv_changes(pools, heads, target, source, implementation="triton")
            both = (torch.arange(3), torch.arange(3)), (torch.arange(9), torch.arange(9))
            around = changes.anchors_nearby(*both, 64.0, 0.5, 8, 3, implementation="triton")[:2]
            changes.average_changes(averaged, *around, implementation="triton")
            sides = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3)
            changes.copy_changed(pools, heads, source, target, averaged, *sides, implementation="triton")
    states, weight = torch.zeros(20, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    rows.add_norm(states, states, weight, 1e-6, implementation="triton")
    rows.silu_mul(states, implementation="triton")
"""
CHANGES = ("_anchors_nearby", "_average_changes", "_copy_changed", "_kv_changes")
TOPK = """
for remap in (False, True):
    scores, lengths = torch.zeros(2, 3000), torch.ones(2, dtype=torch.int64)
    dispatch.radix_topk(scores, lengths, 29, 0.1, remap=remap, implementation="triton")
rows = torch.zeros(2, 3001, dtype=torch.int64)
dispatch.page_topk(scores, rows, lengths, 16, (1, 2), 29, 0.1, implementation="triton")
"""
WORK = """
from kvgraft.kernels.triton.workload import plan_work

for sequences in (1, 2, 100, 5000):
    plan_work(torch.ones(sequences, dtype=torch.int64), 16, 264)
"""
ATTENTION = """
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout

steps = AttentionLayout.of([torch.tensor([5]), torch.tensor([99])], [torch.arange(6)[None], torch.arange(100)[None]])
prompt = AttentionLayout.of([torch.arange(100)], [torch.arange(100)[None]])
for dtype in DTYPES:
    for query_heads, kv_heads, dim in ((8, 2, 64), (16, 8, 128), (8, 4, 256), (16, 1, 576)):
        heads = LayerHeads(tuple(range(kv_heads)), (0,) * kv_heads, (False,) * kv_heads)
        pool = torch.zeros(kv_heads, 128, dim, dtype=dtype)
        for layout, count in ((steps, 2), (prompt, 100)):
            query = torch.zeros(count, query_heads, dim, dtype=dtype)
            dispatch.segpaged_attention(query, pool, pool, heads, layout, 1.0, implementation="triton")
        keys, at = pool.transpose(0, 1)[:100], torch.arange(100)
        dispatch.attention_mass(query, keys, at, 1.0, implementation="triton")
        query, pages = torch.zeros(2, query_heads // kv_heads, dim, dtype=dtype), torch.zeros(9, 16, dim, dtype=dtype)
        tables, lengths = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
        dispatch.block_sparse_attention(query, pages, pages, tables, lengths, 1.0, implementation="triton")
cache = torch.zeros(9, 16, 8, 256, dtype=torch.bfloat16)  # as vLLM's caches: streams of heads overlap
keys, values = (cache.as_strided((8, 2000, 128), (256, 128, 1), first) for first in (0, 128))
rows = torch.zeros(100, 48 * 128, dtype=torch.bfloat16)
query, heads = rows[:, : 32 * 128].view(100, 32, 128), LayerHeads(tuple(range(8)), (0,) * 8, (False,) * 8)
given = heads, prompt, 1.0, torch.zeros(130, 32, 128, dtype=torch.bfloat16)[30:]
dispatch.segpaged_attention(query, keys, values, *given, implementation="triton")
by_block = torch.zeros(9, 16, 2, 256, dtype=torch.bfloat16).transpose(1, 2).split(128, dim=3)
query = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
dispatch.block_sparse_attention(query, *by_block, tables, lengths, 1.0, implementation="triton")
codes = cache.to(torch.float8_e4m3fn)  # of a quantised cache
keys, values = (codes.as_strided((8, 2000, 128), (256, 128, 1), first) for first in (0, 128))
windows = LayerHeads(tuple(range(8)), (0,) * 8, (True,) * 8)
dispatch.segpaged_attention(rows[:, : 32 * 128].view(100, 32, 128), keys, values, windows, prompt, 1.0, implementation="triton")
sinks = torch.zeros(2, 4)
dispatch.block_sparse_attention(query, *by_block, tables, lengths, 1.0, None, sinks, implementation="triton")
"""
FLOWS = """
from kvgraft.decode.batch import Batch
from kvgraft.decode.executor import HeadPages, fill, select
from kvgraft.decode.flow import trace
from kvgraft.flows import FLOWS
from kvgraft.decode.fused import choose, kernels_of
from every_flow import EVERY_FLOW
from kvgraft.decode.planner import plan

SHAPES = (128, 2), (128, 8), (576, 16)  # channels and queries of a KV head


def compile_flow(name, dim, group):
    program = trace(EVERY_FLOW[name](), 16, dim, group)
    pool = {"k": torch.zeros(90, 16, dim), "v": torch.zeros(90, 16, dim)}
    pool |= {cache: torch.zeros(90, *shape) for cache, shape in program.caches.items()}
    fill(program, pool, torch.arange(80), implementation="triton")
    batch = Batch(torch.arange(90)[None], torch.tensor([85 * 16]), 16)
    query = torch.zeros(1, group, dim)
    select(program, plan(program), query, pool, batch, implementation="triton")
    dispatch.has_triton = lambda device: True
    if (kernels := kernels_of(program)) is not None:
        choose(kernels, program, query, pool, batch)
    return program, pool


"""
SHIPPED = f"""{FLOWS}
for name in (*FLOWS, "opus_coarse_fine"):
    for shape in SHAPES:
        compile_flow(name, *shape)
program, pool = compile_flow("sonnet_value_weighted_centroid", 576, 16)
# as vLLM's caches
pool |= {{name: HeadPages(torch.zeros(45, 16, 2, 576).transpose(1, 2)) for name in ("k", "v")}}
fill(program, pool, torch.arange(80), implementation="triton")
"""
EVERY = f"""{FLOWS}
for name in EVERY_FLOW:
    for shape in SHAPES:
        compile_flow(name, *shape)
"""
SIZES = """
from kvgraft.kernels import changes, rows
from kvgraft.kernels.heads import LayerHeads

heads = LayerHeads(tuple(range(8)), (0,) * 8, (False,) * 8)
pools = torch.zeros(2, 8, 4096, 128, dtype=torch.bfloat16).unbind(0)
for tokens in (1, 3, 16, 48, 101):
    at, turn = torch.arange(tokens)[None], (torch.zeros(tokens, 64), torch.zeros(tokens, 64))
    new = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16)
    rows.write_rows(pools, (new, new), heads, at, implementation="triton")
    cache = pools[0].view(2, 4, 4096, 128).transpose(1, 2)
    dispatch.align_copy(cache, cache, range(tokens % 2, 2), at[0], at[0], *turn, implementation="triton")
    for anchors in (2, 16, 33):
        few, own = torch.arange(anchors)[None], (torch.zeros(anchors, 64), torch.zeros(anchors, 64))
        changes.kv_changes(pools, heads, (few, own), (few, own), implementation="triton")
        averaged = torch.zeros(8, anchors, 256)
        *around, sides, behind = changes.anchors_nearby(
            (few[0], few[0]), (at[0], at[0]), 64.0, 0.5, 8, 3, implementation="triton"
        )
        changes.average_changes(averaged, *around, implementation="triton")
        sides = sides, behind
        changes.copy_changed(pools, heads, (at, turn), (at, turn), averaged, *sides, implementation="triton")
"""
SETUP = """
import torch
from compiling import compile_only, compiled, variants
from kvgraft.kernels import dispatch

DTYPES = (torch.float32, torch.bfloat16)
compile_only()
"""


OF_ATTENTION = {"_segpaged", "_sparse", "_join", "_weigh", "_receive", "_plan_work"}
OF_FLOWS = {"fused", "_page_topk", "_plan_work"}
CASES = {
    "align": (HALF + ALIGN, {"_align_copy", "_align_paged"}),
    "rows": (HALF + ROWS, {"_add_norm", "_move_rows", "_norm_rotate", "_silu_mul", *CHANGES}),
    "topk": (TOPK, {"_radix", "_page_topk"}),
    "work": (WORK, {"_plan_work"}),
    "attention": (ATTENTION, OF_ATTENTION),
    "attention, three dtypes": (HALF + ATTENTION, OF_ATTENTION),
    "flows": (SHIPPED, OF_FLOWS),
    "every flow": (EVERY, OF_FLOWS),
}
# Bytes of a thread at most. All are in two flows of research/vortex at 128 channels and 8 queries:
# sonnet_rectified_quest and, with 8, sonnet_query_weighted_spread. They lie outside the loop over
# tiles: the compiler keeps to 80 registers, so that three programs fit a multiprocessor.
SPILLED = {"every flow": 24}
LONG = {
    "attention": pytest.mark.slow,
    "attention, three dtypes": pytest.mark.soak,
    "flows": pytest.mark.slow,
    "every flow": pytest.mark.soak,
}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("case", [pytest.param(c, marks=LONG.get(c, ())) for c in CASES])
def test_kernels_compile_for_cuda(case: str):
    calls, kernels = CASES[case]
    found = [
        line.split()
        for line in lines_of(f"{SETUP}{calls}\nfor kernel in compiled:\n    print(*kernel)")
    ]
    assert {name for name, _, _ in found} == kernels
    assert max(int(shared) for _, shared, _ in found) <= SHARED
    for name, _, spilled in found:
        assert int(spilled) <= SPILLED.get(case, 0), name


def test_each_kernel_that_is_launched_is_compiled_here():
    launched = {
        name
        for path in KERNELS.glob("*.py")
        for name in re.findall(r"^    +(_\w+)\[.*\]\($", path.read_text(), re.MULTILINE)
    }
    assert launched == set().union(*(kernels for _, kernels in CASES.values())) - {"fused"}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_prompts_of_other_sizes_need_no_other_kernels():
    """A kernel that is compiled again for a number of tokens holds up a request, the first with such
    a number."""
    found = Counter(lines_of(f"{SETUP}{SIZES}\nfor name in variants():\n    print(name)"))
    assert found == dict.fromkeys(("_move_rows", "_align_copy", *CHANGES), 1)


def lines_of(program: str) -> list[str]:
    """What a program prints in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join(
        (str(tests), str(tests.parent), environment.get("PYTHONPATH", ""))
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
