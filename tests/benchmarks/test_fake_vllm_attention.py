"""What attends to the rows of a recovery in vLLM: who, to which of them, and how much they read.

On the fake device, or on the CPU as if it were one; `tests/vllm/test_row_pools.py` has the kernel
itself."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.config")

import numpy as np
from torch import Tensor
from vllm.v1.attention.backend import AttentionType

from fake_device import FakeDevice
from fake_vllm import BLOCK, LoadedModel, Recoveries, process_groups
from kvgraft.core.plan import Plan
from kvgraft.kernels import dispatch
from kvgraft.policies import parse_policy
from kvgraft.prefill.context import Hidden
from kvgraft.vllm.chunks import PrefillChunk
from kvgraft.vllm.compat import group_attention
from kvgraft.vllm.compat.group_attention import LONG_RUN, GroupAttention
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.prefill import VllmPrefill
from kvgraft.vllm.row_chunks import RowChunks
from launches import MAX_LENGTH, VLLM_SHAPE, documents, prompts
from ttft import make_model

LAYERS, LONG, SHORT, FEW = 3, 4096, 768, 4  # tokens; sequences that a backend with buffers takes
ROUNDING = 0.03  # relative, of KV in bfloat16 behind some layers
CUDA = torch.device("cuda", 0)
# tokens; a backend's is twice it
TILE = 64 // (VLLM_SHAPE["num_attention_heads"] // VLLM_SHAPE["num_key_value_heads"])
# bytes of a token
ROW = 2 * VLLM_SHAPE["num_key_value_heads"] * VLLM_SHAPE["head_dim"] * torch.bfloat16.itemsize
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, LAYERS, MAX_LENGTH, VLLM_SHAPE, dtype="bfloat16")
    settings = {
        "max_model_len": 2 * LONG,
        "max_num_batched_tokens": 2 * LONG,
        "num_gpu_blocks_override": LONG // 4,
    }
    with process_groups():
        yield LoadedModel.of(folder, max_num_seqs=FEW, **settings)


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide for CPUs as for CUDA."""
    monkeypatch.setattr(group_attention, "DEVICES", ("cpu", "cuda"))


def recoveries(host: ModelHost, tokens: int = SHORT) -> Recoveries:
    read, [asked] = prompts(tokens, 1)
    return Recoveries(host, read, documents(tokens), asked)


def recovered(
    host: ModelHost, policy: str, copies: int = 1, number: int = 0, tokens: int = SHORT
) -> list[Tensor]:
    """By layer what the cache then has of one of so many prompts."""
    recover = recoveries(host, tokens)
    recover(parse_policy(policy), copies)
    return recover.cached(number)


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all((mine - theirs).norm() < ROUNDING * theirs.norm() for mine, theirs in pairs)


@pytest.mark.parametrize("policy", ["naive", "epic", "spread", "transitive"])
def test_our_kernel_recovers_what_the_backend_alone_recovers(
    loaded: LoadedModel, policy: str, monkeypatch: pytest.MonkeyPatch
):
    expected = recovered(loaded.host("cpu"), policy)
    monkeypatch.setattr(group_attention, "DEVICES", ("cpu", "cuda"))
    found = recovered(loaded.host("cpu"), policy)
    assert close(found, expected)
    assert not torch.equal(found[1], expected[1]), "both are the same code"


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Have the CPU run Triton's kernels from when this is called."""

    def switch() -> None:
        monkeypatch.setattr(dispatch, "has_triton", lambda device_type: True)
        dispatch.kernel.cache_clear()

    yield switch
    dispatch.kernel.cache_clear()


@needs_triton
def test_tritons_kernels_recover_it_too(
    loaded: LoadedModel, on_cpus: None, with_triton: Callable[[], None]
):
    expected = recovered(loaded.host("cpu"), "epic", tokens=SHORT // 4)
    with_triton()
    assert close(recovered(loaded.host("cpu"), "epic", tokens=SHORT // 4), expected)


@pytest.mark.parametrize("policy", ["naive", "spread"])
def test_prompts_of_a_batch_attend_to_themselves(loaded: LoadedModel, on_cpus: None, policy: str):
    alone = recovered(loaded.host("cpu"), policy)
    for number in range(3):
        assert close(recovered(loaded.host("cpu"), policy, 3, number), alone)


POLICIES = ("naive", "spread", "transitive")


def reads(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, float]]:
    """By policy the bytes of KV that attention reads in all layers; and what tiles would read that
    are full, and whose rows all see what the last one sees."""
    chunks: list[PrefillChunk] = []
    metadata_of, found = RowChunks.metadata, {}

    def noted(rows: RowChunks, chunk: PrefillChunk) -> Any:
        chunks.append(chunk)
        return metadata_of(rows, chunk)

    monkeypatch.setattr(RowChunks, "metadata", noted)
    with torch.inference_mode(), FakeDevice() as device:
        host = loaded.host("cuda")
        host.runs_as_one = False  # metadata is asked for in every layer
        recover = recoveries(host, LONG)
        for policy in POLICIES:
            chunks.clear()
            with device.counting() as operations:
                recover(parse_policy(policy))
            read = sum(one.nbytes for one in operations if one.name in ("attention", "_segpaged"))
            found[policy] = read, ROW * sum(map(tokens_read, chunks))
    return found


def tokens_read(chunk: PrefillChunk) -> float:
    seen = (chunk.known_positions + 1).double()
    first = sum(stop - first for _, first, stop in chunk.runs[: chunk.num_long])
    return float(seen[:first].sum() / (2 * TILE) + seen[first:].sum() / TILE)


def test_keys_and_values_are_read_once_for_a_tile_of_rows(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    found = reads(loaded, monkeypatch)
    monkeypatch.setattr(group_attention, "BACKENDS", ())
    by_run = reads(loaded, monkeypatch)
    for policy, (read, needed) in found.items():
        assert needed <= read <= 1.3 * needed, policy
        assert by_run[policy][0] > 2.5 * read or policy == "naive"
    assert by_run["naive"][0] == found["naive"][0]


class Buffers:
    """A builder whose metadata are its own buffers, for so many sequences."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._latest: dict[str, Any] = {}

    def build(self, common: Any) -> Any:
        assert common.num_reqs <= FEW
        self.sizes.append(common.num_reqs)
        self._latest.clear()
        self._latest.update(vars(common))
        return _View(self._latest)


class _View:
    def __init__(self, latest: dict[str, Any]) -> None:
        self._latest = latest

    def __getattr__(self, name: str) -> Any:
        return self._latest[name]


@pytest.mark.parametrize("alone", [False, True])
def test_buffers_of_a_backend_are_never_overrun(
    loaded: LoadedModel, on_cpus: None, alone: bool, monkeypatch: pytest.MonkeyPatch
):
    """Nor is what a builder has overwritten since used."""
    expected, buffers = recovered(loaded.host("cpu"), "spread", 5, 4, 2 * SHORT), Buffers()
    if alone:
        monkeypatch.setattr(group_attention, "BACKENDS", ())
    host = loaded.host("cpu", "FLASHINFER", buffers.build)
    assert host.attention.max_runs == (FEW if alone else None)
    host.max_rows = 600  # so that there are several chunks
    assert close(recovered(host, "spread", 5, 4, 2 * SHORT), expected)
    assert max(buffers.sizes) == FEW  # and there were more


def test_rows_come_back_in_their_order(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    """States and queries of a layer whose rows are computed long runs first."""
    where = torch.zeros(600, dtype=torch.bool)
    where[
        [3, 9, *range(20, 20 + LONG_RUN), 200, 201, 350, *range(400, 400 + 2 * LONG_RUN), 599]
    ] = True
    found = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(group_attention, "DEVICES", devices)
        host = loaded.host("cpu")
        table = np.arange(1, 1 + -(-600 // BLOCK))
        with torch.inference_mode():
            for attention in host.attentions:
                attention.kv_cache.normal_(generator=torch.Generator().manual_seed(0))
            ctx = VllmPrefill(
                host, Plan.for_prompt(600, BLOCK), torch.arange(600), [[table]], table[:, None]
            )
            hidden = ctx.layer(0, ctx.embed(where))
            found.append(
                (
                    hidden.states,
                    ctx.query(),
                    ctx.layer(1, hidden).states,
                    ctx.layer(1, Hidden(hidden.states, where)).states,
                )
            )
            orders = [chunk.order is not None for chunk in ctx._rows.of(where)]
        assert orders == [bool(devices)]
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm(dim=(1, 2)).max() < 0.1 * theirs.norm(dim=(1, 2)).min()


NEEDS_BACKEND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "window": (lambda layer: setattr(layer.impl, "sliding_window", (127, 0)), "a sliding window"),
    "soft cap": (lambda layer: setattr(layer.impl, "logits_soft_cap", 30.0), "a soft cap"),
    "ALiBi": (lambda layer: setattr(layer.impl, "alibi_slopes", torch.ones(8)), "ALiBi"),
    "sinks": (lambda layer: setattr(layer.impl, "sinks", torch.ones(8)), "sinks"),
    "encoder": (
        lambda layer: setattr(layer.impl, "attn_type", AttentionType.ENCODER_ONLY),
        "an encoder",
    ),
    "lookback": (lambda layer: setattr(layer.impl, "chunk_lookback", 2), "attention in chunks"),
    "sharing": (
        lambda layer: setattr(layer.impl, "kv_sharing_target_layer_name", "0"),
        "the cache of another layer",
    ),
    "FP8": (
        lambda layer: setattr(layer, "kv_cache", layer.kv_cache.view(torch.uint8)),
        "KV cache dtype auto",
    ),
    "size": (lambda layer: setattr(layer, "head_size_v", 16), "values of another size than keys"),
    "padding": (
        lambda layer: setattr(layer, "kv_cache", layer.kv_cache[..., :-2]),
        "a cache that is not rows",
    ),
}


@pytest.mark.parametrize("case", NEEDS_BACKEND)
def test_what_our_kernel_does_not_compute_stays_with_the_backend(loaded: LoadedModel, case: str):
    host = loaded.host("cpu")
    layers, (change, reason) = host.attentions, NEEDS_BACKEND[case]
    plain = GroupAttention.of(0, layers, loaded.config, CUDA)
    assert (plain.pool is None, plain.reasons, plain.max_runs) == (False, (), None)
    sizes = layers[0].head_size_v
    change(layers[0])
    try:
        found = GroupAttention.of(0, layers, loaded.config, CUDA)
    finally:
        layers[0].head_size_v = sizes
    assert found.pool is None
    assert [why.startswith(reason) for why in found.reasons] == [True]


@pytest.mark.parametrize(("backend", "splits", "limit"), [
    ("FLASH_ATTN", True, None), ("TRITON_ATTN", True, None), ("FLASHINFER", True, FEW), ("FLASHMLA",
    False, FEW),
    ("FLEX_ATTENTION", False, FEW),
])  # fmt: skip
def test_what_attends_is_decided_when_a_worker_starts(
    loaded: LoadedModel,
    backend: str,
    splits: bool,
    limit: int | None,
    caplog: pytest.LogCaptureFixture,
):
    with torch.inference_mode(), FakeDevice(), caplog.at_level("INFO", "kvgraft"):
        attention = loaded.host("cuda", backend).attention
    assert (attention.splits_rows, attention.max_long_runs) == (splits, limit)
    assert attention.max_runs == (None if splits else limit)
    assert ("KVGraft's kernel; " in caplog.text) == splits
    assert backend in caplog.text


def test_on_cpus_vllms_kernel_attends_to_all_rows_as_ever(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        group_attention, "segpaged_attention", lambda *_: pytest.fail("our kernel attends")
    )
    attention = loaded.host("cpu").attention
    assert (attention.splits_rows, attention.max_runs, attention.max_long_runs) == (
        False,
        None,
        None,
    )
    assert [group.reasons for group in attention.groups] == [("device cpu",)]
    recovered(loaded.host("cpu"), "spread")
