"""Sequence lengths of the requests in a step."""

from typing import Any

from torch import Tensor


def lengths_of(common: Any) -> Tensor:
    """Return the tokens of each request in vLLM's common metadata, int64 on the CPU.

    Without drafts vLLM knows them on the CPU, so no device is waited for.
    """
    known = getattr(common, "seq_lens_cpu_upper_bound", None)
    found: Tensor = (common.seq_lens if known is None else known).cpu().long()
    return found
