"""Tiny quantised checkpoints, written as the tools that people use write them, from a tiny random
model.

Weights are rounded to nearest, in groups of input channels where the format has groups.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32  # input channels that share a scale
INT4 = 15  # the largest unsigned number in four bits
# which output channel lies in each four bits of a word, from the lowest
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
Tensors = dict[str, Tensor]
AVX512 = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason=(
        "this CPU has no AVX-512: vLLM has no FP8 KV cache and no kernels for four bits, and "
        "cannot pack for AMX"
    ),
)
IN_FP8 = [pytest.param(name, marks=AVX512) for name in ("fp8_e4m3", "fp8_e5m2")]


def quantise(source: Path, directory: Path, kind: str) -> Path:
    """The model at `source`, its linear layers quantised as KINDS says."""
    linear, config = KINDS[kind]
    tensors: Tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("proj.weight"):
            tensors |= {
                f"{name.removesuffix('weight')}{part}": t
                for part, t in linear(weight.float()).items()
            }
        else:
            tensors[name] = weight
    return _write(source, directory, tensors, config)


def with_kv_scales(source: Path, directory: Path, keys: float, values: float) -> Path:
    """The model at `source`, which asks for an FP8 KV cache with these scales in every layer."""
    tensors = load_file(source / "model.safetensors")
    for layer in range(json.loads((source / "config.json").read_text())["num_hidden_layers"]):
        for name, scale in (("k", keys), ("v", values)):
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([scale])
    kept = {
        "config_groups": {},
        "format": "naive-quantized",
        "kv_cache_scheme": KV_SCHEME,
        "ignore": ["lm_head"],
    }
    return _write(source, directory, tensors, _compressed(**kept))


def _int8(weight: Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _fp8(weight: Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.reshape(1)}


def _fp8_channels(weight: Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _gptq(weight: Tensor) -> Tensors:
    numbers, scales, zeros = _in_four_bits(weight, symmetric=True)
    inputs = numbers.shape[0]
    return {
        "qweight": _packed(numbers.view(inputs // 8, 8, -1).transpose(1, 2)),  # [K / 8, N]
        # as version 1 of the format has them: less one
        "qzeros": _packed(zeros.sub(1).unflatten(1, (-1, 8))),
        "scales": scales.to(torch.float16),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def _awq(weight: Tensor) -> Tensors:
    numbers, scales, zeros = _in_four_bits(weight, symmetric=False)
    qweight, qzeros = (
        _packed(part.unflatten(1, (-1, 8))[..., AWQ_ORDER]) for part in (numbers, zeros)
    )
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.to(torch.float16)}


def _int4(weight: Tensor) -> Tensors:
    numbers, scales, _ = _in_four_bits(weight, symmetric=True)
    packed = _packed(numbers.t().unflatten(1, (-1, 8)))  # [N, K / 8]
    return {
        "weight_packed": packed,
        "weight_scale": scales.t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _in_four_bits(weight: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of a weight [N, K]: numbers int32 [K, N], scales [K / GROUP, N] and zero points int32 [K /
    GROUP, N]."""
    groups = weight.t().unflatten(0, (-1, GROUP))  # [G, GROUP, N]
    if symmetric:
        scales = groups.abs().amax(1) / 7
        zeros = torch.full_like(scales, 8)
    else:
        low, high = groups.amin(1), groups.amax(1)
        scales = (high - low) / INT4
        zeros = (-low / scales).round().clamp(0, INT4)
    numbers = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, INT4)
    return numbers.flatten(0, 1).int(), scales, zeros.int()


def _packed(numbers: Tensor) -> Tensor:
    """[..., 8] numbers of four bits -> int32 [...], the first one lowest."""
    words = (numbers.long() << torch.arange(0, 32, 4)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def _compressed(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", **fields}


def _group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "group_0": {
            "targets": ["Linear"],
            "weights": dict(weights),
            "input_activations": inputs and dict(inputs),
        }
    }


def _numbers(kind: str, bits: int, strategy: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    } | fields


def _write(
    source: Path, directory: Path, tensors: Tensors, quantisation: Mapping[str, Any]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {
        "quantization_config": dict(quantisation)
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


KINDS: dict[str, tuple[Callable[[Tensor], Tensors], dict[str, Any]]] = {
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
    "version": "gemm"}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True,
    "desc_act": False}),
    "int8": (
        _int8,
        _compressed(
            format="int-quantized",
            ignore=["lm_head"],
            config_groups=_group(_numbers("int", 8, "channel"), _numbers("int", 8, "token",
            dynamic=True)),
        ),
    ),
    "int4": (
        _int4,
        _compressed(
            format="pack-quantized",
            ignore=["lm_head"],
            config_groups=_group(_numbers("int", 4, "group", group_size=GROUP), None),
        ),
    ),
    "fp8": (_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "compressed fp8": (
        _fp8_channels,
        _compressed(
            format="float-quantized",
            ignore=["lm_head"],
            config_groups=_group(_numbers("float", 8, "channel"), _numbers("float", 8, "token",
            dynamic=True)),
        ),
    ),
}  # fmt: skip
