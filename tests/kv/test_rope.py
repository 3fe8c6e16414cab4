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
PARAMETERS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3,
    LLAMA3 | {"rope_theta": 10000.0, "factor": 32.0},
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
        expected = LlamaRotaryEmbedding(config).inv_freq
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
        assert scaling == 1.0
    frequencies = Rope.from_parameters(head_dim, config.rope_parameters).inverse_frequencies()
    assert frequencies.dtype == torch.float64
    assert torch.equal(frequencies, expected.double())


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_rotation_is_that_of_transformers(parameters: dict) -> None:
    x = torch.randn(63, 2, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(63)
    cos, sin = LlamaRotaryEmbedding(llama(64, parameters))(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    turned = rotate(x, *Rope.from_parameters(64, parameters).table(positions))
    torch.testing.assert_close(turned, expected[0].transpose(0, 1), atol=2e-5, rtol=0)  # theirs: float32 angles


@settings(deadline=None, derandomize=True)
@given(st.integers(-1_000_000, 1_000_000), st.integers(-1_000_000, 1_000_000))
def test_rotations_add_up_and_keep_the_norm(a: int, b: int) -> None:
    rope = Rope(80, theta=500000.0)
    x = torch.randn(3, 2, 80, generator=torch.Generator().manual_seed(1))
    both = rotate(x, *rope.table(torch.full((3,), a + b)))
    torch.testing.assert_close(rotate(rotate(x, *turn(rope, a)), *turn(rope, b)), both, atol=3e-6, rtol=0)
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
        *[({"rope_type": kind, "rope_theta": 1.0, "factor": 2.0}, kind) for kind in ("dynamic", "yarn", "longrope")],
        ({"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_type": "default", "rope_theta": 1.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "llama3", "rope_theta": 1.0, "factor": 8.0}, "original_max_position_embeddings"),
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
        {"head_dim": 64, "kind": "yarn"},
        {"head_dim": 64, "low_freq_factor": 4.0},
    ],
)
def test_fields_that_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match=r"must be|allowed"):
        Rope(**fields)
