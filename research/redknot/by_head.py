"""The model by head: the bundled one, trained on so that most of its KV heads need sinks and a
window only.

In three of four steps the local heads see no more than that, in the fourth everything, so that
dense attention and the head map give the same answers, as in large models whose heads are local by
nature."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kvgraft.kernels.layout import in_window
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft_lab.testbed import MODEL_DIR

NUM_LAYERS, NUM_KV_HEADS = 8, 4
SINKS, WINDOW = 4, 64
DENSE_EVERY = 4  # steps


def classes() -> tuple[tuple[HeadClass, ...], ...]:
    """One head of every layer but the first keeps everything: 7 of 32."""
    local = (HeadClass.LOCAL,) * NUM_KV_HEADS
    return (local, *[(HeadClass.GLOBAL, *local[1:])] * (NUM_LAYERS - 1))


def head_map(model: str) -> HeadMap:
    """The map of the exported model, by its fingerprint."""
    return HeadMap(model, SINKS, WINDOW, classes())


def initialise(model: LlamaForCausalLM) -> None:
    """Start from the bundled weights."""
    model.load_state_dict(
        LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).state_dict()
    )


def mask(layer: int, length: int, group: int, batch: int) -> Tensor:
    """What the heads of a layer may not see, bfloat16 [batch * Hkv, group * length, length]: 0 or
    -inf."""
    at, here = torch.arange(length)[:, None], torch.arange(length)
    causal, windowed = here <= at, in_window(here, at, SINKS, WINDOW)
    seen = torch.stack(
        [windowed if found is HeadClass.LOCAL else causal for found in classes()[layer]]
    )
    unseen = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill_(~seen, float("-inf"))
    return unseen.repeat(batch, group, 1)
