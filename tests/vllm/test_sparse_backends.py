"""Flows in vLLM's backends for CUDA: their builders and implementations on CPU tensors of their
layouts.

What needs a device is done in plain torch here: writing to the cache, and the attention of the
stock backend, which is for prompts, short requests and skipped layers. FlashInfer, which is not
installed, lays out its cache as the others."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_compat import configure
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvgraft.decode.batch import Batch
from kvgraft.decode.flow import Program
from kvgraft.decode.indexer import Indexer
from kvgraft.kernels import dispatch
from kvgraft.vllm.compat import FLOW
from kvgraft.vllm.compat.support import UnsupportedConfiguration
from kvgraft.vllm.sparse import attention
from kvgraft.vllm.sparse.layouts import Strided

SIZE, KV_HEADS, GROUP, DIM, BLOCKS = 32, 4, 2, 32, 60  # the bundled model's
# tokens, and how many of them are computed now
REQUESTS = ((300, 1), (40, 1), (100, 33), (520, 1), (257, 1))
DECODING = (0, 3, 4)  # that a flow of two blocks leaves something out of
BACKENDS = {"FLASH_ATTN": FlashAttentionBackend, "TRITON_ATTN": TritonAttentionBackend}
LAYOUTS = {  # shape in memory -> the axes [blocks, Hkv, N, 2 d], of one of two layers
    "heads first": ((2, BLOCKS, KV_HEADS, SIZE, 2 * DIM), lambda x: x[1]),
    "tokens first": ((2, BLOCKS, SIZE, KV_HEADS, 2 * DIM), lambda x: x[1].transpose(1, 2)),
    "layers together": ((BLOCKS, 2, KV_HEADS, SIZE, 2 * DIM), lambda x: x[:, 1]),
}


def dense(
    query: Tensor, keys: Tensor, values: Tensor, place: int, sinks: Tensor | None = None
) -> Tensor:
    """Queries [n, Hq, d] from a place on, keys and values [t, Hkv, d], sinks [Hq]."""
    keys, values = (x.repeat_interleave(GROUP, dim=1) for x in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", query, keys) * DIM**-0.5
    future = torch.arange(len(keys)) > torch.arange(place, place + len(query))[:, None]
    logits = logits.masked_fill(future, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None, None].expand(-1, len(query), 1)), dim=2)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(keys)], values)


class Layer:
    """One attention layer under a backend of vLLM with a flow, its cache, and a step of some
    requests."""

    def __init__(
        self, config: VllmConfig, backend: str, layout: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.manual_seed(0)
        stock = BACKENDS[backend]
        self.seen: list[Any] = []
        monkeypatch.setattr(stock.get_impl_cls(), "do_kv_cache_update", self.write)
        monkeypatch.setattr(
            stock.get_impl_cls(), "forward", lambda impl, *given: self.attend(*given)
        )
        shape, view = LAYOUTS[layout]
        self.cache: Tensor = view(torch.full(shape, torch.nan))
        self.backend: Any = attention.with_flow(stock, Strided())
        spec = FullAttentionSpec(
            block_size=SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32
        )
        heads = KV_HEADS * GROUP
        known = config.compilation_config.static_forward_context
        with set_current_vllm_config(config):
            self.impl = self.backend.get_impl_cls()(
                heads, DIM, DIM**-0.5, KV_HEADS, None, None, "auto"
            )
            known["model.layers.1.attn"] = SimpleNamespace(impl=self.impl)  # as vLLM's layers do
            self.builder = self.backend.get_builder_cls()(
                spec, ["model.layers.1.attn"], config, torch.device("cpu")
            )
        free = torch.randperm(BLOCKS - 1) + 1
        self.table = torch.zeros(len(REQUESTS), 20, dtype=torch.int32)
        self.keys, self.values = (
            [torch.randn(count, KV_HEADS, DIM) for count, _ in REQUESTS] for _ in range(2)
        )
        for own, (count, new), keys, values in zip(
            self.table, REQUESTS, self.keys, self.values, strict=True
        ):
            blocks, free = free[: -(-count // SIZE)], free[-(-count // SIZE) :]
            own[: len(blocks)] = blocks
            past = self.slots(own, torch.arange(count - new))
            self.impl.do_kv_cache_update(self.layer(), keys[:-new], values[:-new], self.cache, past)

    @staticmethod
    def layer(number: int = 1) -> Any:
        return SimpleNamespace(
            layer_name=f"model.layers.{number}.attn", kv_cache_dtype="auto", dtype=torch.float32
        )

    @staticmethod
    def slots(table: Tensor, tokens: Tensor) -> Tensor:
        return table[tokens // SIZE].long() * SIZE + tokens % SIZE

    @staticmethod
    def write(
        impl: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        kv_cache[slots // SIZE, :, slots % SIZE] = torch.cat((key, value), dim=2)

    def attend(self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor,
    metadata: Any,
               output: Tensor, *rest: Any) -> Tensor:  # fmt: skip
        self.seen.append(metadata)
        for number, (first, last) in enumerate(metadata.query_start_loc.unfold(0, 2, 1).tolist()):
            count = int(metadata.seq_lens[number])
            slots = self.slots(metadata.block_table[number], torch.arange(count))
            both = kv_cache[slots // SIZE, :, slots % SIZE]
            output[first:last] = dense(
                query[first:last], both[..., :DIM], both[..., DIM:], count - (last - first),
                self.impl.sinks,
            )  # fmt: skip
        return output

    def step(self, number: int = 1) -> tuple[Tensor, Tensor, Any]:
        """Queries, answers and the metadata of all requests."""
        counts, news = (torch.tensor(x, dtype=torch.int32) for x in zip(*REQUESTS, strict=True))
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), news.cumsum(0).int()))
        places = [torch.arange(count - new, count) for count, new in REQUESTS]
        slots = torch.cat(
            [self.slots(own, place) for own, place in zip(self.table, places, strict=True)]
        )
        new_keys, new_values = (
            torch.cat([x[-new:] for x, (_, new) in zip(pool, REQUESTS, strict=True)])
            for pool in (self.keys, self.values)
        )
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=counts,
            num_reqs=len(REQUESTS),
            num_actual_tokens=len(slots), max_query_len=int(news.max()),
            max_seq_len=int(counts.max()),
            block_table_tensor=self.table, slot_mapping=slots, causal=True, is_prefilling=news > 1,
            seq_lens_cpu_upper_bound=counts,
        )  # fmt: skip
        metadata, layer = self.builder.build(0, common), self.layer(number)
        query = torch.randn(len(slots), KV_HEADS * GROUP, DIM)
        output = torch.full_like(query, torch.nan)
        self.impl.do_kv_cache_update(layer, new_keys, new_values, self.cache, slots)
        self.impl.forward(layer, query, new_keys, new_values, self.cache, metadata, output)
        return query, output, metadata

    def densely(self, query: Tensor) -> Tensor:
        """What attention to everything gives."""
        parts = zip(
            query.split([new for _, new in REQUESTS]), self.keys, self.values, REQUESTS, strict=True
        )
        return torch.cat(
            [
                dense(own, keys, values, count - new, self.impl.sinks)
                for own, keys, values, (count, new) in parts
            ]
        )


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("triton", marks=pytest.mark.skipif(not find_spec("triton"), reason="-")),
    ]
)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours, in plain torch or in Triton's interpreter."""
    monkeypatch.setattr(dispatch, "has_triton", lambda device_type: request.param == "triton")
    dispatch.kernel.cache_clear()
    yield request.param
    dispatch.kernel.cache_clear()


def config(flow: str, **changes: Any) -> VllmConfig:
    return configure(additional_config={FLOW: flow}, kv_transfer_config=None, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flow", ["quest", "double_sparse"])
def test_with_all_blocks_a_flow_is_dense_attention(
    kernels: str, backend: str, layout: str, flow: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Program, "most", property(lambda program: 0))
    layer = Layer(config(f"{flow}:topk_blocks=64,layers_skip=0"), backend, layout, monkeypatch)
    query, found, metadata = layer.step()
    torch.testing.assert_close(found, layer.densely(query), atol=2e-5, rtol=1e-4)
    assert metadata.kvgraft_sparse.queries.tolist() == [0, 1, 35, 36]  # all that decode
    assert [seen.seq_lens.tolist() for seen in layer.seen] == [[1, 1, 100, 1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_count_under_a_flow(kernels: str, backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Program, "most", property(lambda program: 0))
    flow = config("quest:topk_blocks=64,layers_skip=0")
    layer = Layer(flow, backend, "tokens first", monkeypatch)
    layer.impl.sinks = (4 * torch.rand(KV_HEADS * GROUP)).bfloat16()
    query, found, _ = layer.step()
    torch.testing.assert_close(found, layer.densely(query), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_chosen_blocks_are_those_of_plain_pages(
    kernels: str, backend: str, layout: str, monkeypatch: pytest.MonkeyPatch
):
    layer = Layer(config("quest:topk_blocks=2,layers_skip=0"), backend, layout, monkeypatch)
    query, found, metadata = layer.step()
    rows = [int(metadata.query_start_loc[number]) for number in DECODING]
    assert metadata.kvgraft_sparse.queries.tolist() == rows
    plain = layer.cache.contiguous().flatten(0, 1)  # [rows, N, 2 d]
    indexer = Indexer(layer.impl._program, len(plain), plain)
    own = indexer.at(slice(None), plain[..., :DIM].contiguous(), plain[..., DIM:].contiguous())
    own.fill(torch.arange(len(plain)))
    pages = layer.table[list(DECODING)].long()
    by_head = (pages[:, None] * KV_HEADS + torch.arange(KV_HEADS)[:, None]).flatten(0, 1)
    tokens = torch.tensor([REQUESTS[number][0] for number in DECODING]).repeat_interleave(KV_HEADS)
    wanted = own.attend(
        query[rows].unflatten(1, (KV_HEADS, GROUP)).flatten(0, 1),
        Batch(by_head, tokens, SIZE),
        DIM**-0.5,
    )
    torch.testing.assert_close(found[rows], wanted.view(len(rows), -1, DIM), atol=2e-5, rtol=1e-4)
    others = [row for row in range(len(query)) if row not in rows]
    torch.testing.assert_close(found[others], layer.densely(query)[others], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(found[rows], layer.densely(query)[rows], atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_are_skipped_are_the_stock_backends(
    backend: str, monkeypatch: pytest.MonkeyPatch
):
    layer = Layer(config("quest:topk_blocks=2,layers_skip=0"), backend, "tokens first", monkeypatch)
    query, found, metadata = layer.step(0)
    torch.testing.assert_close(found, layer.densely(query))
    assert layer.seen == [metadata]
    assert metadata.seq_lens.tolist() == [count for count, _ in REQUESTS]


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_captured_in_pieces_only(backend: str, monkeypatch: pytest.MonkeyPatch):
    given = config("quest")
    layer = Layer(given, backend, "heads first", monkeypatch)
    support = layer.backend.get_builder_cls().get_cudagraph_support(
        given, layer.builder.kv_cache_spec
    )
    assert support is AttentionCGSupport.NEVER
    assert layer.backend.get_name() == backend


def test_layers_follow_the_flow_traced_for_the_final_block_size():
    """vLLM may choose it after it has made the layers."""
    given = config("quest:topk_blocks=2", block_size=16)
    with set_current_vllm_config(given):
        impl = attention.with_flow(BACKENDS["TRITON_ATTN"], Strided()).get_impl_cls()(
            KV_HEADS * GROUP, DIM, DIM**-0.5, KV_HEADS, None, None, "auto"
        )
        assert impl._program.block_size == 16
        given.cache_config.block_size = SIZE
        known = given.compilation_config.static_forward_context
        known["model.layers.1.attn"] = SimpleNamespace(impl=impl)
        spec = FullAttentionSpec(
            block_size=SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32
        )
        builder = attention.with_flow(BACKENDS["TRITON_ATTN"], Strided()).get_builder_cls()
        builder(spec, ["model.layers.1.attn"], given, torch.device("cpu"))
    assert impl._program.block_size == SIZE


def test_kernels_with_other_blocks_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        UnsupportedConfiguration, match="blocks of 64 tokens where the attention kernel takes 32"
    ):
        Layer(config("quest", block_size=64), "FLASH_ATTN", "heads first", monkeypatch)


def test_a_backend_is_one_class_by_its_name_in_the_registry():
    assert attention.FLASH_ATTN is attention.FLASH_ATTN
    assert attention.FLASH_ATTN.__mro__[1] is FlashAttentionBackend
    with pytest.raises(
        AttributeError, match="no attention backend 'FLEX_ATTENTION' can follow flows: CPU_ATTN"
    ):
        attention.FLEX_ATTENTION  # noqa: B018
