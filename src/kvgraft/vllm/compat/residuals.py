"""What enters chosen layers of vLLM's model, kept for every slot of its cache (cross-query
reuse)."""

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from kvgraft.vllm.compat.decoder_layers import DecoderLayer


class ResidualStreams:
    """Beside the KV cache, the residual stream that enters some layers; whoever computes a token
    leaves its own.

    vLLM's steps and our recoveries call the same layer modules, so a hook on these sees both. Eager
    mode only: a compiled graph would pass it by.

    Args:
        layers: the decoder layers of the model.
        names: of their attention layers, by which the forward context knows the slots of a step.
        residual_layers: which of them.
        num_slots: of the cache.
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
        shape = (num_slots + 1, hidden_size)  # the last row is for padding, whose slot is -1
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
        """The layers."""
        return tuple(self.states)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """What entered a layer in these slots int64 [n], as its hidden state and residual: [n, 2,
        D]."""
        states = self.states[layer][slots]
        return torch.stack((states, torch.zeros_like(states)), dim=1)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy all that is kept in some slots int64 [n] to others."""
        for states in self.states.values():
            states[target] = states[source]

    def _keep(self, layer: int, entering: Tensor) -> None:
        slots = get_forward_context().slot_mapping
        if isinstance(slots, dict) and (mine := slots.get(self.names[layer])) is not None:
            self.states[layer][mine] = entering
