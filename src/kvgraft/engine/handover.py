"""Prefill in one engine, decode in another: what crosses the boundary, as a safetensors file (RedKnot, section 5.5).

A head sends what its next query can see: everything, or, in a cache by head classes, the sinks and the window.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvgraft.engine.sampling import SamplingParams
from kvgraft.engine.sequence import Sequence
from kvgraft.kv.cache import KVCache


class Header(msgspec.Struct, frozen=True):
    """What a payload is. `model` names checkpoint, dtype and head classes; `first_token` is the first of the answer."""

    model: str
    prompt: tuple[int, ...]
    first_token: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Payload:
    """A prompt that has been computed elsewhere.

    Attributes:
        tokens: by page list, int64 [t], the positions that it holds.
        keys, values: by page list, [streams, t, d].
    """

    header: Header
    tokens: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


def save_payload(path: Path, sequence: Sequence, cache: KVCache, model: str) -> None:
    """Write what a sequence that has its first token needs to go on elsewhere."""
    if sequence.lists is None:
        raise ValueError("the sequence holds no pages")
    header = Header(model, tuple(sequence.prompt.tolist()), sequence.tokens[-1], sequence.request.sampling)
    here = torch.arange(sequence.num_computed)
    tensors = {}
    for page_list in range(cache.layout.num_lists):
        tokens = here
        if page_list:
            window = here > sequence.num_computed - cache.layout.window
            tokens = here[(here < cache.layout.sinks) | window]
        slots = sequence.lists.slots[page_list, tokens]
        tensors[f"tokens.{page_list}"] = tokens
        tensors[f"keys.{page_list}"] = cache.keys[:, slots]
        tensors[f"values.{page_list}"] = cache.values[:, slots]
    save_file(tensors, path, {"kvgraft": msgspec.json.encode(header).decode()})


def load_payload(path: Path, cache: KVCache, model: str) -> Payload:
    """Read a payload.

    Raises:
        FileNotFoundError, ValueError: there is none, it is damaged, or it is of another model; the message says why.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    lists = range(cache.layout.num_lists)
    try:
        with safe_open(path, framework="pt") as file:
            header = msgspec.json.decode((file.metadata() or {}).get("kvgraft", ""), type=Header)
            if header.model != model:
                raise ValueError(f"{path} was computed by model {header.model[:12]}..., not by this one")
            found = {name: [file.get_tensor(f"{name}.{i}") for i in lists] for name in ("tokens", "keys", "values")}
    except (SafetensorError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is no payload: {error}") from error
    for tokens, keys, values in zip(*found.values(), strict=True):
        shape = (cache.layout.width, tokens.numel(), cache.keys.shape[-1])
        fits = tokens.dtype == torch.int64 and not ((tokens < 0) | (tokens >= len(header.prompt))).any()
        if not fits or any(x.shape != shape or x.dtype != cache.keys.dtype for x in (keys, values)):
            raise ValueError(f"{path} is no payload: its tensors do not fit its header")
    return Payload(header, **found)


def put_payload(payload: Payload, sequence: Sequence, cache: KVCache) -> None:
    """Write a payload into the pages of a sequence that has them."""
    if sequence.lists is None:
        raise ValueError("the sequence holds no pages")
    for page_list, tokens in enumerate(payload.tokens):
        slots = sequence.lists.slots[page_list, tokens.to(cache.keys.device)]
        cache.keys[:, slots] = payload.keys[page_list].to(cache.keys.device)
        cache.values[:, slots] = payload.values[page_list].to(cache.keys.device)
