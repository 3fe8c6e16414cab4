"""Rotation of each layer's keys by position: delta-RoPE on vLLM's cache, for every family
(SparseX 3.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig

from kvgraft.kv.rope import Rope, rotate_part

# parameters of multimodal RoPE alone
M_ROPE = ("mrope_section", "mrope_interleaved")
# cosines and sines [n, d / 2] of shifts; None where nothing rotates
Angles = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class KeyRotation:
    """Channels of a layer's keys that rotate, and their frequencies.

    Attributes:
        rope: frequencies of these channels; None where keys have no position (NoPE).
        first: first of these channels.
        interleaved: True if channel 2i rotates with 2i + 1; False if with its partner in the other
            half.
    """

    rope: Rope | None
    first: int = 0
    interleaved: bool = False

    @property
    def is_plain(self) -> bool:
        """True if all channels rotate, in halves."""
        return self.rope is not None and self.first == 0 and not self.interleaved

    def angles(self, shifts: Tensor) -> Angles:
        """Return the angles of shifts int64 [n], equal for all layers with an equal rotation."""
        return None if self.rope is None else self.rope.table(shifts)

    def turn(self, keys: Tensor, angles: Angles) -> Tensor:
        """Return keys [n, Hkv, d], or differences of keys, rotated by these angles.

        Args:
            angles: result of `angles`, or of `by_head`.
        """
        return keys if angles is None else rotate_part(keys, *angles, self.first, self.interleaved)


def rotation_of(config: VllmConfig, rotary: Any, layer: int, head_dim: int) -> KeyRotation:
    """Return the key rotation of a layer, from the model's config.

    Args:
        rotary: module of vLLM or transformers that rotates them; None if nothing does.
        layer: number of the layer.
        head_dim: channels of a cached key.

    Raises:
        ValueError: the frequencies are not static.
    """
    if rotary is None:
        return KeyRotation(None)
    size = int(getattr(rotary, "rotary_dim", head_dim))
    # The module may cover only the last channels of a head.
    within = int(getattr(rotary, "head_size", head_dim))
    parameters = _rope_parameters(config.model_config.hf_text_config, layer)
    # The module knows how many channels rotate.
    parameters.pop("partial_rotary_factor", None)
    rope = Rope.from_parameters(size, parameters, max_position=config.model_config.max_model_len)
    return KeyRotation(rope, head_dim - within, not getattr(rotary, "is_neox_style", True))


def check_rope(config: VllmConfig, layer: int) -> None:
    """Raise ValueError if the frequencies of a layer are not static.

    This works before the model is loaded.
    """
    model = config.model_config
    given = _rope_parameters(model.hf_text_config, layer)
    size = int(model.get_head_size() * (given.pop("partial_rotary_factor", None) or 1.0))
    Rope.from_parameters(size, given, max_position=model.max_model_len)


def _rope_parameters(text: Any, layer: int) -> dict[str, Any]:
    """Return the RoPE parameters of a layer.

    Families with windows have some for each kind of layer.
    """
    given: Mapping[str, Any] = text.rope_parameters or {}
    kinds = getattr(text, "layer_types", None) or ()
    if kinds and set(given) & set(kinds):
        given = given[kinds[layer]]
    # M-RoPE gives the tokens of a text three equal positions, which is plain RoPE.
    return {
        key: "default" if value == "mrope" else value
        for key, value in given.items()
        if key not in M_ROPE
    }
