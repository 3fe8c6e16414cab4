"""Tensor-parallel ranks, which compute together: they agree on how it went, or end."""

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
AGREEMENT_SECONDS = 10.0  # between the first rank that is done with a piece of work and the last


def all_succeeded(success: bool) -> bool:
    """Whether this rank and all others have; each calls this when a piece of work has ended,
    however it has.

    A rank that failed alone comes here while others wait for it in a collective inside of vLLM's
    layers, which nobody can call off. If not all have come after AGREEMENT_SECONDS, this process
    ends: vLLM's executor notices, ends the others and then the engine, and clients are told that it
    is dead."""
    if get_tensor_model_parallel_world_size() == 1:
        return success
    verdict = torch.tensor([success], dtype=torch.int32)
    try:
        if current_platform.is_cuda_alike():
            torch.cuda.synchronize()  # what was only queued is not done
        torch.distributed.all_reduce(
            verdict, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group, async_op=True
        ).wait(timedelta(seconds=AGREEMENT_SECONDS))
    except Exception:
        logger.critical(
            "another rank neither failed nor succeeded as this one did: this one ends",
            exc_info=True,
        )
        os._exit(1)  # an ordinary exit would wait for the collective
    return bool(verdict)


def over_ranks(values: Tensor, reduction: Reduction, device: torch.device) -> Tensor:
    """Floats [...], reduced over this rank's heads -> over those of all ranks, the same on each.

    They are gathered on `device` and returned where they were.
    """
    if get_tensor_model_parallel_world_size() == 1:
        return values
    ranks = get_tp_group()
    gathered = ranks.all_gather(values.to(device)[None].contiguous(), dim=0)  # [ranks, ...]
    return (gathered.sum(0) if reduction == "sum" else gathered.amax(0)).to(values.device)
