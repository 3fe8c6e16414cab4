"""Prefill in one engine, decode in another: KV is handed over as a safetensors file (RedKnot,
section 5.5).

A head sends the tokens that its next query can see. That is every token or, in a cache by head
classes, the sinks and the window.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvgraft.engine.sampling import SamplingParams
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.kernels.layout import in_window
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import StreamLayout

# Names of the cache's pools. Latent attention has only the first.
_POOLS = ("keys", "values")


class Header(msgspec.Struct, frozen=True):
    """Metadata of a payload. `model` names checkpoint, dtype and head classes; `first_token` is the
    first of the answer; `forced_output` is that of the request; `num_dropped` tokens of the prompt
    were not kept."""

    model: str
    prompt: tuple[int, ...]
    first_token: int
    sampling: SamplingParams
    num_dropped: int = 0
    forced_output: tuple[int, ...] = ()

    @property
    def num_held(self) -> int:
        """Number of prompt tokens whose KV the payload holds."""
        return len(self.prompt) - self.num_dropped


@dataclass(frozen=True)
class Payload:
    """A prompt that was computed elsewhere. `pools` holds, for each pool of the cache and each page
    list, a tensor [streams, tokens sent, d]."""

    header: Header
    pools: list[list[Tensor]]


def save_payload(path: Path, sequence: SequenceState, cache: KVCache, model: str) -> None:
    """Write the KV and state with which another engine continues a sequence that has its first
    token."""
    prompt, request = tuple(sequence.prompt.tolist()), sequence.request
    header = Header(
        model,
        prompt,
        sequence.tokens[-1],
        request.sampling,
        sequence.num_dropped,
        tuple(request.forced_output),
    )
    tensors = {}
    for page_list in range(cache.layout.num_lists):
        slots = sequence.pages.slots[
            page_list, _sent(cache.layout, page_list, sequence.num_computed)
        ]
        for name, pool in zip(_POOLS, cache.pools, strict=False):
            tensors[f"{name}.{page_list}"] = pool[:, slots].cpu()

    save_file(tensors, path, {"kvgraft": msgspec.json.encode(header).decode()})


def load_payload(path: Path, cache: KVCache, model: str) -> Payload:
    """Read a payload.

    Raises:
        FileNotFoundError, ValueError: there is none, it is damaged, or it is of another model; the
            message says why.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")

    lists = range(cache.layout.num_lists)
    try:
        with safe_open(path, framework="pt") as file:
            header = msgspec.json.decode((file.metadata() or {}).get("kvgraft", ""), type=Header)
            if header.model != model:
                raise ValueError(
                    f"{path} was computed by model {header.model[:12]}..., not by this one"
                )
            pools = [
                [file.get_tensor(f"{name}.{i}") for i in lists]
                for name in _POOLS[: len(cache.pools)]
            ]
    except (SafetensorError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is no payload: {error}") from error

    if not 0 <= header.num_dropped < len(header.prompt):
        raise ValueError(
            f"{path} is no payload: it dropped {header.num_dropped} of {len(header.prompt)} tokens"
        )

    for page_list, parts in enumerate(zip(*pools, strict=True)):
        count = _sent(cache.layout, page_list, header.num_held).numel()
        shape = (cache.layout.width, count, cache.keys.shape[-1])
        if any(part.shape != shape or part.dtype != cache.keys.dtype for part in parts):
            raise ValueError(f"{path} is no payload: its tensors do not fit its header")

    return Payload(header, pools)


def put_payload(payload: Payload, sequence: SequenceState, cache: KVCache) -> None:
    """Write a payload into the pages of an admitted sequence."""
    for page_list, parts in enumerate(zip(*payload.pools, strict=True)):
        slots = sequence.pages.slots[
            page_list, _sent(cache.layout, page_list, payload.header.num_held)
        ]
        for pool, part in zip(cache.pools, parts, strict=True):
            pool[:, slots] = part.to(slots.device)


def _sent(layout: StreamLayout, page_list: int, num_tokens: int) -> Tensor:
    """Positions of a prompt that the next query sees in a page list: int64 [t]."""
    here = torch.arange(num_tokens)
    return (
        here[in_window(here, torch.tensor(num_tokens), layout.sinks, layout.window)]
        if page_list
        else here
    )
