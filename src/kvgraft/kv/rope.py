"""Static rotary position embedding (RoPE), half-split layout: element i turns with element i + head_dim / 2.

Where only a part of a head turns (MLA), its pairs are the last of each half, and all others stand still.

`R(new - old)` moves a cached key from one position to another (SparseX, section 3.1). That holds only while
the frequencies do not depend on the sequence, so every dynamic kind is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["default", "linear", "llama3"]

# the names of Hugging Face `rope_parameters` -> the fields of Rope
_FIELDS = {
    "rope_theta": "theta",
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
_NEEDED = {"default": 1, "linear": 2, "llama3": 5}  # how many of the names above each kind reads
_KNOWN = {*_FIELDS, "rope_type", "type", "partial_rotary_factor"}


@dataclass(frozen=True)
class Rope:
    """The rotary frequencies of one model. `factor` serves linear and llama3, the fields below it llama3 only.

    Attributes:
        rotary_dim: elements of a head that turn; None is all.

    Raises:
        ValueError: odd head_dim or rotary_dim, unknown kind, or a parameter that is not positive and finite.
    """

    head_dim: int
    theta: float = 10000.0
    kind: Kind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"rope kind {self.kind!r}: allowed are {', '.join(get_args(Kind))} (static frequencies)")
        if self.head_dim <= 0 or self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: must be positive and even")
        if not 0 < self.num_turning <= self.head_dim or self.num_turning % 2:
            raise ValueError(f"rotary_dim {self.rotary_dim}: must be positive, even and at most {self.head_dim}")
        for name in _FIELDS.values():
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"rope {name} {getattr(self, name)}: must be positive and finite")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor {self.low_freq_factor}: must be below {self.high_freq_factor}")

    @property
    def num_turning(self) -> int:
        """Elements of a head that turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @classmethod
    def from_parameters(cls, head_dim: int, parameters: Mapping[str, Any], rotary_dim: int | None = None) -> "Rope":
        """Read a Hugging Face `rope_parameters` dict (or `rope_scaling` with its `rope_theta` put in).

        Raises:
            ValueError: a kind that is not static, a partial rotation, an unknown key, or a key that the kind lacks.
        """
        given = {key: value for key, value in parameters.items() if value is not None}
        if unknown := sorted(given.keys() - _KNOWN):
            raise ValueError(f"rope parameters {unknown}: allowed are {sorted(_KNOWN)}")
        if (partial := given.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError(f"partial_rotary_factor {partial}: only 1.0 is supported")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _NEEDED:
            raise ValueError(f"rope_type {kind!r}: allowed are {', '.join(_NEEDED)} (static frequencies)")
        needed = list(_FIELDS)[: _NEEDED[kind]]
        if missing := [key for key in needed if key not in given]:
            raise ValueError(f"rope_type {kind!r} needs {missing}")
        return cls(head_dim, kind=kind, rotary_dim=rotary_dim, **{_FIELDS[key]: given[key] for key in needed})

    def inverse_frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """Radians per position, float64 [head_dim / 2], cached per device: do not write to it.

        The values are rounded to float32, as every host computes them, so that a rotation by `new - old` uses
        the very frequencies by which the host rotated its keys.
        """
        return _inverse_frequencies(self, torch.device(device))

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32 [n, head_dim / 2], of integer positions [n], which may be negative (shifts).

        Angles are taken in float64, so that they are exact to float32 at positions of millions.
        """
        frequencies = self.inverse_frequencies(positions.device)
        angles = positions.to(torch.float64)[:, None] * frequencies  # [n, D/2]
        return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, H, D] by cos, sin [n, D/2]; computed in float32, returned in the dtype of x."""
    first, second = x.float().chunk(2, dim=-1)  # [n, H, D/2] each
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@lru_cache(maxsize=64)
def _inverse_frequencies(rope: Rope, device: torch.device) -> Tensor:
    exponents = torch.arange(0, rope.num_turning, 2, dtype=torch.float32, device="cpu") / rope.num_turning
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _smooth(rope, frequencies)
    still = (rope.head_dim - rope.num_turning) // 2
    return F.pad(frequencies, (still, 0)).to(device, torch.float64)


def _smooth(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3: keep short wavelengths, divide long ones by `factor`, interpolate between."""
    turns = rope.original_max_position / (2 * math.pi / frequencies)  # in the original context
    share = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - share) * frequencies / rope.factor + share * frequencies
