"""Agreement of tensor-parallel ranks on the success of their common work."""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group
from vllm.platforms import current_platform

from kvgraft.prefill.context import Reduction

logger = logging.getLogger("kvgraft")
# seconds between the first and the last rank that ends a piece of work
AGREEMENT_SECONDS = 10.0


def all_succeeded(success: bool) -> bool:
    """Return True if this rank and all others have succeeded.

    Each rank calls this when a piece of work has ended, in success or failure. A rank that failed
    alone comes here while others wait for it in a collective inside of vLLM's layers, which cannot
    be cancelled. If not all have come after AGREEMENT_SECONDS, this process ends. vLLM's executor
    then ends the other ranks and the engine, and clients get an error.
    """
    if get_tensor_model_parallel_world_size() == 1:
        return success

    verdict = torch.tensor([success], dtype=torch.int32)
    try:
        if current_platform.is_cuda_alike():
            # Work that is only queued is not done.
            torch.cuda.synchronize()
        torch.distributed.all_reduce(
            verdict, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group, async_op=True
        ).wait(timedelta(seconds=AGREEMENT_SECONDS))
    except Exception:
        logger.critical(
            "another rank neither failed nor succeeded as this one did: this one ends",
            exc_info=True,
        )
        # An ordinary exit would wait for the collective.
        os._exit(1)

    return bool(verdict)


def over_ranks(values: Tensor, reduction: Reduction, device: torch.device) -> Tensor:
    """Reduce floats [...] over the ranks; the result is the same on each.

    The values are gathered on `device` and returned on their own device.
    """
    if get_tensor_model_parallel_world_size() == 1:
        return values
    ranks = get_tp_group()
    # [ranks, ...]
    gathered = ranks.all_gather(values.to(device)[None].contiguous(), dim=0)
    return (gathered.sum(0) if reduction == "sum" else gathered.amax(0)).to(values.device)
