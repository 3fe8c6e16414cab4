"""How exact reindexing is: keys turned by delta-RoPE, against keys rotated where they now stand
(H4)."""

from math import nan

import torch

from kvgraft.kernels.dispatch import align_copy
from kvgraft.kv.rope import Rope, rotate
from research.cross_query.verdict import FAILS, HOLDS, Verdict

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BAR_EPS = 8  # of the dtype: two roundings and two rotations may each lose one or two
_HEADS = 4


def max_error(rope: Rope, num_positions: int, dtype: torch.dtype, seed: int = 0) -> float:
    """Greatest error of a pair that turns together, relative to its length: every position as the
    new one, for keys from the first position, the last one, and a drawn one; through the kernel
    that grafts."""
    draw = torch.Generator().manual_seed(seed)
    new = torch.arange(num_positions)
    keys = torch.randn(num_positions, _HEADS, rope.head_dim, generator=draw).to(dtype)
    truth = rotate(keys, *rope.table(new)).float()
    worst = 0.0
    for old in (torch.zeros_like(new), new.flip(0), torch.full_like(new, num_positions - 1),
                torch.randint(num_positions, (num_positions,), generator=draw)):  # fmt: skip
        # [1, 2 T, H, D]
        pool = torch.cat((rotate(keys, *rope.table(old)), torch.zeros_like(keys)))[None]
        source, target = new, new + num_positions
        align_copy(pool, None, range(1), source, target, *rope.table(new - old))
        error = _pairs(pool[0, num_positions:].float() - truth) / _pairs(truth).clamp(min=1e-6)
        worst = max(worst, float(error.max()))
    return worst


def judge_reindexing(rope: Rope, num_positions: int) -> list[Verdict]:
    """A verdict for each dtype."""
    found = []
    for name, dtype in DTYPES.items():
        error, bar = max_error(rope, num_positions, dtype), BAR_EPS * torch.finfo(dtype).eps
        details: dict[str, float | str] = {
            "positions": num_positions,
            "epsilons": error / torch.finfo(dtype).eps,
        }
        found.append(
            Verdict(
                "H4", f"reindexed keys, {name}: greatest relative error", "-", "-", error, nan, nan,
                f"<= {bar:.2g}", HOLDS if error <= bar else FAILS, num_positions, details,
            )
        )  # fmt: skip
    return found


def _pairs(keys: torch.Tensor) -> torch.Tensor:
    """Lengths of the pairs that turn together: [n, H, D] -> [n, H, D / 2]."""
    return torch.stack(keys.chunk(2, dim=-1)).norm(dim=0)
