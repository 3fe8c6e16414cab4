"""Quantised weights, as far as vLLM computes with them on a CPU: exact where it must be, grafts are
sources moved.

Engines are in processes of their own, since a process can have one with our connector.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from engines import BLOCK, ENVIRONMENT
from processes import HostProcess
from quantised_engine import PROMPTS
from test_compat import cache_of, configure, spec_of

from kvgraft.engine.checkpoint import UnsupportedModel, identify
from kvgraft.engine.config import load_config
from kvgraft.vllm.compat.support import check_supported, model_identity
from models import make_model
from quantised_models import AVX512, KINDS, quantise

PROGRAM = Path(__file__).with_name("quantised_engine.py")
# the kernels of the others, and all that use AMX, are for half precision
IN_FLOAT32 = ("int8", "compressed fp8")
RUN = [
    pytest.param("awq", marks=AVX512),
    "int8",
    *(pytest.param(kind, marks=[pytest.mark.soak, AVX512]) for kind in ("gptq", "int4")),
    pytest.param("compressed fp8", marks=pytest.mark.soak),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source"), "qwen3", max_position_embeddings=4096)


@pytest.fixture(scope="module", params=RUN)
def arguments(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and what vLLM needs to be told."""
    directory = quantise(source, tmp_path_factory.mktemp("quantised"), request.param)
    in_float32 = request.param in IN_FLOAT32 and not torch.cpu._is_amx_tile_supported()
    return directory, {"dtype": "float32" if in_float32 else "bfloat16"}


@pytest.fixture(scope="module")
def plain_tokens(
    arguments: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[list[int]]]:
    """What vLLM answers without us."""
    log = tmp_path_factory.mktemp("plain") / "log"
    process = HostProcess(arguments[0], log, with_kvgraft=False, **arguments[1])
    yield process.tokens(*PROMPTS)
    process.close()


@pytest.mark.slow
def test_an_engine_with_them_grafts_and_stays_exact(arguments: Any, plain_tokens: list[list[int]]):
    found = warm.run(PROGRAM, {"model": str(arguments[0]), "engine": arguments[1]}, **ENVIRONMENT)
    assert found["recomputed"] == plain_tokens
    assert found["recomputed_grafted"] == [True, True, True, False]
    for moved in ("-77", "45", "0"):
        graft = found["grafts"][moved]
        assert graft["tokens"] == 288
        assert graft["values"] == graft["keys_over_bound"] == 0
        assert (graft["keys"] == 0) == (moved == "0")
    assert found["poisoned"] is True
    assert found["other_namespace"] == 0
    assert found["exact_cached"] == BLOCK
    assert found["exact"] == found["off"]
    assert found["outcomes"] == ["grafted", "continued", "grafted"]
    assert found["problems"] == []


@pytest.mark.slow
def test_vllm_itself_has_no_kernel_for_scales_by_tensor_in_fp8(source: Path, tmp_path: Path):
    """On a CPU without AMX: it ends when it loads such a checkpoint, with or without us."""
    directory = quantise(source, tmp_path / "model", "fp8")
    process = HostProcess(directory, tmp_path / "log", with_kvgraft=False, dtype="bfloat16")
    with pytest.raises(RuntimeError, match="static_scaled_fp8_quant"):
        process.tokens(PROMPTS[3])
    process.close()


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_vllm_itself_refuses_four_bits_in_float32(source: Path, tmp_path: Path, kind: str):
    with pytest.raises(ValueError, match="float32 is not supported for quantization method"):
        configure(model=str(quantise(source, tmp_path, kind)), dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_every_checkpoint_is_identified(source: Path, tmp_path: Path, kind: str):
    """For store, profile and head map, though the native engine cannot compute with it."""
    directory = quantise(source, tmp_path / "one", kind)
    config = configure(model=str(directory), dtype="bfloat16")
    check_supported(config, cache_of(spec_of()))
    assert model_identity(config, lasting=True).startswith(identify(directory))
    again = quantise(source, tmp_path / "again", kind)
    assert identify(again) == identify(directory) != identify(source)
    with pytest.raises(UnsupportedModel, match="quantized"):
        load_config(directory)
