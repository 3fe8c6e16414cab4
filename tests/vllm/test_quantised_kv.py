"""FP8 KV: what is moved is not rounded again, what is turned is rounded once more, and all else is
as ever.

Requests run in processes of their own, since a process can have one engine with our connector.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import warm
from engines import BLOCK, ENVIRONMENT, EVERYTHING, OFF
from jobs import graft
from msgspec.structs import replace
from processes import HostProcess
from quantised_engine import PROMPTS, bound
from test_compat import (
    KV_HEADS,
    cache_of,
    configure,
    make_host,
    numbers,
    refusal,
    spec_of,
    transfer,
)
from vllm import _custom_ops as ops
from vllm.config.cache import CacheConfig, CacheDType

from kvgraft.engine.checkpoint import identify
from kvgraft.kv.heads import HEAD_MAP_FILE, HeadMap
from kvgraft.kv.rope import Rope, rotate
from kvgraft.vllm.compat import transfer_config
from kvgraft.vllm.compat.cache_dtype import FP8, as_codes, as_written, encode
from kvgraft.vllm.compat.packing import unpack
from kvgraft.vllm.compat.support import UnsupportedConfiguration, check_supported, model_identity
from kvgraft.vllm.limits import READABLE
from kvgraft.vllm.worker import kv_share
from quantised_models import AVX512, IN_FP8, with_kv_scales

PROGRAM = Path(__file__).with_name("quantised_engine.py")
SCALES = [(1.0, 1.0), (0.5, 0.25), (0.0173, 0.3)]
DTYPES = pytest.mark.parametrize("cache_dtype", IN_FP8)
WRITTEN = 2 * BLOCK  # tokens of KV_HEADS heads of BLOCK channels


def every_code(cache_dtype: str) -> torch.Tensor:
    """[WRITTEN, KV_HEADS, BLOCK], all numbers that vLLM writes: finite ones, and no negative
    zero."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(FP8[cache_dtype]).float().isfinite() & (codes != 128)]
    assert len(codes) == (253 if cache_dtype == "fp8_e4m3" else 247)
    return (
        codes.repeat(WRITTEN)[: WRITTEN * KV_HEADS * BLOCK]
        .view(WRITTEN, KV_HEADS, BLOCK)
        .view(FP8[cache_dtype])
    )


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.uint8)


@DTYPES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_every_number_of_the_cache_is_moved_bit_for_bit(
    cache_dtype: str, dtype: str, scales: tuple[float, float]
):
    host = make_host(dtype, BLOCK, BLOCK, cache_dtype=cache_dtype, scales=scales)
    written = every_code(cache_dtype), every_code(cache_dtype).flip(0)
    source, target = torch.arange(32, 32 + WRITTEN), torch.arange(101, 101 + WRITTEN)
    host.write_codes(0, *written, source)
    host.write(0, *host.read(0, source), target)
    for slots in (source, target):
        for found, codes in zip(host.read_codes(0, slots), written, strict=True):
            assert torch.equal(as_bytes(found), as_bytes(codes))
    # by a backend that rounds to nearest, too
    for codes, scale in zip(written, scales, strict=True):
        assert torch.equal(
            as_bytes(encode(as_written(codes, scale, host.dtype), scale, codes.dtype)),
            as_bytes(codes),
        )
    for found, codes, scale in zip(host.read(0, target), written, scales, strict=True):
        assert found.dtype == host.dtype
        assert torch.equal(found, (codes.double() * torch.tensor(scale).double()).to(host.dtype))


@DTYPES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("moved", [0, 1, -77, 1500])
def test_keys_that_are_turned_are_rounded_once_more(
    cache_dtype: str, dtype: str, scales: tuple[float, float], moved: int
):
    """By half a step of the eight bits, beside the model dtype's own rounding; not at all where
    they stay."""
    host = make_host(dtype, 64, 32, cache_dtype=cache_dtype, scales=scales)
    keys, values = (
        scale * numbers(64, KV_HEADS, 64, dtype=host.dtype, seed=seed)
        for seed, scale in enumerate(scales)
    )
    source, target = torch.arange(40, 104), torch.arange(107, 171)
    host.write(0, keys, values, source)
    held, held_values = host.read(0, source)
    for exact, rounded, scale in ((keys, held, scales[0]), (values, held_values, scales[1])):
        assert bool(
            ((rounded - exact).abs() <= bound(exact, cache_dtype, scale, slack=exact * 2**-8)).all()
        )
    cos, sin = Rope(64).table(torch.full((64,), moved))
    host.write(0, rotate(held, cos, sin), held_values, target)
    found, found_values = host.read(0, target)
    turned = rotate(held.float(), cos, sin)
    error = (found - turned).abs()
    assert bool((error <= bound(turned, cache_dtype, scales[0], slack=turned * 2**-7)).all())
    assert bool(error.any()) == (moved != 0)
    assert torch.equal(found_values, held_values)


@pytest.mark.parametrize("isa", ["vec", pytest.param("amx", marks=AVX512)])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("cache_dtype", ["auto", *IN_FP8])
def test_what_each_instruction_set_packs_is_unpacked(cache_dtype: str, head_dim: int, isa: str):
    """Also on CPUs that do not have it: AMX wants values in pairs of tokens, too."""
    keys, values = (
        numbers(64, KV_HEADS, head_dim, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)
    )
    cache = torch.zeros(
        2, KV_HEADS, 32, 2 * head_dim, dtype=torch.uint8 if cache_dtype in FP8 else torch.bfloat16
    )
    halves = cache.view(2, KV_HEADS, 64, head_dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys, values, *halves, torch.arange(64), isa, kv_cache_dtype=cache_dtype
    )
    found = unpack(cache, head_dim, isa, torch.bfloat16, cache_dtype)
    for part, written in zip(found, (keys, values), strict=True):
        held = (
            as_codes(part.contiguous(), cache_dtype).transpose(1, 2).reshape(written.shape).float()
        )
        # towards zero
        limit = (
            2 * bound(written.float(), cache_dtype, 1.0) if cache_dtype in FP8 else torch.zeros(())
        )
        assert bool(((held - written.float()).abs() <= limit).all())


@pytest.mark.parametrize("cache_dtype", get_args(CacheDType))
def test_a_dtype_is_supported_or_refused_by_name(cache_dtype: CacheDType):
    config = configure()
    config.cache_config.cache_dtype = cache_dtype  # vLLM itself has only some of them on a CPU
    if cache_dtype in READABLE:
        check_supported(config, cache_of(spec_of()))
    else:
        assert refusal(config).startswith(f"KV cache dtype {cache_dtype} (")


def test_what_would_mix_or_gain_nothing_is_refused():
    config = configure(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"])
    assert refusal(config).startswith("KV cache dtype of layers ['0'] apart")
    stored = transfer_config(store_ram_gib=1, store_int8=True)
    assert refusal(configure(kv_cache_dtype="fp8", kv_transfer_config=stored)).startswith(
        "store_int8 and KV cache"
    )
    check_supported(configure(kv_transfer_config=stored), cache_of(spec_of()))


@AVX512
def test_scales_by_head_are_refused(monkeypatch: pytest.MonkeyPatch):
    host = make_host("float32", 32, 32, cache_dtype="fp8")
    monkeypatch.setattr(host.attentions[0], "_k_scale", torch.ones(KV_HEADS))
    with pytest.raises(UnsupportedConfiguration, match="a scale for each head"):
        host._check_layout()


def test_vllm_cannot_change_scales_while_it_runs():
    """It could, by `calculate_kv_scales`: what is cached under the old ones would have been another
    number."""
    assert not [field.name for field in fields(CacheConfig) if "scale" in field.name]


def test_another_cache_dtype_is_another_model():
    """What an unquantised cache is known by is what it has always been."""
    configs = [
        configure(kv_transfer_config=transfer(), kv_cache_dtype=name)
        for name in ("auto", "fp8", "fp8_e5m2")
    ]
    for lasting in (False, True):
        names = [model_identity(config, lasting=lasting) for config in configs]
        assert len({*names}) == 3
        assert "torch.float32/fp8" not in names[0]


def test_memory_is_shared_by_bytes():
    """Of keys and values beside residual streams: 4 bytes of a number in float32, or one."""
    settings = transfer_config(residual_layers=[1])
    full, eight = (
        kv_share(configure(kv_transfer_config=settings, kv_cache_dtype=name))
        for name in ("auto", "fp8")
    )
    assert full / (1 - full) == pytest.approx(4 * eight / (1 - eight))


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("e5m2", "bfloat16")),
        "e4m3",
        "scales of the checkpoint",
    ],
)
def kind(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], tuple[float, float]]:
    """A model, vLLM's arguments, and the scales that it must have."""
    if request.param == "scales of the checkpoint":
        scaled = with_kv_scales(model, tmp_path_factory.mktemp("scales"), 0.5, 0.25)
        replace(HeadMap.load(model / HEAD_MAP_FILE), model=identify(scaled)).save(
            scaled / HEAD_MAP_FILE
        )
        return scaled, {}, (0.5, 0.25)
    arguments = {"kv_cache_dtype": "fp8_e5m2" if request.param == "e5m2" else "fp8"}
    return (
        model,
        arguments | ({"dtype": "bfloat16"} if request.param == "bfloat16" else {}),
        (1.0, 1.0),
    )


@pytest.fixture(scope="module")
def plain_tokens(kind: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[int]]]:
    """What vLLM answers with the same cache and without us."""
    process = HostProcess(
        kind[0], tmp_path_factory.mktemp("plain") / "log", with_kvgraft=False, **kind[1]
    )
    yield process.tokens(*PROMPTS)
    process.close()


@pytest.fixture(scope="module")
def found(kind: Any) -> dict[str, Any]:
    """What an engine with our connector says of itself, see `quantised_engine.py`."""
    return dict(warm.run(PROGRAM, {"model": str(kind[0]), "engine": kind[1]}, **ENVIRONMENT))


@AVX512
@pytest.mark.slow
def test_an_engine_with_it_grafts_and_stays_exact(
    kind: Any, plain_tokens: list[list[int]], found: dict[str, Any]
):
    """Recomputing everything answers as plain vLLM with the same cache; grafts are their sources,
    turned."""
    assert found["scales"] == [*kind[2]]
    assert found["recomputed"] == plain_tokens
    assert found["recomputed_grafted"] == [True, True, True, False]
    assert found["recomputed_prefix"] == [0, 96, 0, 0]
    assert found["different_codes"] < 1e-3  # sums in another order, rounded the other way
    for moved in ("-77", "45", "0"):
        graft = found["grafts"][moved]
        assert graft["tokens"] == 288
        assert graft["values"] == 0
        assert graft["keys_over_bound"] == 0
        assert (graft["keys"] == 0) == (moved == "0")
    assert found["poisoned"] is True
    assert found["other_namespace"] == 0
    assert found["exact_cached"] == BLOCK
    assert found["exact"] == found["off"]
    assert found["outcomes"] == ["grafted", "continued", "grafted"]
    assert found["problems"] == []


@AVX512
@pytest.mark.slow
def test_heads_recover_what_the_attention_would_have_stored(
    kind: Any, plain_tokens: list[list[int]], found: dict[str, Any]
):
    """`redknot`: all of it computed, codes and answers are plain vLLM's; what is reused are the
    codes of the graft."""
    by_head = found["by_head"]
    assert by_head["recomputed"] == plain_tokens
    assert by_head["recomputed_grafted"] == [True, True, True, False]
    # its sums, in another order, are rounded before the codes are
    if kind[1].get("dtype") == "bfloat16":
        assert by_head["relative_error"] < 0.03
    else:
        assert by_head["different_codes"] < 1e-3
    grafts = found["grafts_by_head"]
    assert grafts["grafted"] == 288
    assert grafts["reused_but_other"] == 0
    assert grafts["computed_but_same"] < 0.01 * grafts["computed"]


@AVX512
@pytest.mark.soak
def test_a_second_server_goes_on_with_what_the_first_one_stored(tmp_path: Path):
    """Codes are stored, so they come back bit for bit; a server with another cache dtype finds
    nothing of them."""
    known = [*range(10, 400), *range(20, 230)]
    moved = [10, 11, 12, 13, 14, 15, 16, *known[32:]]
    options = [{"policy": "naive"}, EVERYTHING, OFF]

    def run(
        cache_dtype: str, read: list[list[int]], prompts: list[list[int]], **settings: Any
    ) -> Any:
        return graft(prompts, options, read, engine={"kv_cache_dtype": cache_dtype}, **settings)

    store = {"store_dir": str(tmp_path / "store")}
    expected = run("fp8", [known], [moved, known])
    run("fp8", [known], [], **store)
    assert run("fp8_e5m2", [], [moved], **store)[0][0]["report"]["grafted_tokens"] == 0
    found = run("fp8", [], [moved, known], **store)
    assert [answer["tokens"] for answer in found[0]] == [answer["tokens"] for answer in expected[0]]
    assert found[1][-1]["tokens"] == expected[1][-1]["tokens"]
    assert (
        found[0][0]["report"]["grafted_tokens"] == expected[0][0]["report"]["grafted_tokens"] >= 544
    )
    assert found[0][0]["tokens"] != found[0][1]["tokens"]  # else this test shows nothing
    assert found[1][-1]["report"]["prefix_tokens"] == 576
