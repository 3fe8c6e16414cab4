"""Decoder layers of vLLM's model classes, with one interface for every family."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models import supports_multimodal

from kvgraft.vllm.heads.attention import HeadAttention
from kvgraft.vllm.patches.replacing import replaced


class DecoderLayer:
    """One decoder layer.

    Most families keep a hidden state and a residual apart, which their next norm adds. Others keep
    one sum (Granite, and all models that vLLM runs through transformers). Here every layer has
    both; with one sum the residual is zero.

    Attributes:
        module: vLLM's module of the layer.
        attentions: vLLM's attention layers in it, which know their parts of the cache: one, or one
            for each KV head.
        attention: module that receives all queries, keys and values: the one attention layer, or
            the `HeadAttention` that distributes them.
        block: module with the projections to and from the attention.
        rotary: module that rotates queries and keys, or None.
        keeps_residual: True if hidden state and residual are kept apart.

    Raises:
        ValueError: the layer has neither one attention layer nor one for each KV head.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [part for part in module.modules() if isinstance(part, Attention | MLAAttention)]
        by_head = next((part for part in module.modules() if isinstance(part, HeadAttention)), None)
        if len(found) != 1 and by_head is None:
            raise ValueError(
                f"{type(module).__name__} has {len(found)} attention layers: only one is supported"
            )

        self.module = module
        self.attentions: list[Any] = found
        self.attention: Any = found[0] if by_head is None else by_head
        self.block: Any = next(child for child in module.children() if found[0] in child.modules())
        self.rotary: Any = next(
            (part.rotary_emb for part in module.modules() if hasattr(part, "rotary_emb")), None
        )
        self._signature = inspect.signature(module.forward)
        self.keeps_residual = "residual" in self._signature.parameters

    def __call__(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            positions: int64 [n].
            hidden, residual: [n, D]; the residual is None before the first layer.

        Returns:
            Hidden state and residual, [n, D] each.
        """
        if self.keeps_residual:
            after: tuple[Tensor, Tensor] = self.module(
                positions=positions, hidden_states=hidden, residual=residual
            )
            return after
        states = self.module(positions=positions, hidden_states=hidden)
        return states, torch.zeros_like(states)

    def entering(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
        """Return the residual stream [n, D] that enters the layer, from its call's arguments."""
        arguments = self._signature.bind(*given, **named).arguments
        hidden: Tensor = arguments["hidden_states"]
        residual = arguments.get("residual")
        return hidden if residual is None else hidden + residual

    def project_output(self, attended: Tensor) -> Tensor:
        """Return what the attention [n, Hq d] adds to the residual stream [n, D].

        Only for the families in `IN_STEPS`.
        """
        output: Tensor = self.block.o_proj(attended)[0]
        return output

    def attending(self, forward: Callable[..., Tensor]) -> AbstractContextManager[None]:
        """Replace the attention layer's `forward` within a context. The replacement may call it."""
        return replaced(self.attention, "forward", forward)

    @contextmanager
    def after_attention(self, output: Tensor) -> Iterator[None]:
        """Let the layer run only from behind its attention, within a context.

        The layer takes `output` [n, D] for what its attention adds to the given residual. Only for
        the families in `IN_STEPS`.
        """
        norm = self.module.input_layernorm
        with (
            replaced(norm, "forward", lambda hidden, residual: (hidden, residual)),
            replaced(self.block, "forward", lambda *_, **__: output),
        ):
            yield


class TransformersLayer(DecoderLayer):
    """Decoder layer that vLLM runs through its transformers backend (OLMo 2 and 3).

    Args:
        module: vLLM's module of the layer.
        rotary: module of the model that gives a layer its cosines and sines.
        kind: kind of the layer, where kinds have frequencies of their own.
    """

    def __init__(self, module: nn.Module, rotary: nn.Module, kind: str) -> None:
        super().__init__(module)
        self.rotary = rotary
        by_kind = len(inspect.signature(rotary.forward).parameters) > 2
        self._rotary = partial(rotary, layer_type=kind) if by_kind else rotary

    def __call__(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        states, places = hidden[None], positions[None]
        states = self.module(
            states,
            attention_mask=None,
            position_ids=places,
            position_embeddings=self._rotary(states, places),
        )[0]
        return states, torch.zeros_like(states)

    def entering(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
        return super().entering(given, named)[0]


def language_model_of(model: Any) -> Any:
    """Return the language model inside a loaded multimodal model, or the model itself."""
    return model.get_language_model() if supports_multimodal(model) else model


def layers_of(model: Any) -> list[DecoderLayer]:
    """Return the decoder layers of a loaded language model."""
    inner = model.model
    if not hasattr(inner, "rotary_emb"):
        return [DecoderLayer(layer) for layer in inner.layers]
    kinds = getattr(inner.config, "layer_types", None) or ["full_attention"] * len(inner.layers)
    return [
        TransformersLayer(*each)
        for each in zip(inner.layers, [inner.rotary_emb] * len(kinds), kinds, strict=True)
    ]


def window_of(attention: Any) -> int | None:
    """Return the number of tokens back that an attention layer sees; None for all."""
    window = getattr(attention, "sliding_window", None) or getattr(
        attention, "attention_chunk_size", None
    )
    return None if window is None else int(window)


def embed(model: Any, token_ids: Tensor) -> Tensor:
    """Return what enters the first layer for token ids int64 [n]: [n, D]."""
    states: Tensor = model.embed_input_ids(token_ids)
    # Granite scales its embeddings.
    multiplier = getattr(model.model.config, "embedding_multiplier", 1.0)
    return states if multiplier == 1.0 else states * multiplier


def output_states(model: Any, hidden: Tensor, residual: Tensor, *, keeps_residual: bool) -> Tensor:
    """Return the final norm of what has left the last layer, [n, D] each -> [n, D]."""
    norm = model.model.norm
    normed: Tensor = norm(hidden, residual)[0] if keeps_residual else norm(hidden)
    return normed
