"""Inputs of chosen layers of vLLM's model, kept for every slot of its cache (cross-query reuse)."""

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from kvgraft.vllm.compat.decoder_layers import DecoderLayer


class ResidualStreams:
    """Residual streams that enter some layers, kept per slot in addition to the KV cache.

    vLLM's steps and our recoveries call the same layer modules, so a hook on these sees both. This
    works in eager mode only, because a compiled graph bypasses hooks.

    Args:
        layers: decoder layers of the model.
        names: names of their attention layers, by which the forward context has the slots of a
            step.
        residual_layers: numbers of the layers to keep.
        num_slots: slots of the cache.
        hidden_size, dtype, device: of the streams.
    """

    def __init__(
        self,
        layers: list[DecoderLayer],
        names: list[str],
        residual_layers: Iterable[int],
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.names = names

        # The last row is for padding, whose slot is -1.
        shape = (num_slots + 1, hidden_size)
        self.states = {
            layer: torch.zeros(shape, dtype=dtype, device=device)
            for layer in sorted(residual_layers)
        }

        for layer in self.states:
            enters = layers[layer].entering
            layers[layer].module.register_forward_pre_hook(
                lambda _, given, named, layer=layer, enters=enters: self._keep(
                    layer, enters(given, named)
                ),
                with_kwargs=True,
            )

    @property
    def residual_layers(self) -> tuple[int, ...]:
        """Numbers of the kept layers."""
        return tuple(self.states)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """Return what entered a layer in slots int64 [n]: hidden state and residual [n, 2, D]."""
        states = self.states[layer][slots]
        return torch.stack((states, torch.zeros_like(states)), dim=1)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy everything kept in slots int64 [n] to other slots."""
        for states in self.states.values():
            states[target] = states[source]

    def _keep(self, layer: int, entering: Tensor) -> None:
        """Keep what enters a layer, in the slots of the current step."""
        slots = get_forward_context().slot_mapping
        if isinstance(slots, dict) and (mine := slots.get(self.names[layer])) is not None:
            self.states[layer][mine] = entering
