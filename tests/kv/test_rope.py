import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvgraft.kv.rope import Rope, rotate

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
DEEPSEEK = YARN | {"rope_theta": 10000, "factor": 40, "original_max_position_embeddings": 4096}
PARAMETERS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3,
    LLAMA3 | {"rope_theta": 10000.0, "factor": 32.0},
    YARN,
    YARN
    | {
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    YARN
    | {
        "beta_fast": 20,
        "beta_slow": 2.5,
        "attention_factor": 1.25,
        "mscale": 1.0,
        "mscale_all_dim": 2.0,
    },
    YARN | {"beta_fast": 1.01, "beta_slow": 1.0},
    DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1},
    DEEPSEEK | {"mscale": 0.707, "mscale_all_dim": 0.707},
]


def llama(head_dim: int, parameters: dict) -> LlamaConfig:
    return LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        rope_parameters=dict(parameters),
        max_position_embeddings=131072,
    )


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_frequencies_are_those_of_transformers(head_dim: int, parameters: dict) -> None:
    config = llama(head_dim, parameters)
    if parameters["rope_type"] == "default":
        expected, scaling = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    rope = Rope.from_parameters(head_dim, config.rope_parameters)
    assert rope.inverse_frequencies().dtype == torch.float64
    assert torch.equal(rope.inverse_frequencies(), expected.double())
    assert rope.attention_factor == scaling


def longrope(head_dim: int) -> dict:
    """As Phi-3's, its factors rising."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1 + 0.01 * i for i in range(head_dim // 2)],
        "long_factor": [1 + 0.7 * i for i in range(head_dim // 2)],
    }


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"attention_factor": 1.5}])
@pytest.mark.parametrize("max_position", [4096, 4097, 131072])
def test_longrope_is_that_of_transformers_at_its_longest_prompt(
    max_position: int, more: dict
) -> None:
    config = llama(80, longrope(80) | more)
    config.max_position_embeddings = max_position
    expected, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=max_position)
    rope = Rope.from_parameters(80, config.rope_parameters, max_position=max_position)
    assert torch.equal(rope.inverse_frequencies(), expected.double())
    assert rope.attention_factor == pytest.approx(scaling, rel=1e-12)
    assert hash(rope) == hash(
        Rope.from_parameters(80, config.rope_parameters, max_position=max_position)
    )


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_rotation_is_that_of_transformers(parameters: dict) -> None:
    x = torch.randn(63, 2, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(63)
    cos, sin = LlamaRotaryEmbedding(llama(64, parameters))(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    turned = rotate(x, *Rope.from_parameters(64, parameters).fresh_table(positions))
    # theirs: float32 angles
    torch.testing.assert_close(turned, expected[0].transpose(0, 1), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "parameters", [YARN, DEEPSEEK | {"rope_type": "deepseek_yarn"}, longrope(80)]
)
def test_a_fresh_key_moves_by_a_shift_without_its_factor(parameters: dict) -> None:
    rope = Rope.from_parameters(80, parameters, max_position=8192)
    assert rope.attention_factor > 1
    x = torch.randn(5, 2, 80, generator=torch.Generator().manual_seed(1))
    old, new = torch.tensor([0, 3, 100, 900, 8000]), torch.tensor([7, 3, 50, 8000, 1])
    moved = rotate(rotate(x, *rope.fresh_table(old)), *rope.table(new - old))
    torch.testing.assert_close(moved, rotate(x, *rope.fresh_table(new)), atol=3e-6, rtol=1e-6)
    torch.testing.assert_close(
        moved.norm(dim=-1), rope.attention_factor * x.norm(dim=-1), atol=0, rtol=1e-6
    )


def test_deepseek_yarn_grows_by_mscale_alone() -> None:
    """vLLM: `mscale` 1 and `mscale_all_dim` 0 unless given, no other factor."""
    parameters = DEEPSEEK | {
        "rope_type": "deepseek_yarn",
        "attention_factor": 3.0,
        "truncate": False,
    }
    grown = Rope.from_parameters(64, parameters | {"mscale": 0.707})
    assert grown.attention_factor == pytest.approx(1 + 0.0707 * math.log(40))
    assert Rope.from_parameters(64, parameters).attention_factor == pytest.approx(
        1 + 0.1 * math.log(40)
    )
    same = Rope.from_parameters(64, DEEPSEEK).inverse_frequencies()
    assert torch.equal(grown.inverse_frequencies(), same)


def test_longrope_may_name_its_factor_by_list() -> None:
    parameters = longrope(64) | {"short_mscale": 1.1, "long_mscale": 1.2, "attention_factor": 3.0}
    short, long = (Rope.from_parameters(64, parameters, max_position=n) for n in (4096, 4097))
    assert (short.attention_factor, long.attention_factor) == (1.1, 1.2)


@settings(deadline=None, derandomize=True)
@given(st.integers(-1_000_000, 1_000_000), st.integers(-1_000_000, 1_000_000))
def test_rotations_add_up_and_keep_the_norm(a: int, b: int) -> None:
    rope = Rope(80, theta=500000.0)
    x = torch.randn(3, 2, 80, generator=torch.Generator().manual_seed(1))
    both = rotate(x, *rope.table(torch.full((3,), a + b)))
    torch.testing.assert_close(
        rotate(rotate(x, *turn(rope, a)), *turn(rope, b)), both, atol=3e-6, rtol=0
    )
    torch.testing.assert_close(both.norm(dim=-1), x.norm(dim=-1), atol=0, rtol=1e-6)


def turn(rope: Rope, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rope.table(torch.full((3,), shift))


def test_table_is_exact_at_positions_of_millions() -> None:
    """The first frequency is one radian per position, so its angle is the position itself."""
    positions = torch.tensor([0, 7, -7, 1_000_000, -16_777_217])
    cos, sin = Rope(64).table(positions)
    assert cos.shape == sin.shape == (5, 32)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos[:, 0], positions.double().cos().float())
    assert torch.equal(sin[:, 0], positions.double().sin().float())


def test_rotate_keeps_the_dtype_and_is_nothing_at_zero() -> None:
    x = torch.randn(2, 1, 32).bfloat16()
    turned = rotate(x, *Rope(32).table(torch.zeros(2, dtype=torch.int64)))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, x)


def test_frequencies_are_computed_once_for_equal_ropes() -> None:
    assert Rope(64).inverse_frequencies() is Rope(64).inverse_frequencies("cpu")
    assert Rope(64).inverse_frequencies() is not Rope(64, theta=5.0).inverse_frequencies()


def test_older_names_and_absent_values_are_read() -> None:
    older = {"type": "linear", "rope_theta": 10000.0, "factor": 2.0, "low_freq_factor": None}
    assert Rope.from_parameters(64, older) == Rope(64, kind="linear", factor=2.0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        *[
            ({"rope_type": kind, "rope_theta": 1.0, "factor": 2.0}, kind)
            for kind in ("dynamic", "ntk", "proportional")
        ],
        (
            {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0},
            "original_max_position_embeddings",
        ),
        (YARN | {"beta_fast": -1.0}, "beta_fast -1.0"),
        (YARN | {"attention_factor": 0.0}, "attention_factor 0.0"),
        (longrope(64), "longest prompt"),
        (
            {"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5",
        ),
        ({"rope_type": "default", "rope_theta": 1.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default"}, "rope_theta"),
        (
            {"rope_type": "llama3", "rope_theta": 1.0, "factor": 8.0},
            "original_max_position_embeddings",
        ),
    ],
)
def test_parameters_that_are_refused(parameters: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rope.from_parameters(64, parameters)


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 63},
        {"head_dim": 0},
        {"head_dim": 64, "theta": 0.0},
        {"head_dim": 64, "theta": float("nan")},
        {"head_dim": 64, "factor": -1.0},
        {"head_dim": 64, "kind": "dynamic"},
        {"head_dim": 64, "kind": "longrope", "factors": (1.0,) * 31},
        {"head_dim": 64, "kind": "longrope", "factors": (1.0,) * 31 + (0.0,)},
        {"head_dim": 64, "factors": (1.0,) * 32},
        {"head_dim": 64, "low_freq_factor": 4.0},
    ],
)
def test_fields_that_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match=r"must be|allowed"):
        Rope(**fields)
