"""Static rotary position embedding (RoPE), half-split layout: element i rotates with element i +
head_dim / 2.

If only a part of a head rotates (MLA), its pairs are the last of each half, and all others stay
unchanged.

`R(new - old)` moves a cached key from one position to another (SparseX, section 3.1). This is valid
only while the frequencies do not depend on the sequence, so every dynamic kind is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.kv import rope_scaling

# last position of the smallest cached table
LEAST_KEPT = 4095
Kind = Literal["default", "linear", "llama3", "yarn", "longrope"]

# names of Hugging Face `rope_parameters` -> fields of Rope
_FIELDS = {
    "rope_theta": "theta",
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_ORIGINAL = "original_max_position_embeddings"
# required names of each kind
_NEEDED = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("rope_theta", "factor", _ORIGINAL),
    "longrope": ("rope_theta", _ORIGINAL, "short_factor", "long_factor"),
}
# vLLM's names of yarn in DeepSeek's models
_DEEPSEEK = ("deepseek_yarn", "deepseek_llama_scaling")
_OF_YARN = {"mscale", "mscale_all_dim", "attention_factor", "truncate"}
_OF_LONGROPE = {"short_factor", "long_factor", "short_mscale", "long_mscale", "attention_factor"}
_KNOWN = {*_FIELDS, *_OF_YARN, *_OF_LONGROPE, "rope_type", "type", "partial_rotary_factor"}


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies of one model. `factor` serves linear, llama3 and yarn.

    Attributes:
        head_dim: size of a head.
        theta: base of the frequencies.
        low_freq_factor, high_freq_factor: llama3 only.
        original_max_position: number of positions in the first training of the model; llama3 and
            yarn.
        beta_fast, beta_slow, truncate: yarn only.
        factors: longrope only, divisor of each frequency, [num_turning / 2].
        attention_factor: factor of cosine and sine when a host rotates a fresh query or key; 1.0
            except for yarn and longrope. `table` leaves it out, because a shift must not apply it
            again.
        rotary_dim: elements of a head that rotate; None is all.

    Raises:
        ValueError: odd head_dim or rotary_dim, unknown kind, `factors` of another length, or a
            parameter that is not positive and finite.
    """

    head_dim: int
    theta: float = 10000.0
    kind: Kind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotary_dim: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"rope kind {self.kind!r}: allowed are {', '.join(get_args(Kind))} (static "
                "frequencies)"
            )
        if self.head_dim <= 0 or self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: must be positive and even")
        if not 0 < self.num_turning <= self.head_dim or self.num_turning % 2:
            raise ValueError(
                f"rotary_dim {self.rotary_dim}: must be positive, even and at most {self.head_dim}"
            )

        for name in (*_FIELDS.values(), "attention_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"rope {name} {getattr(self, name)}: must be positive and finite")

        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor}: must be below {self.high_freq_factor}"
            )

        num_factors = self.num_turning // 2 if self.kind == "longrope" else 0
        if len(self.factors) != num_factors or not all(
            0 < factor < math.inf for factor in self.factors
        ):
            raise ValueError(
                f"rope factors {self.factors}: must be {num_factors}, positive and finite"
            )

    @property
    def num_turning(self) -> int:
        """Number of elements of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @classmethod
    def from_parameters(
        cls,
        head_dim: int,
        parameters: Mapping[str, Any],
        rotary_dim: int | None = None,
        max_position: int | None = None,
    ) -> "Rope":
        """Read a Hugging Face `rope_parameters` dict (or `rope_scaling` with `rope_theta` added).

        Args:
            max_position: length of the longest prompt. Longrope needs it: beyond the original
                context its long factors serve all prompts, as in vLLM. Divided by that context it
                is the default of `factor`.

        Raises:
            ValueError: a kind that is not static, a partial rotation, an unknown key, or a missing
                key.
        """
        given = {key: value for key, value in parameters.items() if value is not None}
        if unknown := sorted(given.keys() - _KNOWN):
            raise ValueError(f"rope parameters {unknown}: allowed are {sorted(_KNOWN)}")
        if (partial := given.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError(f"partial_rotary_factor {partial}: only 1.0 is supported")

        named = given.get("rope_type", given.get("type", "default"))
        kind: Any = "yarn" if named in _DEEPSEEK else named
        if kind not in _NEEDED:
            raise ValueError(
                f"rope_type {kind!r}: allowed are {', '.join(_NEEDED)} (static frequencies)"
            )
        if missing := [key for key in _NEEDED[kind] if key not in given]:
            raise ValueError(f"rope_type {kind!r} needs {missing}")

        fields = {_FIELDS[key]: given[key] for key in _NEEDED[kind] if key in _FIELDS}
        if kind == "yarn":
            fields |= _yarn(given, deepseek=named != kind)
        elif kind == "longrope":
            fields |= _longrope(given, max_position)

        return cls(head_dim, kind=kind, rotary_dim=rotary_dim, **fields)

    def inverse_frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """Return radians per position, float64 [head_dim / 2]. The tensor is cached per device: do
        not write to it.

        Values are rounded to float32 as in every host. A rotation by `new - old` then uses exactly
        the frequencies with which the host rotated its keys.
        """
        return _inverse_frequencies(self, torch.device(device))

    def table(self, positions: Tensor, longest: int | None = None) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, float32 [n, head_dim / 2], of integer positions [n]. They may be
        negative (shifts).

        Angles are computed in float64, so that they are exact to float32 at positions of millions.

        Args:
            longest: upper bound of all positions (exclusive), if known and none is negative: then
                rows come from a cached table.
        """
        if longest is not None:
            cos, sin = self._kept(longest, positions.device)[:, positions]
            return cos, sin
        frequencies = self.inverse_frequencies(positions.device)
        angles = positions.to(torch.float64)[:, None] * frequencies  # [n, D/2]
        return angles.cos().float(), angles.sin().float()

    def kept_table(self, longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cached table of `table`, float32 [m, head_dim / 2] each: the same tensors for
        all `longest` up to m.
        """
        cos, sin = self._kept(longest, device)
        return cos, sin

    def _kept(self, longest: int, device: torch.device) -> Tensor:
        """Return the cached table as one tensor, float32 [2, m, head_dim / 2]."""
        return _kept_table(self, 1 << max(LEAST_KEPT, longest - 1).bit_length(), device)

    def fresh_table(self, positions: Tensor, longest: int | None = None) -> tuple[Tensor, Tensor]:
        """Return `table` times `attention_factor`, with which a host rotates fresh queries and
        keys.
        """
        cos, sin = self.table(positions, longest)
        if self.attention_factor == 1:
            return cos, sin
        return cos * self.attention_factor, sin * self.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, H, D] by cos, sin [n, D/2], or by the result of `by_head`. Works in float32,
    returns the dtype of x.
    """
    if cos.dim() == 2:
        cos, sin = cos[:, None, None], sin[:, None]
    halves = x.float().unflatten(-1, (2, -1))  # [n, H, 2, D/2]
    turned = halves * cos
    turned[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
    turned[:, :, 1].addcmul_(halves[:, :, 0], sin)
    return turned.flatten(-2).to(x.dtype)


def by_head(cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return tables [n, D/2] expanded to x, [n, H, 2, D/2] and [n, H, D/2]. For many calls of
    `rotate`, whose longest pass then reads contiguous memory.
    """
    return (
        cos[:, None, None].expand(-1, num_heads, 2, -1).contiguous(),
        sin[:, None].expand(-1, num_heads, -1).contiguous(),
    )


def rotate_part(
    x: Tensor, cos: Tensor, sin: Tensor, first: int = 0, interleaved: bool = False
) -> Tensor:
    """Rotate some channels of x [n, H, D] as `rotate` does: those from `first` on for which the
    tables are.

    Args:
        interleaved: pair channel 2i of these with 2i + 1, instead of the one in the other half.
    """
    stop = first + 2 * cos.shape[-1]
    # most models rotate all channels, so no part is copied
    if first == 0 and stop == x.shape[-1] and not interleaved:
        return rotate(x, cos, sin)
    turning = x[..., first:stop]
    if interleaved:
        turned = rotate(turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)
        turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    else:
        turned = rotate(turning, cos, sin)
    return torch.cat((x[..., :first], turned, x[..., stop:]), -1)


@lru_cache(maxsize=8)
def _kept_table(rope: Rope, size: int, device: torch.device) -> Tensor:
    """Return `table` of the positions below `size`, float32 [2, size, head_dim / 2]."""
    return torch.stack(rope.table(torch.arange(size, device=device)))


@lru_cache(maxsize=64)
def _inverse_frequencies(rope: Rope, device: torch.device) -> Tensor:
    exponents = (
        torch.arange(0, rope.num_turning, 2, dtype=torch.float32, device="cpu") / rope.num_turning
    )
    frequencies = _stretched(rope, rope.theta**exponents)
    still = (rope.head_dim - rope.num_turning) // 2
    return F.pad(frequencies, (still, 0)).to(device, torch.float64)


def _stretched(rope: Rope, periods: Tensor) -> Tensor:
    """Return radians per position for the kind, from positions per radian, float32 [num_turning /
    2].
    """
    match rope.kind:
        case "linear":
            return 1.0 / periods / rope.factor
        case "llama3":
            bounds = rope.low_freq_factor, rope.high_freq_factor
            return rope_scaling.llama3(periods, rope.factor, *bounds, rope.original_max_position)
        case "yarn":
            bounds, where = (
                (rope.beta_fast, rope.beta_slow),
                (rope.original_max_position, rope.truncate),
            )
            return rope_scaling.yarn(periods, rope.theta, rope.factor, *bounds, *where)
        case "longrope":
            return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32, device="cpu") * periods)
    return 1.0 / periods


def _yarn(given: Mapping[str, Any], deepseek: bool) -> dict[str, Any]:
    """Return the optional fields of yarn. vLLM ignores `truncate` in DeepSeek's models."""
    betas = {key: given[key] for key in ("beta_fast", "beta_slow") if given.get(key)}
    attention_factor = rope_scaling.yarn_attention_factor(given, deepseek)
    return betas | {
        "truncate": deepseek or bool(given.get("truncate", True)),
        "attention_factor": attention_factor,
    }


def _longrope(given: Mapping[str, Any], max_position: int | None) -> dict[str, Any]:
    """Return the fields of longrope."""
    if max_position is None:
        raise ValueError(
            "rope_type 'longrope': its frequencies depend on the longest prompt, which is not "
            "fixed here"
        )
    which = "long" if max_position > given[_ORIGINAL] else "short"
    attention_factor = given.get(f"{which}_mscale", given.get("attention_factor"))
    if attention_factor is None:
        factor = given.get("factor", max_position / given[_ORIGINAL])
        attention_factor = rope_scaling.longrope_attention_factor(factor, given[_ORIGINAL])
    return {"factors": tuple(given[f"{which}_factor"]), "attention_factor": attention_factor}
