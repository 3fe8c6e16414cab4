"""How long the sequences of a step are."""

from typing import Any

from torch import Tensor


def lengths_of(common: Any) -> Tensor:
    """Tokens of each request of vLLM's common metadata, int64 on the CPU: without drafts vLLM knows
    them there, and nobody waits for a device."""
    known = getattr(common, "seq_lens_cpu_upper_bound", None)
    found: Tensor = (common.seq_lens if known is None else known).cpu().long()
    return found
