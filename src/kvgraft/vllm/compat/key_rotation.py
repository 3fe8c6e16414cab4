"""How the keys of each layer turn with their position: delta-RoPE on vLLM's cache, for every family
(SparseX 3.1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig

from kvgraft.kv.rope import Rope, rotate_part

# cosines and sines [n, d / 2] of shifts; None where nothing turns
Angles = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class KeyRotation:
    """The channels of a layer's keys that turn, and how fast.

    Attributes:
        rope: frequencies of these channels; None where keys know no position (NoPE).
        first: of these channels.
        interleaved: whether channel 2i turns with 2i + 1, not i with the one in the other half.
    """

    rope: Rope | None
    first: int = 0
    interleaved: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all channels turn, in halves."""
        return self.rope is not None and self.first == 0 and not self.interleaved

    def angles(self, shifts: Tensor) -> Angles:
        """Of shifts int64 [n]; the same for all layers that turn alike."""
        return None if self.rope is None else self.rope.table(shifts)

    def turn(self, keys: Tensor, angles: Angles) -> Tensor:
        """Keys [n, Hkv, d], or differences of such, turned by these angles, or by what `by_head`
        made of them."""
        return keys if angles is None else rotate_part(keys, *angles, self.first, self.interleaved)


def rotation_of(config: VllmConfig, rotary: Any, layer: int, head_dim: int) -> KeyRotation:
    """How the keys of a layer turn, by the model's config.

    Args:
        rotary: vLLM's module that rotates them, or that of transformers; None if nothing does.
        head_dim: of a cached key.

    Raises:
        ValueError: frequencies that are not static.
    """
    if rotary is None:
        return KeyRotation(None)
    size = int(getattr(rotary, "rotary_dim", head_dim))
    # less where only the last channels are its business
    within = int(getattr(rotary, "head_size", head_dim))
    parameters = _rope_parameters(config.model_config.hf_text_config, layer)
    parameters.pop("partial_rotary_factor", None)  # the module knows how many channels turn
    rope = Rope.from_parameters(size, parameters, max_position=config.model_config.max_model_len)
    return KeyRotation(rope, head_dim - within, not getattr(rotary, "is_neox_style", True))


def check_rope(config: VllmConfig, layer: int) -> None:
    """Raise ValueError if the frequencies of a layer are not static: before there is a module that
    knows them."""
    model = config.model_config
    given = _rope_parameters(model.hf_text_config, layer)
    size = int(model.get_head_size() * (given.pop("partial_rotary_factor", None) or 1.0))
    Rope.from_parameters(size, given, max_position=model.max_model_len)


def _rope_parameters(text: Any, layer: int) -> dict[str, Any]:
    """Those of a layer: families with windows have some for each kind of layer."""
    given: Mapping[str, Any] = text.rope_parameters or {}
    kinds = getattr(text, "layer_types", None) or ()
    if kinds and set(given) & set(kinds):
        given = given[kinds[layer]]
    return dict(given)
